"""Every strategy on the same recorded loads, in the order in which they were recorded.

Legend: B loads, R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from megatron_ext.balance.metrics import (
    home_loads,
    imbalances,
    load_imbalance_rates,
    max_fanouts,
    rank_sends,
    remote_assignments,
    replica_use,
)
from megatron_ext.balance.plan import BalancePlan, stack_plans
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.files.arrays import check_free
from megatron_ext.files.loads import Loads
from megatron_ext.files.tables import markdown_table
from megatron_ext.lab.planning import make_planners, missing_history, read_name
from megatron_ext.lab.replay_page import replay_page
from megatron_ext.methods.libra.libra import split_over_placed
from megatron_ext.trainer.reports.page import page_html

FILES = ("replay.json", "replay.md", "replay.html")

Measured = Mapping[str, np.ndarray]
"""Measures of each load, float64 [B]: what `_measure` returns, and `solve_us` as in `plan_loads`.
For strategies that predict also what `_measure_prediction` returns."""

Cells: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows of a table."""

_BATCH = 64
"""Plans that are measured together; more would only take more memory."""


def replay(
    loads: Loads,
    strategies: Sequence[str],
    settings: PlanSettings,
    *,
    slots: int,
    nvlink_domain: int | None,
    on_load: Callable[[int], object] = lambda count: None,
) -> dict[str, Measured]:
    """Plan all loads with each strategy.

    Args:
        loads: Loads in the order of time. Each layer has a history of its own.
        strategies: Planners of `megatron_ext.balance.strategies`; `quota:time` for the fastest.
        settings: What planners are asked for; costs only count for objective `time`.
        slots: Replicas a rank can hold, as asked for.
        nvlink_domain: Ranks per NVLink domain; one domain if None.
        on_load: Called with 1 after every plan.

    Returns:
        The measures of every strategy, in their order.

    Raises:
        ValueError: A strategy is there twice or makes no plans, or a setting is out of range.
    """
    planners = {}
    for name in strategies:
        if name in planners:
            raise ValueError(f"strategy {name!r} is there twice")
        strategy, for_time = read_name(name)
        asked = settings if for_time else dataclasses.replace(settings, costs=None)
        planners[name] = make_planners(
            loads, strategy, asked, slots=slots, nvlink_domain=nvlink_domain
        )
    replayed: dict[str, Measured] = {}
    for name, of_loads in planners.items():
        of_loads[0].solve(loads.load[0])  # The first plan of a process loads the library.
        batches: list[dict[str, np.ndarray]] = []
        for start in range(0, len(loads), _BATCH):
            plans, placements, times = [], [], []
            for b in range(start, min(start + _BATCH, len(loads))):
                placed = of_loads[b].expect_in_order(loads.prediction(b))
                started = time.perf_counter()
                plans.append(of_loads[b].plan_in_order(loads.load[b], placed))
                times.append((time.perf_counter() - started) * 1e6)
                placements.append(placed)
                on_load(1)
            plan = stack_plans(plans, plans[0].layout)
            load = loads.load[start : start + _BATCH]
            batch = _measure(load, plan) | {"solve_us": np.array(times)}
            if known := [placed for placed in placements if placed is not None]:
                batch |= _measure_prediction(load, plan, torch.stack(known), settings)
            batches.append(batch)
        replayed[name] = {
            key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]
        }
    return replayed


def _measure(load: torch.Tensor, plan: BalancePlan) -> dict[str, np.ndarray]:
    rank_loads = plan.rank_loads()
    measures = {
        "imbalance": imbalances(rank_loads),
        "load_imbalance_rate": load_imbalance_rates(rank_loads),
        "replicas": (plan.experts_in_slots >= 0).sum((-2, -1)),
        "max_fanout": max_fanouts(plan),
        "max_rank_sends": rank_sends(plan).amax(-1),
        "remote_assignments": remote_assignments(load, plan),
    }
    return {name: values.double().numpy() for name, values in measures.items()}


def _measure_prediction(
    load: torch.Tensor, plan: BalancePlan, placed: torch.Tensor, settings: PlanSettings
) -> dict[str, np.ndarray]:
    """Return what became of the placed replicas (`replica_use`), and `imbalance_of_placed`.

    `imbalance_of_placed` is the imbalance of the best split over the placed replicas alone, without
    replicas that were added when the load was known.
    """
    alone = [
        split_over_placed(one, there, plan.layout, settings).rank_loads()
        for one, there in zip(load, placed, strict=True)
    ]
    measures = {
        **replica_use(placed, plan),
        "imbalance_of_placed": imbalances(torch.stack(alone)),
    }
    return {name: values.double().numpy() for name, values in measures.items()}


def make_report(
    loads: Loads,
    replayed: Mapping[str, Measured],
    settings: PlanSettings,
    *,
    slots: int,
    expert_bytes: int | None = None,
) -> dict[str, Any]:
    """Return the comparison, for JSON.

    Returns:
        `strategies`: for each strategy the slots it planned for, its numbers (see `_summarize`),
        and in `layers` the numbers of each layer; `before`: the imbalance without balancing;
        `title`, `settings` and the sizes of the trace; `missing_history`, what `missing_history`
        says of these loads. If `expert_bytes` is given, the report has
        it too, and each strategy has `slot_bytes`, the weights that a rank's slots hold, and two
        means over the loads: `moved_bytes`, the weights of all replicas, and `sent_bytes`, the
        weights that the busiest sender sends.
    """
    layers = np.array(loads.layers())
    before = {"imbalance": imbalances(home_loads(loads.load)).numpy()}
    names = np.unique(layers)
    batch, ranks, experts = loads.load.shape
    strategies: dict[str, dict[str, Any]] = {}
    for name, measured in replayed.items():
        num_slots = get_strategy(read_name(name)[0]).num_slots(slots, experts // ranks)
        of = strategies[name] = {"slots": num_slots} | _summarize(measured)
        if expert_bytes is not None:
            of["slot_bytes"] = expert_bytes * num_slots
            of["moved_bytes"] = expert_bytes * of["replicas_mean"]
            of["sent_bytes"] = expert_bytes * of["max_rank_sends_mean"]
        of["layers"] = {
            str(layer): _summarize(
                {key: values[layers == layer] for key, values in measured.items()}
            )
            for layer in names
        }
    return {
        "title": f"{batch} loads of {len(names)} layers, {ranks} ranks, {experts} experts, "
        f"{slots} slots",
        "loads": batch,
        "ranks": ranks,
        "experts": experts,
        "slots": slots,
        **({} if expert_bytes is None else {"expert_bytes": expert_bytes}),
        "settings": settings.to_json(),
        "missing_history": missing_history(loads, replayed, settings),
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


def overall_table(report: Mapping[str, Any]) -> str:
    """Return the strategies over the whole trace as a Markdown table."""
    return markdown_table(*_overall_cells(report))


def _overall_cells(report: Mapping[str, Any]) -> Cells:
    header = (
        *("strategy", "slots", "imbalance", "p50", "p95", "worst", "replicas"),
        *("sends, most", "remote", "solve us p50", "solve us p95"),
    )
    before = report["before"]
    rows = [("before", "", *_imbalance_cells(before), "", "", "", "", "")]
    for name, of in report["strategies"].items():
        rows.append(
            (
                name,
                str(of["slots"]),
                *_imbalance_cells(of),
                f"{of['replicas_mean']:.1f}",
                f"{of['max_rank_sends']:.0f}",
                f"{of['remote_assignments_mean']:.0f}",
                f"{of['solve_us_p50']:.0f}",
                f"{of['solve_us_p95']:.0f}",
            )
        )
    return header, rows


def bytes_table(report: Mapping[str, Any]) -> str:
    """Return what the strategies move, as a Markdown table; empty if no expert's size is known."""
    return markdown_table(*_bytes_cells(report)) if "expert_bytes" in report else ""


def _bytes_cells(report: Mapping[str, Any]) -> Cells:
    rows = [
        (name, *(f"{of[f'{what}_bytes'] / 2**20:,.2f}" for what in ("slot", "moved", "sent")))
        for name, of in report["strategies"].items()
        if "expert_bytes" in report
    ]
    return ("strategy", "slots, MiB", "moved, MiB", "by the busiest sender"), rows


def prediction_table(report: Mapping[str, Any]) -> str:
    """Return what predictions were good for, as a Markdown table; empty if nothing predicts."""
    header, rows = _prediction_cells(report)
    return markdown_table(header, rows) if rows else ""


def _prediction_cells(report: Mapping[str, Any]) -> Cells:
    rows = [
        (
            name,
            f"{of['hit_replicas_mean']:.1f}",
            f"{of['topped_up_replicas_mean']:.1f}",
            f"{of['wasted_replicas_mean']:.1f}",
            f"{of['hit_rate']:.3f}",
            f"{of['share_placed']:.3f}",
            f"{of['imbalance_of_placed_mean']:.3f}",
            f"{of['imbalance_mean']:.3f}",
        )
        for name, of in report["strategies"].items()
        if "hit_rate" in of
    ]
    header = (
        *("strategy", "hit", "topped up", "wasted", "hits / placed", "hits / used"),
        *("imbalance of placed alone", "imbalance"),
    )
    return header, rows


def _imbalance_cells(numbers: Mapping[str, float]) -> list[str]:
    return [f"{numbers[f'imbalance_{which}']:.3f}" for which in ("mean", "p50", "p95", "worst")]


def _layer_cells(report: Mapping[str, Any]) -> Cells:
    strategies = report["strategies"]
    layers = list(next(iter(strategies.values()))["layers"])
    rows = [
        (
            layer,
            *(
                "{imbalance_mean:.3f} ({imbalance_worst:.3f})".format(**of["layers"][layer])
                for of in strategies.values()
            ),
        )
        for layer in layers
    ]
    return ("layer", *strategies), rows


def check_out(folder: Path, *, overwrite: bool) -> None:
    """Check that a report can be written into the folder, and replaces no report unasked.

    Raises:
        OSError: What `check_free` raises for one of its files.
    """
    for name in FILES:
        check_free(folder / name, overwrite=overwrite)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `replay.json` (the report), `replay.md` and the page `replay.html` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "replay.json").write_text(json.dumps(report, indent=2) + "\n")
    if moved := bytes_table(report):
        moved = (
            "\n## Weights that fill slots: mean of a load\n\n"
            f"{moved}\n\n"
            "Of one rank's slots, and of a forward. Training moves them again in backward, and\n"
            "gradients the other way.\n"
        )
    if prediction := prediction_table(report):
        prediction = (
            "\n## Replicas placed by a prediction: mean of a load\n\n"
            f"{prediction}\n\n"
            "Hits are placed and used: their bytes move before the load is known.\n"
        )
    missing = f"{said}.\n\n" if (said := report["missing_history"]) else ""
    (folder / "replay.md").write_text(
        f"# Replay\n\n{report['title']}.\n\n{missing}{overall_table(report)}\n\n"
        "Imbalance: busiest rank / mean, of every load. Replicas and remote assignments: mean of a "
        "load.\nSolving includes placing from history; `before` is without balancing.\n"
        f"{moved}{prediction}\n"
        f"## Imbalance of each layer: mean (worst)\n\n{markdown_table(*_layer_cells(report))}\n\n"
        "[The same in charts](replay.html)\n"
    )
    tables = {
        "All layers": _overall_cells(report),
        "Weights that fill slots: mean of a load": _bytes_cells(report),
        "Replicas placed by a prediction: mean of a load": _prediction_cells(report),
        "Imbalance of each layer: mean (worst)": _layer_cells(report),
    }
    page = replay_page(report, {name: of for name, of in tables.items() if of[1]})
    (folder / "replay.html").write_text(page_html(page), "utf-8")
