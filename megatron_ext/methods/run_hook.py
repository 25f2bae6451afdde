"""What a method may do in a run of the training program, beside planning.

A setting of the section `data` names a file; `RUN_HOOKS` says which hook reads the file. The
training program calls the hook and knows no method by name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megatron_ext.config import BalanceConfig
from megatron_ext.methods import RUN_HOOKS

Reader = Callable[..., Iterator[dict[str, Tensor]]]
"""Reads a rank's microbatches; called as `data.mixing.microbatches` is."""


@dataclass(frozen=True, kw_only=True)
class RunHook:
    """Functions that a run calls with the hook's file; a hook without a function leaves it out."""

    problems: Callable[[Path, Any, BalanceConfig, int | None], list[str]]
    """Returns every reason why the run cannot follow the file. Arguments after the file: the
    settings of TransformerConfig, what the balancer may do, and the number of ids in the dataset,
    None if the dataset is not there."""
    reader: Callable[[Path, int], Reader] | None = None
    """Returns what reads the training data, given the samples of an optimizer step."""
    attach: Callable[[Path], Callable[[nn.Module], object]] | None = None
    """Returns what is called with each model chunk before the chunk is wrapped."""


def run_hooks(data: Any) -> Iterator[tuple[str, Path, RunHook]]:
    """Yield the hooks that a run asks for in its section `data`, each with its setting and file."""
    for name, where in RUN_HOOKS.items():
        if path := getattr(data, name):
            yield f"data.{name}", Path(path), pkgutil.resolve_name(where)
