"""Refuses quantized models whose sizes, GPU or Transformer Engine are not for the recipe."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.utils import get_te_version, is_te_min_version

_FORMATS = {
    "tensorwise": (16, "check_fp8_support"),
    "blockwise": (16, "check_fp8_block_scaling_support"),
    "mxfp8": (32, "check_mxfp8_support"),
    "nvfp4": (32, "check_nvfp4_support"),
}
"""By recipe: what sizes of weights must be multiples of in Transformer Engine's products, and its
function that knows whether the GPU has the format."""

_LEAST_ENGINE = "2.20"
"""Version of Transformer Engine whose own functions quantize mains for a push; 2.18 lacks some."""


def recipe_problem(config: Any, recipe_field: str, recipe: str) -> str | None:
    """Return what excludes a recipe, the value of `recipe_field`: a size, or this GPU; or None."""
    least, check = _FORMATS[recipe]
    wrong = [
        f"{field} ({size}{f' / {shards} shards' if shards > 1 else ''})"
        for field, shards in (
            ("hidden_size", 1),
            ("moe_latent_size", 1),
            ("moe_ffn_hidden_size", getattr(config, "expert_tensor_parallel_size", None) or 1),
        )
        if (size := getattr(config, field, None)) is not None and size % (least * shards)
    ]
    flag = f"--{recipe_field.replace('_', '-')}"
    if wrong:
        return (
            f"{' and '.join(wrong)} must be a multiple of {least} with {recipe_field}={recipe} "
            f"(change {flag})"
        )
    if torch.cuda.is_available():
        from transformer_engine.pytorch import quantization

        is_there, reason = getattr(quantization, check)()
        if not is_there:
            return f"{recipe_field} ({recipe!r}) is not for this GPU: {reason} (change {flag})"
    return None


def engine_problems(setting: str) -> list[str]:
    """Check Transformer Engine's version, where it is installed, for a model with `setting`."""
    if find_spec("transformer_engine") is None or is_te_min_version(_LEAST_ENGINE):
        return []
    return [
        f"Transformer Engine ({get_te_version()}) must be >= {_LEAST_ENGINE} with {setting}: an "
        "older one has not all functions that quantize what a replica gets (install "
        f"'transformer-engine[pytorch]>={_LEAST_ENGINE}')"
    ]
