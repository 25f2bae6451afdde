"""Every strategy on the same recorded loads, in the order in which they were recorded.

Legend: B loads, R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.balance.batches import stack_plans
from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.balance.plan_metrics import (
    load_imbalance_rates,
    max_fanouts,
    rank_sends,
    remote_assignments,
)
from megatron_ext.balance.predictions import replica_use
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.balance.strategies.none import NONE
from megatron_ext.files.loads import Loads
from megatron_ext.files.tables import Cells, fill, html_table, markdown_table
from megatron_ext.files.whole import write_whole
from megatron_ext.lab.planning import (
    Asked,
    Planned,
    in_two,
    make_planners,
    missing_history,
    plan_loads,
    read_name,
)
from megatron_ext.methods.craft import craft
from megatron_ext.trainer.reports.page import Page, page_html, part, sentences, wide
from megatron_ext.words import counted

Measured = Mapping[str, np.ndarray]
"""Measures of each load, float64 [B]: what `_measure` returns, and `solve_us` as in `Planned`."""

ALL_LAYERS = "All layers"
WEIGHTS = "Weights that fill slots: mean of a load"
PREDICTED = "Replicas placed by a prediction: mean of a load"
BY_LAYER = "Imbalance of each layer: mean (worst)"

_BELOW = {
    ALL_LAYERS: "Imbalance: busiest rank / mean, of every load. Replicas and remote assignments: "
    "mean of a load.\nSolving includes placing from history; `before` is without balancing.",
    WEIGHTS: "Of one rank's slots, and of a forward. Training moves them again in backward, and\n"
    "gradients the other way.",
    PREDICTED: "Hits are placed and used: their bytes move before the load is known.",
    BY_LAYER: "[The same in charts](replay.html)",
}
"""The tables, and the text below each in `replay.md`."""

_IMBALANCE = {
    "imbalance": "{imbalance_mean:.3f}",
    "p50": "{imbalance_p50:.3f}",
    "p95": "{imbalance_p95:.3f}",
    "worst": "{imbalance_worst:.3f}",
}
_OVERALL = {
    "strategy": "{name}",
    "slots": "{slots}",
    **_IMBALANCE,
    "replicas": "{replicas_mean:.1f}",
    "sends, most": "{max_rank_sends:.0f}",
    "remote": "{remote_assignments_mean:.0f}",
    "solve us p50": "{solve_us_p50:.0f}",
    "solve us p95": "{solve_us_p95:.0f}",
}
_PREDICTION = {
    "strategy": "{name}",
    "hit": "{hit_replicas_mean:.1f}",
    "topped up": "{topped_up_replicas_mean:.1f}",
    "wasted": "{wasted_replicas_mean:.1f}",
    "hits / placed": "{hit_rate:.3f}",
    "hits / used": "{share_placed:.3f}",
    "imbalance of placed alone": "{imbalance_of_placed_mean:.3f}",
    "imbalance": "{imbalance_mean:.3f}",
}

_CHARTED = (
    *("imbalance_mean", "imbalance_p95", "imbalance_worst", "replicas_mean", "max_rank_sends"),
    *("remote_assignments_mean", "solve_us_p50", "solve_us_p95"),
    *("slot_bytes", "moved_bytes", "sent_bytes"),
)

_BATCH = 64
"""Plans that are measured together; more would only take more memory."""


def replay(
    loads: Loads,
    strategies: Sequence[str],
    asked: Asked,
    *,
    on_load: Callable[[int], object] = lambda count: None,
) -> dict[str, Measured]:
    """Plan all loads, in the order of time, with each strategy; return their measures.

    Strategies are names of planners; `quota:time` is the fastest, and only for it costs count. Each
    layer has a history of its own. `on_load` is called with 1 after every plan.
    """
    # All before the first plans: what is wrong is said at once.
    planners = {name: make_planners(loads, *asked.by_name(name)) for name in strategies}
    replayed: dict[str, Measured] = {}
    for name, of_loads in planners.items():
        planned = plan_loads(loads, of_loads, on_load=on_load)
        batches = [
            _measure(load, list(itertools.islice(planned, len(load))), asked.planning)
            for load in loads.load.split(_BATCH)
        ]
        replayed[name] = {
            key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
        }
    return replayed


def _measure(
    load: torch.Tensor, planned: Sequence[Planned], planning: PlanSettings
) -> dict[str, np.ndarray]:
    """Return the numbers of some loads' plans.

    For strategies that predict also what became of the placed replicas (`replica_use`), the
    `max_rank_sends_of_forward`, wasted replicas among them, and `imbalance_of_placed`: of the best
    split over the placed replicas alone, without replicas that were added when the load was known.
    """
    plan = stack_plans([one.plan for one in planned], planned[0].plan.layout)
    rank_loads = plan.rank_loads()
    measures = {
        "imbalance": imbalances(rank_loads),
        "load_imbalance_rate": load_imbalance_rates(rank_loads),
        "replicas": (plan.experts_in_slots >= 0).sum((-2, -1)),
        "max_fanout": max_fanouts(plan),
        "max_rank_sends": rank_sends(plan).amax(-1),
        "remote_assignments": remote_assignments(load, plan),
        "solve_us": torch.tensor([one.solve_us for one in planned], dtype=torch.float64),
    }
    if placed := [one.placed for one in planned if one.placed is not None]:
        alone = [
            craft.share(one, there, plan.layout, planning).rank_loads()
            for one, there in zip(load, placed, strict=True)
        ]
        measures |= replica_use(torch.stack(placed), plan)
        ahead, added = (rank_sends(part) for part in in_two(plan, torch.stack(placed)))
        measures["max_rank_sends_of_forward"] = (ahead + added).amax(-1)
        measures["imbalance_of_placed"] = imbalances(torch.stack(alone))
    return {name: values.double().numpy() for name, values in measures.items()}


def make_report(
    loads: Loads, replayed: Mapping[str, Measured], asked: Asked, *, expert_bytes: int | None = None
) -> dict[str, Any]:
    """Return the comparison, for JSON.

    Returns:
        `strategies`: for each strategy the slots it planned for, its numbers (see `_summarize`),
        and in `layers` the numbers of each layer; `before`: the imbalance without balancing;
        `title`, `settings` and the sizes of the trace; `missing_history`, what `missing_history`
        says of these loads; `never_acted`, the strategies without a replica for any load. If
        `expert_bytes` is given, the report has it too, and each strategy has `slot_bytes`, the
        weights that all sets of a rank's slots hold, and two means over the loads, also of wasted
        replicas: `moved_bytes`, the weights of all replicas, and `sent_bytes`, those that the
        busiest sender sends.
    """
    layers = np.array(loads.layers())
    before = {"imbalance": imbalances(home_loads(loads.load)).numpy()}
    names = np.unique(layers)
    batch, ranks, experts = loads.load.shape
    strategies: dict[str, dict[str, Any]] = {}
    for name, measured in replayed.items():
        strategy = get_strategy(read_name(name)[0])
        num_slots = strategy.num_slots(asked.slots, experts // ranks)
        of = strategies[name] = {"slots": num_slots} | _summarize(measured)
        if expert_bytes is not None:
            # What a layer sends ahead goes into a set of slots of its own, used or not.
            sets = 2 if strategy.predicts and len(names) > 1 else 1
            of["slot_bytes"] = expert_bytes * num_slots * sets
            moved = of["replicas_mean"] + of.get("wasted_replicas_mean", 0.0)
            of["moved_bytes"] = expert_bytes * moved
            sends = of.get("max_rank_sends_of_forward_mean", of["max_rank_sends_mean"])
            of["sent_bytes"] = expert_bytes * sends
        of["layers"] = {
            str(layer): _summarize(
                {key: values[layers == layer] for key, values in measured.items()}
            )
            for layer in names
        }
    return {
        "title": f"{counted(batch, 'load')} of {counted(len(names), 'layer')}, "
        f"{counted(ranks, 'rank')}, {counted(experts, 'expert')}, {counted(asked.slots, 'slot')}",
        "loads": batch,
        "ranks": ranks,
        "experts": experts,
        "slots": asked.slots,
        **({} if expert_bytes is None else {"expert_bytes": expert_bytes}),
        "settings": asked.settings(),
        "missing_history": missing_history(loads, replayed, asked.planning),
        "never_acted": [
            name
            for name, of in strategies.items()
            if name != NONE.name and not of["replicas_worst"]
        ],
        "before": _summarize(before),
        "strategies": strategies,
    }


def _summarize(measured: Measured) -> dict[str, float]:
    """Return `imbalance_mean`, `_p50`, `_p95`, `_worst`, and the same for every measure.

    `max_rank_sends` is the worst. A quantile is a value that occurred. Strategies that predict also
    have `hit_rate`, the part of the placed replicas that was used, and `share_placed`, the part of
    the used replicas that was placed: their bytes moved before the load was known.
    """
    numbers = {}
    for name, values in measured.items():
        numbers[f"{name}_mean"] = float(values.mean())
        for quantile in (50, 95):
            numbers[f"{name}_p{quantile}"] = float(
                np.quantile(values, quantile / 100, method="inverted_cdf")
            )
        numbers[f"{name}_worst"] = float(values.max())
    if "max_rank_sends" in measured:
        numbers["max_rank_sends"] = numbers["max_rank_sends_worst"]
    if "hit_replicas" in measured:
        hits = float(measured["hit_replicas"].sum())
        placed = hits + float(measured["wasted_replicas"].sum())
        used = hits + float(measured["topped_up_replicas"].sum())
        numbers["hit_rate"] = hits / placed if placed else 0.0
        numbers["share_placed"] = hits / used if used else 0.0
    return numbers


def tables(report: Mapping[str, Any]) -> dict[str, Cells]:
    """Return the tables of a report by their titles; a table without rows is left out."""
    strategies = [{"name": name} | of for name, of in report["strategies"].items()]
    header, rows = fill(_OVERALL, strategies)
    (before,) = fill(_IMBALANCE, [report["before"]])[1]
    rows = [("before", "", *before, *[""] * 5), *rows]
    moved = [
        (of["name"], *(f"{of[f'{what}_bytes'] / 2**20:,.2f}" for what in ("slot", "moved", "sent")))
        for of in strategies
        if "expert_bytes" in report
    ]
    by_layer = [
        (
            layer,
            *(
                "{imbalance_mean:.3f} ({imbalance_worst:.3f})".format(**of["layers"][layer])
                for of in strategies
            ),
        )
        for layer in strategies[0]["layers"]
    ]
    cells: dict[str, Cells] = {
        ALL_LAYERS: (header, rows),
        WEIGHTS: (("strategy", "slots, MiB", "moved, MiB", "by the busiest sender"), moved),
        PREDICTED: fill(_PREDICTION, [of for of in strategies if "hit_rate" in of]),
        BY_LAYER: (("layer", *report["strategies"]), by_layer),
    }
    return {title: of for title, of in cells.items() if of[1]}


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `replay.json` (the report), `replay.md` and the page `replay.html` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "replay.json", [json.dumps(report, indent=2), "\n"])
    parts = ["# Replay", f"{report['title']}."]
    parts += notes(report)
    for title, cells in tables(report).items():
        if title != ALL_LAYERS:
            parts.append(f"## {title}")
        parts += [markdown_table(*cells), _BELOW[title]]
    write_whole(folder / "replay.md", ["\n\n".join(parts), "\n"])
    write_whole(folder / "replay.html", [page_html(_page(report))])


def _page(report: Mapping[str, Any]) -> Page:
    """Return strategies side by side, in words; `replay_page.js` draws the charts."""
    strategies = report["strategies"]
    title = f"Replay: {report['title']}"
    first, *more = tables(report).items()
    return Page(
        title=title,
        top=f"<h1>{html.escape(title)}</h1>{sentences(_verdict(report), [])}"
        f"{wide(html_table(*first[1]))}",
        data={
            "before": report["before"]["imbalance_mean"],
            "strategies": [
                {"name": name}
                | {key: of[key] for key in _CHARTED if key in of}
                | {
                    "layers": {
                        layer: of["layers"][layer]["imbalance_mean"] for layer in of["layers"]
                    }
                }
                for name, of in strategies.items()
            ],
        },
        bottom="".join(f"<h2>{html.escape(name)}</h2>{wide(html_table(*of))}" for name, of in more),
        script=part(__package__, "replay_page.js"),
    )


def _verdict(report: Mapping[str, Any]) -> list[str]:
    strategies, before = report["strategies"], report["before"]["imbalance_mean"]
    best = min(strategies, key=lambda name: strategies[name]["imbalance_mean"])
    of = strategies[best]
    if not of["replicas_worst"]:
        said = [f"No strategy made a replica: the busiest rank has {before:.3f} x the mean load."]
    else:
        among = ", no other strategy less" if len(strategies) > 1 else ""
        said = [
            f"{best} leaves the busiest rank {of['imbalance_mean']:.3f} x the mean load{among}; "
            f"without balancing it has {before:.3f} x.",
            f"{best} makes {of['replicas_mean']:.1f} replicas for a load and plans it in "
            f"{of['solve_us_p50']:.0f} us (median, on this machine).",
        ]
    cheapest = min(
        (name for name in strategies if strategies[name]["imbalance_mean"] < (1 + before) / 2),
        key=lambda name: strategies[name]["replicas_mean"],
        default=best,
    )
    if cheapest != best:
        fewer = strategies[cheapest]
        said.append(
            f"Of those that take away at least half of the excess, {cheapest} makes the fewest "
            f"replicas: {fewer['replicas_mean']:.1f}, at {fewer['imbalance_mean']:.3f} x the mean."
        )
    return said + notes(report)


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return sentences about strategies whose numbers may mislead."""
    said = [f"{missing}."] if (missing := report["missing_history"]) else []
    return said + never_acted(report)


def never_acted(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence that names strategies without a replica for any load, if there are any."""
    if not (idle := report["never_acted"]):
        return []
    return [
        f"Never acted, so the same as without balancing: {', '.join(idle)}. Possible reasons: no "
        "history yet, even loads, no slots, or loads below the least replica (balance.min_quota)."
    ]
