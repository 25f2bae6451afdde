"""`megatron-ext plan`: plans for the loads of a file."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.options import (
    add_balance,
    add_command,
    add_costs,
    add_out,
    add_overwrite,
    add_plan_settings,
    balance_config,
    empty_slots,
    layer_costs,
    plan_settings,
)
from megatron_ext.cli.output import columns, progress, show, warn
from megatron_ext.config import OBJECTIVES, BalanceConfig

if TYPE_CHECKING:
    from megatron_ext.balance.strategies import PlanSettings
    from megatron_ext.lab.planning import Planned


def add(commands: Any) -> None:
    """Add the command."""
    plan = add_command(
        commands,
        "plan",
        run,
        "plan loads of a file, and show how even the plans are",
        "megatron-ext plan loads.npz --slots 2 --out plans.npz\n  megatron-ext plan --list",
    )
    plan.add_argument(
        "loads",
        type=Path,
        nargs="?",
        metavar="LOADS.npz",
        help="loads, int64 [B, R, E], or the folder of a trace",
    )
    plan.add_argument("--list", action="store_true", help="list the strategies instead")
    add_balance(plan, ("strategy", "NAME", "the planner"))
    add_plan_settings(plan)
    add_balance(plan, ("objective", "NAME", " or ".join(OBJECTIVES)))
    add_costs(plan, "--objective time")
    add_out(plan, "PLAN.npz", "where to write the plans", required=False)
    plan.add_argument("--split", action="store_true", help="write the quotas by source rank too")
    add_overwrite(plan, "an existing PLAN.npz")


def run(arguments: argparse.Namespace) -> int:
    """Plan, write the plans if asked to, and show their numbers; or list the strategies."""
    from megatron_ext.files.loads import read_loads, write_plans
    from megatron_ext.lab.planning import make_planners, missing_history, plan_loads

    if arguments.list:
        return show(arguments, _strategies(), _strategy_lines)
    _check(arguments)
    balance = balance_config(arguments)
    costs = layer_costs(
        arguments, balance, for_time=balance.plans_for_time, switch="--objective time"
    )
    settings = plan_settings(balance, costs)
    loads = read_loads(arguments.loads)
    planners = make_planners(
        loads,
        balance.strategy,
        settings,
        slots=balance.slots,
        nvlink_domain=balance.domain_ranks,
    )
    warn(empty_slots(loads, balance))
    warn(missing_history(loads, [balance.strategy], settings))
    with progress("Planning", len(loads)) as on_load:
        planned = plan_loads(loads, planners, on_load=on_load)
    if arguments.out is not None:
        write_plans(
            arguments.out,
            loads.load,
            [one.plan for one in planned],
            with_split=arguments.split,
            overwrite=arguments.overwrite,
        )
    return show(arguments, _report(balance, settings, planned), _lines)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse wrong arguments before anything is read."""
    from megatron_ext.files.arrays import check_free

    if arguments.loads is None:
        raise ValueError("LOADS.npz is not given (nor --list)")
    if arguments.split and arguments.out is None:
        raise ValueError("--split adds to the file of --out, which is not given")
    if arguments.out is not None:
        check_free(arguments.out, overwrite=arguments.overwrite)


def _report(
    balance: BalanceConfig, settings: PlanSettings, planned: list[Planned]
) -> dict[str, Any]:
    """Return the numbers of the plans, and what was asked of the planner."""
    from megatron_ext.lab.planning import summarize

    layout = planned[0].plan.layout
    used = settings.to_json()
    costs = used.pop("costs")
    used |= {"strategy": balance.strategy, "objective": balance.objective}
    used |= {"slots": layout.slots, "nvlink_domain": layout.nvlink_domain}
    if costs is not None:
        used |= costs | {"tolerance": None}
    return {
        "instances": [one.measured for one in planned],
        "summary": summarize(planned) | used,
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    summary = report["summary"]
    yield f"{summary['instances']} loads, strategy {summary['strategy']}"
    yield ""
    rows = (
        ("imbalance before", "imbalance_before", ".3f"),
        ("imbalance after", "imbalance_after", ".4f"),
        ("lower bound", "lower_bound", ".4f"),
        ("gap to the bound", "gap", ".4f"),
        ("replicas", "replicas", ".1f"),
        ("replicas of an expert, most", "max_fanout", ".1f"),
        ("sends of a rank, most", "max_rank_sends", ".1f"),
        ("solve, microseconds", "solve_us", ".0f"),
    )
    yield from columns(
        ("", "mean", "worst"),
        *(
            (title, format(summary[name]["mean"], form), format(summary[name]["worst"], form))
            for title, name, form in rows
        ),
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
