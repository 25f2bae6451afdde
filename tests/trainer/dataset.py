"""A small dataset of two domains, and the settings of a run on it that takes seconds."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from megatron_ext.cpu_platform import enable_cpu_platform


def build(folder: Path) -> Path:
    """Return the folder of a new dataset."""
    if not torch.cuda.is_available():
        enable_cpu_platform()
    from megatron_ext.data.build import build_dataset

    words = {"letters": "alpha beta gamma delta", "numbers": "12 345 6789 0"}
    domains = {}
    for name, vocabulary in words.items():
        chooser = random.Random(name)
        file = folder / f"{name}.txt"
        file.write_text(" ".join(chooser.choices(vocabulary.split(), k=2000)))
        domains[name] = [file]
    out = folder / "data"
    build_dataset(
        domains,
        out,
        tokenizer_file=None,
        eod_token=None,
        strict=True,
        overwrite=False,
        on_bytes=lambda _: None,
    )
    return out


def overrides(data: Path, run_dir: Path) -> list[str]:
    """Return the overrides of a run of 8 steps on 2 expert-parallel ranks."""
    return [
        f"data.path={data}",
        f"run_dir={run_dir}",
        "steps=8",
        "optimizer.warmup_steps=2",
        "model.num_layers=2",
        "model.hidden_size=16",
        "model.num_attention_heads=2",
        "model.num_experts=4",
        "model.expert_hidden_size=32",
        "parallel.ep_size=2",
        "data.sequence_length=16",
        "data.micro_batch_size=2",
    ]
