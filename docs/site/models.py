"""Writes the table of docs/models.md: what a slot costs with known models.

    python -m docs.site.models

A dry run counts one layer of each model: a slot is as large as one expert, in any number of layers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import yaml

from megatron_ext.config import BalanceConfig
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.recipes import shipped_recipes
from megatron_ext.trainer.config import (
    DataConfig,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)

PAGE = Path(__file__).parents[1] / "models.md"
BLOCK = re.compile(
    r"(?<=<!-- written by python -m docs.site.models -->\n).*?(?=<!-- end -->)", re.S
)


class Sizes(NamedTuple):
    """What decides the size of a model's expert."""

    hidden_size: int
    expert_hidden_size: int
    num_experts: int
    topk: int
    has_bias: bool = False


MODELS: dict[str, str | Sizes] = {
    "Qwen3-30B-A3B": "qwen3_30b",
    "Qwen3-235B-A22B": "qwen3_235b",
    "DeepSeek-V3, R1": "deepseek_v3",
    "Kimi K2": "kimi_k2",
    "GLM-4.5-Air": "glm45_106b",
    "GLM-4.5": "glm45_355b",
    "Mixtral 8x7B": "mixtral_8x7b",
    "Mixtral 8x22B": Sizes(6144, 16384, 8, 2),
    "GPT-OSS 20B": Sizes(2880, 2880, 32, 4, has_bias=True),
    "GPT-OSS 120B": Sizes(2880, 2880, 128, 4, has_bias=True),
    "Llama 4 Scout": Sizes(5120, 8192, 16, 1),
    "Llama 4 Maverick": Sizes(5120, 8192, 128, 1),
}
"""By name: a file of `recipes/model`, or sizes of the published configuration. All have gated
experts (two matrices into their width)."""


def table() -> str:
    """Return the table, in GB (10^9 bytes)."""
    slots = BalanceConfig().slots
    rows = [
        "| model | experts of a layer, of a token | weights of a slot | gradients of a slot "
        f"| a rank with {slots} slots | recipes here |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name, model in MODELS.items():
        sizes = model if isinstance(model, Sizes) else _sizes_of(model)
        weights, gradients = _slot_bytes(sizes)
        rows.append(
            f"| {name} | {sizes.num_experts}, {sizes.topk} | {weights / 1e9:.3f} "
            f"| {gradients / 1e9:.3f} | {slots * (weights + gradients) / 1e9:.2f} "
            f"| {', '.join(f'`{each}`' for each in _recipes_with(model)) or 'none'} |"
        )
    return "\n".join(rows) + "\n"


def _sizes_of(model: str) -> Sizes:
    sizes = yaml.safe_load((shipped_recipes() / "model" / f"{model}.yaml").read_text())["model"]
    if sizes["activation"] != "swiglu":
        raise ValueError(f"{model}: the experts must be gated")
    return Sizes(*(sizes[name] for name in Sizes._fields[:4]))


def _recipes_with(model: str | Sizes) -> list[str]:
    return [
        path.stem
        for path in sorted(shipped_recipes().glob("*.yaml"))
        if {"model": model} in yaml.safe_load(path.read_text())["defaults"]
    ]


def _slot_bytes(sizes: Sizes) -> tuple[int, int]:
    """Count a slot's weights and gradients, as a dry run for a GPU does."""
    enable_cpu_platform()
    from megatron_ext.trainer.model.dry_run import dry_run

    ranks = 4
    config = TrainConfig(
        model=ModelConfig(
            num_layers=1,
            hidden_size=sizes.hidden_size,
            num_attention_heads=1,
            num_experts=sizes.num_experts,
            topk=sizes.topk,
            expert_hidden_size=sizes.expert_hidden_size,
            activation="swiglu",
            precision="bf16",
        ),
        parallel=ParallelConfig(ep_size=ranks),
        data=DataConfig(path="", sequence_length=8, micro_batch_size=1, global_batch_size=ranks),
        hardware=HardwareConfig(summary="a GPU"),
        megatron={"add_bias_linear": sizes.has_bias, "moe_router_pre_softmax": True},
    )
    (stage,) = dry_run(config, num_ranks=ranks, vocab_size=256).stages
    return stage.slots // stage.num_slots, stage.slot_gradients // stage.num_slots


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(BLOCK.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
