"""Names, units and meanings of a step's metrics, in one table.

Lines of `metrics.jsonl` and columns of `layers.jsonl` have flat names, the keys of `METRICS`. W&B
and TensorBoard show metrics by section, such as `balance/imbalance_after`. Metrics for which
Megatron has a name appear under that name, too, so that dashboards for Megatron work.

The tier `brief` has the metrics of the whole step; `detailed` adds those of each layer, such as
`balance/imbalance_after_layer_3`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_KEYS = 1000
"""Most names of a step in W&B and TensorBoard, unless a program sets another limit."""

SECTIONS = ("train", "balance", "cost", "system")
"""Sections of the metrics, in the order in which they appear."""

TIERS = ("brief", "detailed")
"""Metrics of the step alone, or of each layer, too."""

HOT = 4
"""A hot expert has more than so many times the mean load of its layer's experts."""


class Metric(NamedTuple):
    """One metric of a step."""

    section: str
    """One of `SECTIONS`."""
    unit: str
    """Empty for counts and ratios."""
    meaning: str
    """In one line."""


def _spread(what: str, of: str) -> dict[str, Metric]:
    """Return the metrics of percentiles and of the largest value."""
    words = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile", "max": "largest"}
    return {
        f"{what}_{suffix}": Metric("balance", "", f"{of}: {word} over layers and microbatches")
        for suffix, word in words.items()
    }


METRICS: dict[str, Metric] = {
    "loss": Metric("train", "", "mean over all tokens of the step"),
    "eval_loss": Metric("train", "", "loss over the validation batches"),
    "grad_norm": Metric("train", "", "norm of all gradients together, before clipping"),
    "lr": Metric("train", "", "learning rate"),
    "skipped": Metric("train", "", "1 if the optimizer's step was left out"),
    "tokens": Metric("train", "tokens", "tokens of all steps so far"),
    "imbalance_before": Metric(
        "balance", "", "busiest rank's load / mean, if experts stay at home: mean"
    ),
    **_spread("imbalance_before", "imbalance if experts stay at home"),
    "imbalance_after": Metric("balance", "", "busiest rank's load / mean, as computed: mean"),
    **_spread("imbalance_after", "imbalance as computed"),
    "bound_gap": Metric("balance", "", "busiest rank's load / least that any plan reaches - 1"),
    "rows_over_capacity": Metric(
        "balance", "", "rows dropped beyond moe_expert_rank_capacity_factor, on all ranks"
    ),
    "maxvio": Metric("balance", "", "hottest expert's load / mean - 1: mean"),
    "replicas": Metric("balance", "", "replicas of a layer in a microbatch: mean"),
    "replicas_max": Metric("balance", "", "replicas of a layer in a microbatch: largest"),
    "rank_sends_max": Metric("balance", "", "replicas that the busiest sender sends: largest"),
    "slot_use": Metric("balance", "", "part of the slots that hold a replica"),
    "dead_experts": Metric("balance", "", "experts of a layer without a token in the step: mean"),
    "hot_experts": Metric("balance", "", f"experts of a layer beyond {HOT} x the mean load: mean"),
    "max_cum_overload": Metric(
        "balance", "", "most assignments that a rank holds between forward and backward / mean"
    ),
    "max_cum_overload_routed": Metric("balance", "", "the same if experts stay at home"),
    "load_accuracy": Metric("balance", "", "part of predicted assignments that fit the load"),
    "choice_accuracy": Metric("balance", "", "part of the choices that were predicted"),
    "hit_replicas": Metric("balance", "", "replicas sent ahead and used: mean"),
    "topped_up_replicas": Metric("balance", "", "replicas moved when the load was known: mean"),
    "wasted_replicas": Metric("balance", "", "replicas sent ahead and not used: mean"),
    "pushed_bytes": Metric("cost", "bytes", "weights of replicas, of a step on all ranks"),
    "pulled_bytes": Metric("cost", "bytes", "gradients of replicas, of a step on all ranks"),
    "plan_ms": Metric("cost", "ms", "planning, of a step on the slowest rank"),
    "materialize_ms": Metric("cost", "ms", "weights under way, of a step on the slowest rank"),
    "materialize_exposed_ms": Metric("cost", "ms", "the part of it that a rank waits for"),
    "reduce_ms": Metric("cost", "ms", "gradients under way, of a step on the slowest rank"),
    "reduce_exposed_ms": Metric("cost", "ms", "the part of it that a rank waits for"),
    "sent_ahead_bytes": Metric("cost", "bytes", "weights moved before the load was known: mean"),
    "topped_up_bytes": Metric("cost", "bytes", "weights moved when the load was known: mean"),
    "link_bandwidth": Metric("cost", "bytes/s", "measured, for objective time"),
    "assignment_time": Metric("cost", "s", "measured, for objective time"),
    "step_ms": Metric("system", "ms", "time of the step on rank 0"),
    "tokens_per_s": Metric("system", "tokens/s", "tokens of the global batch over that time"),
    "tflops_per_gpu": Metric("system", "TFLOP/s", "the model's arithmetic over time and ranks"),
    "memory_bytes": Metric("system", "bytes", "most memory that a rank had allocated"),
}
"""By flat name, in the order in which they appear."""

MEGATRON_NAMES = {
    "imbalance_after": "moe/avg_overload_factor",
    "imbalance_after_max": "moe/max_overload_factor",
    "imbalance_before": "moe/avg_overload_factor_routed",
    "imbalance_before_max": "moe/max_overload_factor_routed",
    "max_cum_overload": "moe/max_cum_overload_factor",
    "max_cum_overload_routed": "moe/max_cum_overload_factor_routed",
}
"""Megatron's names: of loads as computed, or with `_routed` of loads if experts stay at home."""

LAYER_METRICS = (
    "imbalance_before",
    "imbalance_after",
    "imbalance_before_max",
    "imbalance_after_max",
    "replicas",
)
"""Columns of `layers.jsonl` with one number a layer; `_max` is over the step's microbatches."""


def section_of(name: str) -> str:
    """Return the section of a flat name; metrics without an entry in `METRICS` are `other`.

    >>> section_of("loss"), section_of("choice_accuracy_layer_3"), section_of("new")
    ('train', 'balance', 'other')
    """
    metric = METRICS.get(re.sub(r"_layer_\d+$", "", name))
    return metric.section if metric is not None else "other"


def shown(
    metrics: Mapping[str, Any],
    layers: Mapping[str, Any] | None = None,
    *,
    tier: str = "brief",
    max_keys: int,
) -> dict[str, float]:
    """Return the metrics of a step for W&B and TensorBoard, by name with section.

    The arguments are the step's lines of `metrics.jsonl` and `layers.jsonl`, one of `TIERS` and the
    largest number of names. Metrics of the step come first, then layers, those with the largest
    imbalance before balancing first; a layer has all its names or none.

    >>> line = {"step": 3, "loss": 2.0, "imbalance_after": 1.1}
    >>> shown(line, max_keys=9)
    {'train/loss': 2.0, 'balance/imbalance_after': 1.1, 'moe/avg_overload_factor': 1.1}
    >>> layers = {"layer": [2, 3], "imbalance_before": [1.5, 1.7], "imbalance_after": [1.0, 1.1]}
    >>> list(shown(line, layers, tier="detailed", max_keys=7))[3:]  # doctest: +NORMALIZE_WHITESPACE
    ['balance/imbalance_before_layer_3', 'moe/avg_overload_factor_routed_layer_2',
     'balance/imbalance_after_layer_3', 'moe/avg_overload_factor_layer_2']
    """
    keys: dict[str, float] = {}
    for name, value in metrics.items():
        if name != "step":
            keys |= _keys(name, value)
    keys = dict(list(keys.items())[:max_keys])
    if tier == "brief" or not layers:
        return keys
    imbalances = layers["imbalance_before"]
    for place in sorted(range(len(imbalances)), key=lambda place: -imbalances[place]):
        of_layer: dict[str, float] = {}
        for name in LAYER_METRICS:
            if name in layers:
                of_layer |= _keys(name, layers[name][place], layers["layer"][place])
        if len(keys) + len(of_layer) > max_keys:
            break
        keys |= of_layer
    return keys


def _keys(name: str, value: float, layer: int | None = None) -> dict[str, float]:
    """Return a metric under its own name and Megatron's, which counts layers from 0."""
    own, theirs = ("", "") if layer is None else (f"_layer_{layer}", f"_layer_{layer - 1}")
    keys = {f"{section_of(name)}/{name}{own}": value}
    if name in MEGATRON_NAMES:
        keys[MEGATRON_NAMES[name] + theirs] = value
    return keys
