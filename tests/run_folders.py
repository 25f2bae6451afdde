"""Run directories as a training writes them, made up: of any size, in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_run(
    folder: Path,
    *,
    strategy: str,
    steps: int = 40,
    layers: int = 3,
    ranks: int = 4,
    slots: int = 2,
    speed: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write `config.yaml`, `about.json`, `metrics.jsonl` and `layers.jsonl` of a run.

    Args:
        folder: The run directory, which is made.
        strategy: How it balances: `none`, `ideal`, or anything else for nearly even ranks.
        steps: Steps of the run.
        layers: MoE layers, numbered from 1; the last is the most unequal.
        ranks: Ranks of the EP group, with 4 experts each.
        slots: Slots of a rank.
        speed: Throughput / that of the run without balancing.
        seed: Of the loads.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    by_layer = np.linspace(0.5, 1.0, layers)[:, None]
    lines, layer_lines = [], []
    for step in range(1, steps + 1):
        before = 100 + 900 * by_layer * random.random((layers, ranks)) ** 2
        after = before if strategy == "none" else _evened(before, strategy, random)
        imbalances = [_imbalance(before), _imbalance(after)]
        lines.append(_metrics(step, strategy, speed, imbalances, random))
        layer_lines.append(_layers(step, before, after, imbalances, strategy, slots, random))
    _write_lines(folder / "metrics.jsonl", lines)
    _write_lines(folder / "layers.jsonl", layer_lines)
    about = {
        "started": "2026-11-22T10:00:00+00:00",
        "host": "node-7",
        "cpus": 96,
        "gpus": ["H200"] * 8,
        "num_ranks": ranks,
        "versions": {"python": "3.12.1", "torch": "2.13.0", "megatron-core": "0.19.2"},
    }
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "config.yaml").write_text(
        f"steps: {steps}\nrun_dir: {folder}\n"
        f"balance:\n  strategy: {strategy}\n  slots: {slots}\n  tolerance: 0.01\n"
        "hardware:\n  constants:\n    peak_flops_per_s: {value: 989e12, source: made up}\n"
    )
    return folder


def _evened(before: np.ndarray, strategy: str, random: np.random.Generator) -> np.ndarray:
    """The same totals, nearly or quite even."""
    noise = 0 if strategy == "ideal" else 0.03
    return before.mean(axis=1, keepdims=True) * (1 + noise * random.random(before.shape))


def _imbalance(loads: np.ndarray) -> np.ndarray:
    return loads.max(axis=1) / loads.mean(axis=1)


def _metrics(
    step: int,
    strategy: str,
    speed: float,
    imbalances: list[np.ndarray],
    random: np.random.Generator,
) -> dict[str, Any]:
    step_ms = (3 if step <= 2 else 1) * (200 + 5 * np.sin(step)) / speed
    metrics = {
        "step": step,
        "loss": 4 + 6 * 0.99**step + 1e-3 * random.random(),
        "imbalance_before": imbalances[0].mean(),
        "imbalance_after": imbalances[1].mean(),
        "replicas": 0.0 if strategy in ("none", "ideal") else 5.0,
        "step_ms": step_ms,
        "tokens_per_s": 4e6 / step_ms,
        "tflops_per_gpu": 9e4 / step_ms,
    }
    if strategy not in ("none", "ideal"):
        shares = {"plan": 0.003, "materialize": 0.012, "reduce": 0.006}
        metrics |= {f"{name}_ms": share * step_ms for name, share in shares.items()}
        metrics |= {"materialize_exposed_ms": 0.001 * step_ms, "reduce_exposed_ms": 0.0}
    return metrics


def _layers(
    step: int,
    before: np.ndarray,
    after: np.ndarray,
    imbalances: list[np.ndarray],
    strategy: str,
    slots: int,
    random: np.random.Generator,
) -> dict[str, Any]:
    layers, ranks = before.shape
    held = np.full((ranks, slots), -1)
    if strategy not in ("none", "ideal"):
        hot = np.argsort(before[-1])
        for receiver in hot[: ranks // 2]:
            held[receiver, 0] = 4 * hot[-1 - random.integers(max(1, ranks // 4))] + random.integers(
                4
            )
    return {
        "step": step,
        "layer": list(range(1, layers + 1)),
        "imbalance_before": np.round(imbalances[0], 4).tolist(),
        "imbalance_after": np.round(imbalances[1], 4).tolist(),
        "imbalance_before_max": np.round(imbalances[0] * 1.1, 4).tolist(),
        "imbalance_after_max": np.round(imbalances[1] * 1.05, 4).tolist(),
        "replicas": [0.0 if strategy in ("none", "ideal") else 5.0] * layers,
        "rank_loads_before": before.astype(int).tolist(),
        "rank_loads_after": after.astype(int).tolist(),
        "worst": {
            "layer": layers,
            "microbatch": 0,
            "rank_loads_before": before[-1].astype(int).tolist(),
            "rank_loads_after": after[-1].astype(int).tolist(),
            "slots": held.tolist(),
            "num_experts": 4 * ranks,
        },
    }


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
