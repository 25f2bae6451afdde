"""Which metrics are drawn together, and in which order: in TensorBoard's layout and W&B's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_ext.telemetry.names import SECTIONS, section_of

STEP = "train/step"
"""The axis of all curves."""

COUNT_OF_LAYERS = (
    "Names in `balance/` count layers from 1, as Megatron's `layer_number` does. Megatron's own "
    "names in `moe/` count them from 0: `balance/imbalance_after_layer_1` and "
    "`moe/avg_overload_factor_layer_0` are one number."
)
"""Said on the dashboards, as one run has both."""

PANELS: Mapping[str, tuple[str, ...]] = {
    "Loss": ("loss", "eval_loss"),
    "Gradient norm": ("grad_norm",),
    "Learning rate": ("lr",),
    "Optimizer steps left out": ("skipped",),
    "Tokens so far": ("tokens",),
    "Imbalance, before and after": ("imbalance_before", "imbalance_after"),
    "Imbalance as computed, over layers and microbatches": (
        *("imbalance_after_p50", "imbalance_after_p90", "imbalance_after_p99"),
        "imbalance_after_max",
    ),
    "Imbalance if experts stay at home, over layers and microbatches": (
        *("imbalance_before_p50", "imbalance_before_p90", "imbalance_before_p99"),
        "imbalance_before_max",
    ),
    "Above what any plan reaches": ("bound_gap",),
    "Rows dropped beyond the rank capacity factor": ("rows_over_capacity",),
    "Replicas of a layer": ("replicas", "replicas_max"),
    "Replicas that the busiest rank sends": ("rank_sends_max",),
    "Slots in use": ("slot_use",),
    "Hottest expert over the mean (MaxVio)": ("maxvio",),
    "Dead and hot experts": ("dead_experts", "hot_experts"),
    "Most activations held, over the mean": ("max_cum_overload", "max_cum_overload_routed"),
    "What was predicted": ("load_accuracy", "choice_accuracy"),
    "Replicas sent ahead": ("hit_replicas", "topped_up_replicas", "wasted_replicas"),
    "What ranks wait for (ms of a step)": (
        *("plan_ms", "materialize_exposed_ms", "reduce_exposed_ms"),
    ),
    "What is under way, waited for or not (ms of a step)": ("materialize_ms", "reduce_ms"),
    "Bytes moved": ("pushed_bytes", "pulled_bytes"),
    "Bytes sent ahead": ("sent_ahead_bytes", "topped_up_bytes"),
    "Measured bytes per second": ("link_bandwidth",),
    "Measured seconds per assignment": ("assignment_time",),
    "Tokens per second": ("tokens_per_s",),
    "Time of a step (ms)": ("step_ms",),
    "TFLOP/s per GPU": ("tflops_per_gpu",),
    "Memory of the fullest rank (bytes)": ("memory_bytes",),
}
"""Flat names of metrics by the title of their panel; a panel's metrics are of one section."""


def names_of(title: str) -> list[str]:
    """Return the metrics of a panel as W&B and TensorBoard show them.

    >>> names_of("Loss")
    ['train/loss', 'train/eval_loss']
    """
    return [f"{section_of(name)}/{name}" for name in PANELS[title]]


def panels_by_section() -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yield each section with its panels: names as W&B and TensorBoard show them, by title."""
    for section in SECTIONS:
        titles = [title for title, names in PANELS.items() if section_of(names[0]) == section]
        yield section, {title: names_of(title) for title in titles}
