"""`megatron-ext plan`: plans for the loads of a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.cli import options
from megatron_ext.cli.output import progress, show
from megatron_ext.config import OBJECTIVES
from megatron_ext.files.tables import text_table
from megatron_ext.words import counted


def add(commands: Any) -> None:
    """Add the command."""
    plan = options.add_command(
        commands,
        "plan",
        run,
        "plan loads of a file, and show how even the plans are",
        "megatron-ext plan loads.npz --slots 2 --out plans.npz\n  megatron-ext plan --list",
    )
    plan.add_argument(
        "loads",
        type=options.loads_path,
        nargs="?",
        metavar="LOADS.npz",
        help="loads, int64 [B, R, E], or the folder of a trace",
    )
    plan.add_argument("--list", action="store_true", help="list the strategies instead")
    options.add_balance(plan, ("strategy", "NAME", "the planner"))
    options.add_plan_settings(plan)
    options.add_balance(plan, ("objective", "NAME", " or ".join(OBJECTIVES)))
    options.add_costs(plan, "--objective time")
    options.add_out(plan, "PLAN.npz", "where to write the plans", replaces="an existing PLAN.npz")
    plan.add_argument("--split", action="store_true", help="write the quotas by source rank too")


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the plans if asked to, and show their numbers; or list the strategies."""
    if arguments.list:
        return show(arguments, _strategies(), _strategy_lines)
    if arguments.loads is None:
        raise ValueError("LOADS.npz is not given (nor --list)")
    if arguments.split and arguments.out is None:
        raise ValueError("--split adds to the file of --out, which is not given")
    written = options.check_out(arguments)
    balance = options.balance_config(arguments)
    from megatron_ext.files.loads import read_loads, write_plans
    from megatron_ext.lab.planning import make_planners, measure, plan_loads, summarize

    costs = options.layer_costs(
        arguments, balance, for_time=balance.plans_for_time, switch="--objective time"
    )
    asked = options.asked(balance, costs)
    loads = read_loads(arguments.loads)
    planners = make_planners(loads, balance.strategy, asked)
    options.warn_of_empty_slots(loads, asked, [balance.strategy])
    plans, measured = [], []
    with progress("Planning", len(loads)) as on_load:
        planning = plan_loads(loads, planners, on_load=on_load)
        for load, planned in zip(loads.load, planning, strict=True):
            plans.append(planned.plan)
            measured.append(measure(load, planned))
    if arguments.out is not None:
        write_plans(
            arguments.out,
            loads.load,
            plans,
            with_split=arguments.split,
            overwrite=arguments.overwrite,
        )
    used = asked.settings()
    used |= {"strategy": balance.strategy, "objective": balance.objective}
    used |= {"slots": plans[0].layout.slots, "nvlink_domain": plans[0].layout.nvlink_domain}
    if (used_costs := used.pop("costs")) is not None:
        used |= used_costs | {"tolerance": None}
    report = {"instances": measured, "summary": summarize(measured) | used}
    return show(arguments, report, _lines, written)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    summary = report["summary"]
    yield f"{counted(summary['instances'], 'load')}, strategy {summary['strategy']}"
    yield ""
    rows = (
        ("imbalance before", "imbalance_before", ".3f"),
        ("imbalance after", "imbalance_after", ".4f"),
        ("lower bound", "lower_bound", ".4f"),
        ("after / lower bound", "gap", ".4f"),
        ("replicas", "replicas", ".1f"),
        ("replicas of an expert, most", "max_fanout", ".1f"),
        ("sends of a rank, most", "max_rank_sends", ".1f"),
        ("solve, microseconds", "solve_us", ".0f"),
    )
    yield text_table(
        ("", "mean", "worst"),
        [
            (title, format(summary[name]["mean"], form), format(summary[name]["worst"], form))
            for title, name, form in rows
        ],
    )


def _strategies() -> dict[str, Any]:
    from megatron_ext.balance.strategies import STRATEGIES

    return {
        name: {
            "summary": strategy.summary,
            "training": True,
            "offline": strategy.planner is not None,
        }
        for name, strategy in STRATEGIES.items()
    }


def _strategy_lines(report: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, report))
    for name, strategy in report.items():
        where = "training, offline" if strategy["offline"] else "training"
        yield f"{name:<{width}}  {where:<17}  {strategy['summary']}"
