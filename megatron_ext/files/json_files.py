"""JSON that every reader takes: null for numbers that it cannot write."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON, with null for what is no finite number.

    >>> json_text({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Put None for numbers that JSON cannot write, as the loss of a run that diverged."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
