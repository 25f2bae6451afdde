"""A replay's results in the form of the papers' tables and figures.

An exhibit is a table of numbers. JSON and Markdown hold that table; a page draws its columns
over the first column. Where a paper shows its models and data, an exhibit shows one trace.

Legend: B loads, R ranks of the EP group, E logical experts, L layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import (
    home_loads,
    imbalances,
    load_accuracy,
    load_imbalance_rates,
)
from megatron_ext.balance.solve import plan_layout
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.files.loads import Loads
from megatron_ext.files.tables import markdown_table
from megatron_ext.methods.craft.craft import CRAFT
from megatron_ext.methods.craft.place import estimate_gains, replica_counts

BEFORE = "before"
"""Name under which exhibits show the loads without balancing."""

_MOST_ROWS = 20
"""Most rows of a figure in Markdown; of more, rows are dropped evenly."""

_SAMPLE_LAYERS = 4
"""Layers that CRAFT's Figure 9 shows."""

_SHARES = np.arange(1, 21) / 20
"""Shares of the loads at which a distribution is sampled."""

_IMBALANCE = "imbalance (busiest rank / mean)"

_GROUPS = 4
"""Groups of loads, by their imbalance without balancing, in the lower part of Figure 15."""


@dataclass(frozen=True)
class Exhibit:
    """One table or figure."""

    name: str
    """Paper and number, such as `ultraep_table_4`."""

    title: str
    """What it shows; ends without a period."""

    form: Literal["table", "lines", "bars"]
    """How it is drawn: figures as lines or bars over the first column."""

    columns: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    """Rows as long as `columns`; all entries after the first are numbers."""

    quantity: str = ""
    """For a figure, the label of the axis of its numbers."""


def make_exhibits(
    loads: Loads,
    replayed: Mapping[str, Mapping[str, np.ndarray]],
    settings: PlanSettings,
    *,
    slots: int,
    nvlink_domain: int | None,
    on_load: Callable[[int], object] = lambda count: None,
) -> list[Exhibit]:
    """Show a replay as the papers would.

    Args:
        loads: The loads that were replayed.
        replayed: The result of `replay.replay` for them.
        settings: What planners were asked for.
        slots: Replicas a rank can hold, as asked for.
        nvlink_domain: Ranks per NVLink domain; one domain if None.
        on_load: Called with 1 after every load that is replayed once more, `more_replays` times.

    Returns:
        UltraEP's Table 4 and Figures 6 and 15; Libra's Table 1 if a load has a prediction or an
        earlier load of its layer; Sem-MoE's Figure 5b; and CRAFT's Figures 8 and 9 if `craft` was
        replayed with slots.
    """
    before = imbalances(home_loads(loads.load)).numpy()
    after = {BEFORE: before} | {name: of["imbalance"] for name, of in replayed.items()}
    exhibits = [
        _ultraep_table_4(loads, replayed),
        _ultraep_figure_6(loads, after),
        _ultraep_figure_15_upper(after),
        _ultraep_figure_15_lower(after),
        _sem_moe_figure_5b(loads, replayed),
    ]
    accuracies = _libra_table_1(loads)
    if accuracies.rows:
        exhibits.append(accuracies)
    layout = _craft_layout(loads, replayed, slots, nvlink_domain)
    if layout is not None:
        exhibits += _craft_figures(loads, settings, layout, on_load)
    return exhibits


def more_replays(
    loads: Loads, replayed: Iterable[str], *, slots: int, nvlink_domain: int | None
) -> int:
    """Return how many loads `make_exhibits` replays, each as often as CRAFT compares numbers."""
    layout = _craft_layout(loads, replayed, slots, nvlink_domain)
    return 0 if layout is None else len(loads) * len(replica_counts(layout))


def _craft_layout(
    loads: Loads, replayed: Iterable[str], slots: int, nvlink_domain: int | None
) -> ExpertLayout | None:
    """Layout for CRAFT's figures; None if they are not to be shown."""
    if CRAFT.name not in replayed or slots == 0:
        return None
    _, ranks, experts = loads.load.shape
    return plan_layout(
        CRAFT.name, num_experts=experts, ep_size=ranks, slots=slots, nvlink_domain=nvlink_domain
    )


def _ultraep_table_4(loads: Loads, replayed: Mapping[str, Mapping[str, np.ndarray]]) -> Exhibit:
    """Means over the loads; the paper has means over its simulations."""
    total = _totals(loads)
    metrics: dict[str, Callable[[Mapping[str, np.ndarray]], np.ndarray]] = {
        "imbalance": lambda of: of["imbalance"],
        "solving time, ms": lambda of: of["solve_us"] / 1e3,
        "replicas": lambda of: of["replicas"],
        "most replicas of an expert": lambda of: of["max_fanout"],
        "in-flight token ratio": lambda of: of["remote_assignments"] / total,
    }
    rows: list[tuple[str | float, ...]] = [
        (name, *(float(metric(of).mean()) for of in replayed.values()))
        for name, metric in metrics.items()
    ]
    return Exhibit(
        "ultraep_table_4",
        "UltraEP, Table 4: balancing metrics, mean of the loads",
        "table",
        ("metric", *replayed),
        rows,
    )


def _ultraep_figure_6(loads: Loads, after: Mapping[str, np.ndarray]) -> Exhibit:
    """Mean over the layers of each microbatch."""
    layers = np.array(loads.layers())
    moment = np.zeros(len(loads), dtype=np.int64)
    for layer in np.unique(layers):
        moment[layers == layer] = np.arange((layers == layer).sum())
    curves = [np.bincount(moment, values) / np.bincount(moment) for values in after.values()]
    return Exhibit(
        "ultraep_figure_6",
        "UltraEP, Figure 6: imbalance in the order of microbatches, mean over layers",
        "lines",
        ("microbatch", *after),
        _rows(np.arange(len(curves[0])), *curves),
        _IMBALANCE,
    )


def _ultraep_figure_15_upper(after: Mapping[str, np.ndarray]) -> Exhibit:
    """Distributions, turned by 90 degrees: the imbalance that a share of the loads stays below."""
    quantiles = [np.quantile(of, _SHARES, method="inverted_cdf") for of in after.values()]
    return Exhibit(
        "ultraep_figure_15_upper",
        "UltraEP, Figure 15, upper: imbalance within which a share of the loads is",
        "lines",
        ("share of the loads", *after),
        _rows(_SHARES, *quantiles),
        _IMBALANCE,
    )


def _ultraep_figure_15_lower(after: Mapping[str, np.ndarray]) -> Exhibit:
    """Loads in four groups by their imbalance; the paper draws loads of given imbalances."""
    groups = np.array_split(np.argsort(after[BEFORE], kind="stable"), _GROUPS)
    groups = [group for group in groups if len(group)]
    means = [[values[group].mean() for group in groups] for values in after.values()]
    return Exhibit(
        "ultraep_figure_15_lower",
        "UltraEP, Figure 15, lower: imbalance after by that before, each a quarter of the loads",
        "lines",
        ("imbalance before", *after),
        _rows(means[0], *means),
        _IMBALANCE,
    )


def _sem_moe_figure_5b(loads: Loads, replayed: Mapping[str, Mapping[str, np.ndarray]]) -> Exhibit:
    total = _totals(loads)
    by_home = loads.load.unflatten(-1, (loads.load.shape[1], -1)).sum(-1)  # [B, R, home R]
    travel = by_home.sum((1, 2)) - by_home.diagonal(dim1=1, dim2=2).sum(-1)
    rates: dict[str, tuple[np.ndarray, np.ndarray]] = {
        BEFORE: (
            1 - travel.numpy() / total,
            load_imbalance_rates(home_loads(loads.load)).numpy(),
        )
    }
    for name, of in replayed.items():
        rates[name] = 1 - of["remote_assignments"] / total, of["load_imbalance_rate"]
    return Exhibit(
        "sem_moe_figure_5b",
        "Sem-MoE, Figure 5b: choices on the token's rank / all; busiest rank / median of ranks",
        "bars",
        ("strategy", "local activation rate", "load-imbalance rate"),
        [(name, float(lar.mean()), float(lir.mean())) for name, (lar, lir) in rates.items()],
        "rate, mean of the loads",
    )


def _libra_table_1(loads: Loads) -> Exhibit:
    """How well loads are known beforehand: by the router, and by the layer's last load.

    The paper counts tokens whose experts are predicted. The number here is at least as large,
    because one token's wrong expert may make up for another token's. The router's column drops
    loads without a prediction; the other column drops the first load of each layer. Columns without
    data are dropped; a layer is listed only if it has data in every remaining column.
    """
    layers = np.array(loads.layers())
    by_router: dict[int, list[float]] = {}
    by_last: dict[int, list[float]] = {}
    for layer in np.unique(layers).tolist():
        of_layer = np.flatnonzero(layers == layer).tolist()
        known = [(loads.prediction(b), loads.load[b]) for b in of_layer]
        by_router[layer] = [load_accuracy(said, came) for said, came in known if said is not None]
        pairs = itertools.pairwise(of_layer)
        by_last[layer] = [load_accuracy(loads.load[a], loads.load[b]) for a, b in pairs]
    sources = {"last load of the layer": by_last}
    if any(by_router.values()):
        sources["router, a layer earlier"] = by_router
    rows: list[tuple[str | float, ...]] = [
        (f"layer {layer}", *(float(np.mean(of[layer])) for of in sources.values()))
        for layer in by_last
        if all(of[layer] for of in sources.values())
    ]
    return Exhibit(
        "libra_table_1",
        "Libra, Table 1: part of the predicted assignments that fit the experts' loads",
        "table",
        ("layer", *sources),
        rows,
    )


def _craft_figures(
    loads: Loads,
    settings: PlanSettings,
    layout: ExpertLayout,
    on_load: Callable[[int], object],
) -> list[Exhibit]:
    estimate = estimate_gains(loads, layout, settings, on_load=on_load)
    counts = np.array([0, *estimate.compared])
    gains = np.concatenate([np.zeros((len(estimate.gains), 1)), estimate.gains], axis=1)
    # From the layer that gains least to the layer that gains most.
    order = np.argsort(gains[:, -1], kind="stable")
    number = min(_SAMPLE_LAYERS, len(order))
    samples = order[np.linspace(0, len(order) - 1, number).round().astype(int)]
    names = list(estimate.by_layer)
    return [
        Exhibit(
            "craft_figure_8",
            "CRAFT, Figure 8: mean / busiest rank load by replicas of each layer, mean over layers",
            "lines",
            ("replicas of a layer", "balancedness"),
            _rows(counts, (estimate.baseline[:, None] + gains).mean(0)),
            "mean / busiest rank load",
        ),
        Exhibit(
            "craft_figure_9",
            "CRAFT, Figure 9: what replicas add to that in a layer; from least gain to most",
            "lines",
            ("replicas of a layer", *(f"layer {names[place]}" for place in samples)),
            _rows(counts, *gains[samples]),
            "added to mean / busiest rank load",
        ),
    ]


def _totals(loads: Loads) -> np.ndarray:
    """Assignments of each load, at least 1: int64 [B]."""
    return loads.load.sum((1, 2)).clamp(min=1).numpy()


def _rows(*columns: Sequence[float] | np.ndarray) -> list[tuple[str | float, ...]]:
    """Columns of equal length as rows of Python's own numbers."""
    return list(zip(*(np.asarray(column).tolist() for column in columns), strict=True))


def to_json(exhibits: Sequence[Exhibit]) -> dict[str, Any]:
    """Return each exhibit's title, form, columns, rows and quantity, by name."""
    return {
        one.name: {
            "title": one.title,
            "form": one.form,
            "quantity": one.quantity,
            "columns": list(one.columns),
            "rows": list(map(list, one.rows)),
        }
        for one in exhibits
    }


def to_markdown(exhibits: Sequence[Exhibit]) -> str:
    """Return a section with a table for each exhibit."""
    return "".join(f"## {one.title}\n\n{_table(one)}\n\n" for one in exhibits)


def _table(exhibit: Exhibit) -> str:
    rows = exhibit.rows
    note = ""
    if exhibit.form == "lines" and len(rows) > _MOST_ROWS:
        shown = np.linspace(0, len(rows) - 1, _MOST_ROWS).round().astype(int)
        note = f"\n\n{_MOST_ROWS} of {len(rows)} rows; all are in the JSON file."
        rows = [rows[place] for place in shown]
    return markdown_table(exhibit.columns, [list(map(_cell, row)) for row in rows]) + note


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
