"""The `megatron-ext` command.

Exit status: 0 done, 1 failed, 2 wrong usage. What is wrong with the input is said in one line.
Results go to stdout, progress and complaints to stderr. Everything heavy is imported by the
command that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.config import BalanceConfig

DONE, FAILED, WRONG_USAGE = 0, 1, 2
_INTERRUPTED = 130  # As shells report a command that Ctrl-C ended.

# What a user can put right by calling differently.
_USAGE_ERRORS = (ValueError, FileNotFoundError, FileExistsError, ModuleNotFoundError)
# Files named in a message; the rest is counted.
_MOST_NAMED = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Words after the command's name; None takes the process's.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["train"]:
        return _train(words[1:])
    arguments = _parser().parse_args(words)
    _silence_megatron()
    try:
        return int(arguments.run(arguments))
    except _USAGE_ERRORS as error:
        return _complain(arguments.command_name, error, WRONG_USAGE)
    except (RuntimeError, OSError, MemoryError) as error:
        return _complain(arguments.command_name, error, FAILED)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets `run` and `command_name`."""
    parser = argparse.ArgumentParser(
        prog="megatron-ext",
        description="Balanced MoE training on stock Megatron-Core.",
        epilog="example:\n  megatron-ext doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    # Listed only: `main` hands its words over unread.
    commands.add_parser("train", help="train a model as a recipe and Hydra overrides say")

    _add_plan(commands)
    _add_replay(commands)
    _add_place(commands)
    _add_simulate(commands)
    _add_synth(commands)

    data = _add_group(commands, "data", "text and datasets")
    build = _add(
        data,
        "build",
        _data_build,
        "turn text files into Megatron indexed datasets, one per domain",
        "megatron-ext data build code=src 'docs=manual/**/*.rst' --out runs/data",
    )
    build.add_argument(
        "sources",
        nargs="+",
        metavar="[NAME=]PATH",
        help="a file, a folder or a quoted pattern; NAME is the domain (default: the path's last "
        "part)",
    )
    _add_out(build)
    build.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="a Hugging Face tokenizer.json (default: one token per byte)",
    )
    build.add_argument(
        "--eod", metavar="TOKEN", help="the tokenizer's token that ends a document, if unusual"
    )
    build.add_argument(
        "--strict", action="store_true", help="fail on a file that is not text, instead of skipping"
    )
    corpus = _add(
        data,
        "corpus",
        _data_corpus,
        "gather text that this machine has, one folder per domain",
        "megatron-ext data corpus --out runs/corpus\n"
        "  megatron-ext data build runs/corpus/* --out runs/data",
    )
    _add_out(corpus)
    corpus.add_argument(
        "--limit-mb",
        type=_positive,
        default=8,
        metavar="N",
        help="most text of a domain, in MiB (default: %(default)s)",
    )
    info = _add(
        data,
        "info",
        _data_info,
        "show what a dataset holds, and check that it is complete",
        "megatron-ext data info runs/data",
    )
    info.add_argument("path", metavar="DIR", help="a dataset made by `data build`")

    checkpoint = _add_group(commands, "checkpoint", "Megatron checkpoints")
    inspect = _add(
        checkpoint,
        "inspect",
        _checkpoint_inspect,
        "list a checkpoint's keys and check that it holds logical experts only",
        "megatron-ext checkpoint inspect runs/quickstart/checkpoints",
    )
    inspect.add_argument("path", metavar="DIR", help="a checkpoint, or a folder of them (newest)")
    relayout = _add(
        checkpoint,
        "relayout",
        _checkpoint_relayout,
        "give a checkpoint's experts the ranks that `place sem_moe` found; it computes the same",
        "megatron-ext checkpoint relayout runs/train semantics.npz --out start/step_100",
    )
    relayout.add_argument("path", metavar="DIR", help="a checkpoint, or a folder of them (newest)")
    relayout.add_argument(
        "semantics", type=Path, metavar="SEMANTICS.npz", help="made by `place sem_moe`"
    )
    relayout.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")

    doctor = _add(
        commands,
        "doctor",
        _doctor,
        "show what this machine and installation have, and what is missing",
        "megatron-ext doctor --json\n  megatron-ext doctor --calibrate --out here.yaml",
    )
    doctor.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine instead, as hardware for `simulate`; takes a minute or less",
    )
    doctor.add_argument("--out", type=Path, metavar="HARDWARE.yaml", help="where to write that")
    doctor.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def _add_plan(commands: Any) -> None:
    defaults = BalanceConfig()
    plan = _add(
        commands,
        "plan",
        _plan,
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
    plan.add_argument(
        "--strategy",
        default=defaults.strategy,
        metavar="NAME",
        help="the planner (%(default)s)",
    )
    _add_settings(plan)
    plan.add_argument(
        "--objective",
        default=defaults.objective,
        metavar="NAME",
        help="tolerance or time (%(default)s)",
    )
    _add_costs(plan, "--objective time and --strategy time")
    plan.add_argument("--out", type=Path, metavar="PLAN.npz", help="where to write the plans")
    plan.add_argument("--split", action="store_true", help="write the quotas by source rank too")
    plan.add_argument("--overwrite", action="store_true", help="replace an existing PLAN.npz")


def _add_replay(commands: Any) -> None:
    replay = _add(
        commands,
        "replay",
        _replay,
        "plan a trace with several strategies, and compare them",
        "megatron-ext replay runs/train/trace --strategies quota,eplb --slots 2 --out comparison",
    )
    replay.add_argument(
        "trace", type=Path, metavar="TRACE", help="folder of a trace, or a file of loads"
    )
    replay.add_argument(
        "--strategies",
        required=True,
        metavar="A,B,...",
        help="the planners; `megatron-ext plan --list` names them",
    )
    _add_settings(replay)
    _add_costs(replay, "strategy time")
    replay.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for replay.md, replay.json and replay.png"
    )
    replay.add_argument("--overwrite", action="store_true", help="replace these files in DIR")


def _add_place(commands: Any) -> None:
    place = _add_group(commands, "place", "what to put where before a run, from a trace")
    craft = _add(
        place,
        "craft",
        _place_craft,
        "place replicas in the layers of a trace that gain most by them",
        "megatron-ext place craft runs/train/trace --slots 2 --out placement.npz\n"
        "  megatron-ext replay runs/train/trace --strategies craft,eplb --placement placement.npz",
    )
    craft.add_argument(
        "trace", type=Path, metavar="TRACE", help="folder of a trace, or a file of loads"
    )
    defaults = BalanceConfig()
    for option, kind, metavar, text in (
        ("--slots", int, "S", "most replicas of a rank in a layer"),
        ("--tolerance", float, "T", "imbalance - 1 that is good enough in the run to come"),
        ("--min-quota", int, "N", "fewest assignments of a replica in the run to come"),
    ):
        craft.add_argument(
            option,
            type=kind,
            default=getattr(defaults, option.strip("-").replace("-", "_")),
            metavar=metavar,
            help=f"{text} (%(default)s)",
        )
    craft.add_argument(
        "--nvlink-domain", type=int, metavar="D", help="ranks per NVLink domain (all ranks)"
    )
    craft.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help="most replicas of a rank over all layers (where one more gains less than the average "
        "one)",
    )
    craft.add_argument(
        "--even",
        action="store_true",
        help="equally many replicas on every rank over all layers, for memory's sake",
    )
    craft.add_argument(
        "--out", type=Path, required=True, metavar="PLACEMENT.npz", help="where to write it"
    )
    craft.add_argument("--overwrite", action="store_true", help="replace an existing file")
    _add_sem_moe(place)


def _add_sem_moe(place: Any) -> None:
    sem_moe = _add(
        place,
        "sem_moe",
        _place_sem_moe,
        "place experts and samples that belong together on one rank",
        "megatron-ext place sem_moe runs/train/routes --ranks 8 --out semantics.npz\n"
        "  megatron-ext checkpoint relayout runs/train semantics.npz --out start/step_100",
    )
    sem_moe.add_argument(
        "routes",
        type=Path,
        metavar="ROUTES",
        help="a run's folder of routes (logging.route_samples), or a file: tokens' choices by id",
    )
    sem_moe.add_argument("--ranks", type=_positive, required=True, metavar="R", help="of EP groups")
    sem_moe.add_argument(
        "--evaluate",
        type=Path,
        metavar="ROUTES",
        help="choices to measure with, instead of those that were learned from",
    )
    sem_moe.add_argument(
        "--global-batch",
        type=_positive,
        metavar="N",
        help="samples of a batch to measure with, a multiple of R (8 R)",
    )
    sem_moe.add_argument(
        "--out", type=Path, required=True, metavar="SEMANTICS.npz", help="where to write it"
    )
    sem_moe.add_argument("--overwrite", action="store_true", help="replace an existing file")


def _add_simulate(commands: Any) -> None:
    simulate = _add(
        commands,
        "simulate",
        _simulate,
        "predict what strategies would make of a trace on other hardware",
        "megatron-ext simulate loads.npz --model qwen3_235b --hardware rack_64 --gpus 256 \\\n"
        "    --strategies quota,eplb --set num_microbatches=4\n\n"
        "Without balancing and with ideal routing are always there to compare with.",
    )
    simulate.add_argument(
        "trace", type=Path, metavar="TRACE", help="folder of a trace, or a file of loads"
    )
    simulate.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help="a recipe, a name in recipes/shapes, or a file like those",
    )
    simulate.add_argument(
        "--hardware",
        required=True,
        metavar="NAME|FILE",
        help="a name in recipes/hardware, or a file like those, as `doctor --calibrate` writes it",
    )
    simulate.add_argument(
        "--strategies", required=True, metavar="A,B,...", help="the planners to simulate"
    )
    simulate.add_argument(
        "--gpus",
        type=_positive,
        metavar="N",
        help="ranks of the training (EP x PP); what exceeds that is data parallelism",
    )
    simulate.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="other sizes of the model: of a recipe its settings, else the fields of such a file",
    )
    _add_settings(simulate)
    simulate.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for simulate.md and simulate.json"
    )
    simulate.add_argument("--overwrite", action="store_true", help="replace these files in DIR")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add what planners are asked for; the names are those of `BalanceConfig`."""
    defaults = BalanceConfig()
    for option, kind, metavar, text in (
        ("--slots", int, "S", "replicas that a rank can hold"),
        ("--tolerance", float, "T", "imbalance - 1 that is good enough"),
        ("--min-quota", int, "N", "fewest assignments of a replica"),
        ("--interval", int, "N", "microbatches between placements from history"),
        ("--alpha", float, "X", "capacity of a rank / mean, for llep"),
        ("--locality-share", float, "X", "part of the slots for a rank's own tokens, for libra"),
        ("--min-tokens-per-gemm", int, "N", "fewest assignments in a piece, for llep"),
    ):
        parser.add_argument(
            option,
            type=kind,
            default=getattr(defaults, option.strip("-").replace("-", "_")),
            metavar=metavar,
            help=f"{text} (%(default)s)",
        )
    parser.add_argument(
        "--nvlink-domain", type=int, metavar="D", help="ranks per NVLink domain (all ranks)"
    )
    parser.add_argument(
        "--placement",
        type=Path,
        metavar="FILE",
        help="of `megatron-ext place craft`: replicas of craft, and slots of the other planners",
    )


def _add_costs(parser: argparse.ArgumentParser, for_what: str) -> None:
    costs = parser.add_argument_group(f"for {for_what}")
    costs.add_argument("--expert-bytes", type=int, metavar="N", help="weights of one expert")
    costs.add_argument(
        "--link-bandwidth", type=float, metavar="X", help="bytes per second of a rank"
    )
    costs.add_argument("--assignment-time", type=float, metavar="X", help="seconds per assignment")
    costs.add_argument("--token-bytes", type=int, metavar="N", help="of a hidden state")


def _add_synth(commands: Any) -> None:
    synth = _add(
        commands,
        "synth",
        _synth,
        "generate loads of a kind: zipf, power-law, drift, domain-shift, cold-ranks, hot-rank, "
        "few-tokens, dead-experts",
        "megatron-ext synth zipf --ranks 64 --experts 256 --imbalance 2 --out loads.npz",
    )
    synth.add_argument("kind", metavar="KIND", help="one of those above")
    synth.add_argument("--ranks", type=_positive, required=True, metavar="R")
    synth.add_argument("--experts", type=_positive, required=True, metavar="E")
    synth.add_argument("--tokens", type=_positive, metavar="N", help="tokens of a rank")
    synth.add_argument("--top-k", type=_positive, metavar="K", help="experts a token chooses")
    synth.add_argument("--batch", type=_positive, metavar="B", help="loads to generate")
    synth.add_argument("--seed", type=int, metavar="N")
    degree = synth.add_mutually_exclusive_group()
    degree.add_argument(
        "--imbalance", type=float, metavar="X", help="busiest rank / mean that is wanted"
    )
    degree.add_argument("--exponent", type=float, metavar="A", help="of the law of popularity")
    synth.add_argument(
        "--share", type=float, metavar="X", help="of ranks that are cold, of experts that are dead"
    )
    synth.add_argument("--out", type=Path, required=True, metavar="LOADS.npz")
    synth.add_argument("--overwrite", action="store_true", help="replace an existing LOADS.npz")


def _add_group(commands: Any, name: str, summary: str) -> Any:
    """Add a command that only has commands below it."""
    group = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add a command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name=parser.prog)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_out(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that make a folder."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier output at DIR")


def _train(words: list[str]) -> int:
    """Hand over to the entry point of training, which has its own help and its own exits."""
    from megatron_ext.train import main as train

    train(words)
    return DONE


def _plan(arguments: argparse.Namespace) -> int:
    from megatron_ext.offline.loads import check_free, read_loads, write_plans
    from megatron_ext.offline.planning import make_planners, plan_loads, summarize

    if arguments.list:
        return _show(arguments, _strategies(), _strategy_lines)
    if arguments.loads is None:
        raise ValueError("LOADS.npz is not given (nor --list)")
    if arguments.split and arguments.out is None:
        raise ValueError("--split adds to the file of --out, which is not given")
    if arguments.out is not None:
        check_free(arguments.out, overwrite=arguments.overwrite)
    if arguments.objective not in ("tolerance", "time"):
        raise ValueError(f"--objective ({arguments.objective}) must be tolerance or time")
    by_strategy = arguments.strategy == "time"
    settings = _settings(
        arguments,
        for_time=by_strategy or arguments.objective == "time",
        switch="--strategy time" if by_strategy else "--objective time",
    )
    loads = read_loads(arguments.loads)
    planners = make_planners(
        loads,
        arguments.strategy,
        settings,
        slots=arguments.slots,
        nvlink_domain=arguments.nvlink_domain,
    )
    with _progress("Planning", len(loads)) as on_load:
        planned = plan_loads(loads, planners, on_load=on_load)
    if arguments.out is not None:
        write_plans(
            arguments.out,
            loads.load,
            [one.plan for one in planned],
            with_split=arguments.split,
            overwrite=arguments.overwrite,
        )
    layout = planned[0].plan.layout
    used = settings.to_json()
    costs = used.pop("costs")
    used |= {"strategy": arguments.strategy, "objective": arguments.objective}
    used |= {"slots": layout.slots, "nvlink_domain": layout.nvlink_domain}
    if costs is not None:
        used |= costs | {"tolerance": None}
    report = {
        "instances": [one.measured for one in planned],
        "summary": summarize(planned) | used,
    }
    return _show(arguments, report, _plan_lines)


def _strategies() -> dict[str, Any]:
    """What `plan --list` says."""
    from megatron_ext.balance.strategies import STRATEGIES

    return {
        name: {"summary": strategy.summary, "training": True, "offline": strategy.makes_plans}
        for name, strategy in STRATEGIES.items()
    }


def _strategy_lines(report: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, report))
    for name, strategy in report.items():
        where = "training, offline" if strategy["offline"] else "training"
        yield f"{name:<{width}}  {where:<17}  {strategy['summary']}"


def _settings(arguments: argparse.Namespace, *, for_time: bool, switch: str) -> Any:
    """What the options ask planners for; with costs if it is `for_time`, which `switch` says."""
    from megatron_ext.balance.costs import LayerCosts

    needed = ("expert_bytes", "link_bandwidth", "assignment_time")
    names = (*needed, "token_bytes")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    options = {name: "--" + name.replace("_", "-") for name in names}
    if given and not for_time:
        raise ValueError(f"{options[next(iter(given))]} is for {switch}")
    if for_time and (missing := [options[name] for name in needed if name not in given]):
        raise ValueError(f"{switch} needs {', '.join(missing)}")
    return _settings_with(arguments, LayerCosts(**given) if for_time else None)


def _settings_with(arguments: argparse.Namespace, costs: Any) -> Any:
    from megatron_ext.balance.strategies import PlanSettings
    from megatron_ext.offline.placements import read_placement

    return PlanSettings(
        tolerance=arguments.tolerance,
        min_quota=arguments.min_quota,
        interval=arguments.interval,
        alpha=arguments.alpha,
        locality_share=arguments.locality_share,
        min_tokens_per_gemm=arguments.min_tokens_per_gemm,
        costs=costs,
        placement=None if arguments.placement is None else read_placement(arguments.placement),
    )


def _place_craft(arguments: argparse.Namespace) -> int:
    from megatron_ext.balance.plan import plan_layout
    from megatron_ext.balance.strategies import PlanSettings
    from megatron_ext.offline.craft import place, replica_counts
    from megatron_ext.offline.loads import check_free, read_loads
    from megatron_ext.offline.placements import write_placement

    check_free(arguments.out, overwrite=arguments.overwrite)
    settings = PlanSettings(tolerance=arguments.tolerance, min_quota=arguments.min_quota)
    loads = read_loads(arguments.trace)
    _, ranks, experts = loads.load.shape
    layout = plan_layout(
        "craft",
        num_experts=experts,
        ep_size=ranks,
        slots=arguments.slots,
        nvlink_domain=arguments.nvlink_domain,
    )
    replays = len(replica_counts(layout)) + 1
    with _progress("Replaying", replays * len(loads)) as on_load:
        crafted = place(
            loads, layout, settings, budget=arguments.budget, even=arguments.even, on_load=on_load
        )
    write_placement(arguments.out, crafted.placement, overwrite=arguments.overwrite)
    report = {
        "path": str(arguments.out),
        "loads": len(loads),
        "ranks": ranks,
        "experts": experts,
        "slots": layout.slots,
        "budget": crafted.budget,
        "even": arguments.even,
        "layers": crafted.layers(),
    }
    return _show(arguments, report, _craft_lines)


def _place_sem_moe(arguments: argparse.Namespace) -> int:
    from megatron_ext.offline.loads import check_free
    from megatron_ext.offline.routes import read_routes
    from megatron_ext.offline.sem_moe import STEPS, compare, learn, write_semantics

    check_free(arguments.out, overwrite=arguments.overwrite)
    routes = read_routes(arguments.routes)
    measured = routes if arguments.evaluate is None else read_routes(arguments.evaluate)
    with _progress("Clustering", STEPS * len(routes.layers)) as on_layer:
        semantics = learn(routes, arguments.ranks, on_layer=on_layer)
    global_batch = arguments.global_batch or 8 * arguments.ranks
    report = {
        "path": str(arguments.out),
        "samples": routes.num_samples,
        "ranks": arguments.ranks,
        "experts": routes.num_experts,
        "layers": list(routes.layers),
        "global_batch": global_batch,
        "measured": compare(measured, semantics, global_batch),
    }
    write_semantics(arguments.out, semantics, overwrite=arguments.overwrite)
    return _show(arguments, report, _sem_moe_lines)


def _sem_moe_lines(report: dict[str, Any]) -> Iterator[str]:
    keys = ("local_activation_rate", "imbalance", "load_imbalance_rate")
    yield f"semantics     {report['path']}"
    yield f"learned from  {report['samples']} samples, {len(report['layers'])} layers"
    yield ""
    yield from _columns(
        ("placed", "local activation rate", "imbalance", "load-imbalance rate"),
        *((name, *(f"{one[key]:.3f}" for key in keys)) for name, one in report["measured"].items()),
    )


def _craft_lines(report: dict[str, Any]) -> Iterator[str]:
    layers = report["layers"]
    total = sum(layer["replicas"] for layer in layers)
    most = report["ranks"] * report["slots"] * len(layers)
    yield f"placement     {report['path']}"
    yield f"replicas      {total} of {most} that slots allow, at most {report['budget']} a rank"
    yield ""
    yield from _columns(
        ("layer", "replicas", "slots", "balancedness before", "after"),
        *(
            (
                str(layer["layer"]),
                str(layer["replicas"]),
                str(layer["slot_limit"]),
                f"{layer['balancedness_before']:.3f}",
                f"{layer['balancedness_after']:.3f}",
            )
            for layer in layers
        ),
    )


def _replay(arguments: argparse.Namespace) -> int:
    from megatron_ext.offline.loads import read_loads
    from megatron_ext.offline.papers import make_exhibits, more_replays, to_json
    from megatron_ext.offline.replay import check_out, make_report, replay, write_report

    strategies = arguments.strategies.split(",")
    settings = _settings(arguments, for_time="time" in strategies, switch="time among --strategies")
    if arguments.out is not None:
        check_out(arguments.out, overwrite=arguments.overwrite)
    loads = read_loads(arguments.trace)
    room = {"slots": arguments.slots, "nvlink_domain": arguments.nvlink_domain}
    with _progress("Replaying", len(loads) * len(strategies)) as on_load:
        replayed = replay(loads, strategies, settings, **room, on_load=on_load)
    report = make_report(loads, replayed, settings, slots=arguments.slots)
    if arguments.out is not None:
        with _progress("Drawing", more_replays(loads, replayed, **room)) as on_load:
            exhibits = make_exhibits(loads, replayed, settings, **room, on_load=on_load)
        report["papers"] = to_json(exhibits)
        write_report(arguments.out, report, exhibits)
    return _show(arguments, report, _replay_lines)


def _replay_lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.offline.replay import overall_table, prediction_table

    yield report["title"]
    yield ""
    yield overall_table(report)
    if prediction := prediction_table(report):
        yield ""
        yield prediction


def _simulate(arguments: argparse.Namespace) -> int:
    from megatron_ext.offline.hardware import read_hardware
    from megatron_ext.offline.loads import read_loads
    from megatron_ext.offline.shape import read_shape
    from megatron_ext.offline.simulate import IDEAL, NONE, check_out, simulate, write_report

    strategies = arguments.strategies.split(",")
    settings = _settings_with(arguments, None)
    if arguments.out is not None:
        check_out(arguments.out, overwrite=arguments.overwrite)
    hardware = read_hardware(arguments.hardware)
    shape = read_shape(arguments.model, arguments.set)
    loads = read_loads(arguments.trace)
    with _progress("Simulating", len(loads) * len({NONE, IDEAL, *strategies})) as on_load:
        report = simulate(
            loads,
            strategies,
            settings,
            shape=shape,
            hardware=hardware,
            num_gpus=arguments.gpus,
            slots=arguments.slots,
            nvlink_domain=arguments.nvlink_domain,
            on_load=on_load,
        )
    if arguments.out is not None:
        write_report(arguments.out, report)
    return _show(arguments, report, _simulate_lines)


def _simulate_lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.offline.simulate import layer_table, overall_table

    yield report["title"]
    yield ""
    yield overall_table(report)
    yield ""
    yield "A MoE layer, ms:"
    yield ""
    yield layer_table(report)
    yield ""
    yield f"Constants of {report['hardware']['name']} and their sources: --json, or --out DIR."
    yield "Left out: " + "; ".join(report["left_out"]) + "."


def _plan_lines(report: dict[str, Any]) -> Iterator[str]:
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
    yield from _columns(
        ("", "mean", "worst"),
        *(
            (title, format(summary[name]["mean"], form), format(summary[name]["worst"], form))
            for title, name, form in rows
        ),
    )


def _synth(arguments: argparse.Namespace) -> int:
    from megatron_ext.balance.metrics import home_loads, imbalance
    from megatron_ext.offline.loads import check_free, write_loads
    from megatron_ext.offline.synthetic import KINDS, generate, make_spec

    check_free(arguments.out, overwrite=arguments.overwrite)
    sizes = ("ranks", "experts", "tokens", "top_k", "batch", "seed")
    names = (*sizes, "imbalance", "exponent", "share")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    spec = make_spec(arguments.kind, **given)
    with _progress("Drawing", spec.batch) as on_load:
        loads = generate(arguments.kind, spec, on_load=on_load)
    write_loads(arguments.out, loads, overwrite=arguments.overwrite)
    before = [imbalance(home_loads(load)) for load in loads.load]
    report = {
        "path": str(arguments.out),
        "kind": arguments.kind,
        "shape": list(loads.load.shape),
        "imbalance": before,
    }
    return _show(
        arguments,
        report,
        lambda report: [
            f"loads      {report['path']}",
            f"kind       {report['kind']}: {KINDS[report['kind']].summary}",
            f"shape      {' x '.join(map(str, report['shape']))} (loads, ranks, experts)",
            f"imbalance  {min(before):.3f} to {max(before):.3f}",
        ],
    )


def _data_build(arguments: argparse.Namespace) -> int:
    from megatron_ext.data import build_dataset, parse_sources

    if arguments.eod is not None and arguments.tokenizer is None:
        raise ValueError("--eod names a token of the --tokenizer, which is not given")
    domains = parse_sources(arguments.sources)
    total = sum(file.stat().st_size for files in domains.values() for file in files)
    with _progress("Tokenizing", total, in_bytes=True) as on_bytes:
        result = build_dataset(
            domains,
            arguments.out,
            tokenizer_file=arguments.tokenizer,
            eod_token=arguments.eod,
            strict=arguments.strict,
            overwrite=arguments.overwrite,
            on_bytes=on_bytes,
        )
    if result.skipped:
        named = [f"{skipped.path} ({skipped.reason})" for skipped in result.skipped]
        more = len(named) - _MOST_NAMED
        _warn(
            f"skipped {len(named)} files: {', '.join(named[:_MOST_NAMED])}"
            + (f" and {more} more" if more > 0 else "")
        )
    description = _describe(result.manifest) | {
        "skipped": [{"path": str(s.path), "reason": s.reason} for s in result.skipped]
    }
    return _show(arguments, description, _dataset_lines)


def _data_corpus(arguments: argparse.Namespace) -> int:
    from megatron_ext.data.corpus import DOMAINS, gather_corpus

    limit_bytes = arguments.limit_mb << 20
    with _progress("Gathering", limit_bytes * len(DOMAINS), in_bytes=True) as on_bytes:
        result = gather_corpus(
            arguments.out,
            limit_bytes=limit_bytes,
            overwrite=arguments.overwrite,
            on_bytes=on_bytes,
        )
    if result.missing:
        _warn(f"this machine has no text for {', '.join(result.missing)}: left out")
    report = {
        "path": str(arguments.out),
        "domains": {
            name: {"documents": size.documents, "text_bytes": size.text_bytes}
            for name, size in result.domains.items()
        },
        "missing": result.missing,
    }
    return _show(
        arguments,
        report,
        lambda report: [
            f"text of this machine in {report['path']}",
            "",
            *_columns(
                ("domain", "documents", "MiB"),
                *(
                    (name, f"{size['documents']:,}", _mib(size["text_bytes"]))
                    for name, size in report["domains"].items()
                ),
            ),
        ],
    )


def _data_info(arguments: argparse.Namespace) -> int:
    from megatron_ext.data import Manifest
    from megatron_ext.data.mixing import open_domain

    manifest = Manifest.load(arguments.path)
    for name in manifest.domains:
        open_domain(manifest, name)
    return _show(arguments, _describe(manifest), _dataset_lines)


def _checkpoint_inspect(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from checkpoints_tools import find_problems, read_contents

    contents = read_contents(arguments.path)
    problems = find_problems(contents)
    report = asdict(contents) | {"folder": str(contents.folder), "problems": problems}
    _show(arguments, report, _checkpoint_lines)
    return FAILED if problems else DONE


def _checkpoint_relayout(arguments: argparse.Namespace) -> int:
    from checkpoints_tools import relayout
    from megatron_ext.offline.sem_moe import read_semantics

    semantics = read_semantics(arguments.semantics)
    layouts = dict(zip(semantics.layers, semantics.expert, strict=True))
    report = {
        "path": str(arguments.out),
        "layers": list(semantics.layers),
        "tensors": relayout(arguments.path, layouts, arguments.out),
    }
    return _show(
        arguments,
        report,
        lambda report: [
            f"checkpoint  {report['path']}",
            f"moved       {report['tensors']} tensors in {len(report['layers'])} layers",
        ],
    )


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        return _calibrate(arguments)
    if arguments.out is not None:
        raise ValueError("--out is for what --calibrate measures")
    from megatron_ext.doctor import examine

    report = examine()
    _show(arguments, report, _doctor_lines)
    return FAILED if report["problems"] else DONE


def _calibrate(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from megatron_ext.offline.calibrate import calibrate
    from megatron_ext.offline.hardware import write_hardware
    from megatron_ext.offline.loads import check_free

    if arguments.out is not None:
        check_free(arguments.out, overwrite=arguments.overwrite)
    hardware = calibrate(arguments.out.stem if arguments.out else "here")
    if arguments.out is not None:
        write_hardware(arguments.out, hardware)
    return _show(arguments, asdict(hardware), _hardware_lines)


def _hardware_lines(report: dict[str, Any]) -> Iterator[str]:
    yield report["summary"]
    yield ""
    for name, source in report["sources"].items():
        value = report[name]
        text = f"{value:.4g}" if isinstance(value, int | float) else json.dumps(value)
        yield f"{name:<22} {text:<12} {source}"


def _describe(manifest: Any) -> dict[str, Any]:
    """Return a dataset's manifest for people and programs."""
    from dataclasses import asdict

    return asdict(manifest) | {"folder": str(manifest.folder)}


def _dataset_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"dataset    {report['folder']}"
    yield f"tokenizer  {report['tokenizer']}, {report['vocab_size']:,} tokens"
    yield f"eod        {report['eod_token']} ({report['eod']})"
    yield ""
    yield from _columns(
        ("domain", "documents", "tokens", "text MiB"),
        *(
            (name, f"{d['documents']:,}", f"{d['tokens']:,}", _mib(d["text_bytes"]))
            for name, d in report["domains"].items()
        ),
    )


def _checkpoint_lines(report: dict[str, Any]) -> Iterator[str]:
    yield from _columns(
        ("key", "shape", "dtype", "shards"),
        *(
            (
                entry["key"],
                "-" if entry["shape"] is None else "x".join(map(str, entry["shape"])) or "scalar",
                entry["dtype"] or "object",
                str(entry["num_shards"]),
            )
            for entry in report["entries"]
        ),
    )
    yield ""
    yield f"checkpoint   {report['folder']}"
    yield f"step         {'unknown' if report['step'] is None else report['step']}"
    yield f"parameters   {report['num_parameters']:,}"
    yield f"experts      {'none' if report['num_experts'] is None else report['num_experts']}"
    if report["problems"]:
        yield "unfit for stock Megatron:"
        yield from (f"  {problem}" for problem in report["problems"])
    else:
        yield "holds        logical experts only"


def _doctor_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"python               {report['python']} on {report['system']}, {report['cpus']} CPUs"
    for name, version in report["versions"].items():
        yield f"{name:<20} {version or '-'}"
    shared = report["shared_memory"]
    yield "shared memory        " + (
        f"{_mib(shared['free_bytes'])} of {_mib(shared['total_bytes'])} MiB free" if shared else "-"
    )
    if "devices" in report:
        yield f"CUDA of torch        {report['cuda'] or '-'}"
        for device in report["devices"]:
            yield (
                f"device               {device['name']}, {_mib(device['memory_bytes'])} MiB, "
                f"compute capability {device['capability']}"
            )
        if not report["devices"]:
            yield "device               CPU only"
        yield f"native library       {'loads' if report['native_library'] else '-'}"
        yield (
            f"transports           {', '.join(report['transports'])} "
            f"(auto: {report['transport_auto']})"
        )
        yield f"strategies           {', '.join(report['strategies'])}"
    yield ""
    yield from (f"problem: {problem}" for problem in report["problems"])
    if not report["problems"]:
        yield "ready to train"


def _show(
    arguments: argparse.Namespace,
    report: dict[str, Any],
    lines: Callable[[dict[str, Any]], Sequence[str] | Iterator[str]],
) -> int:
    """Print a result, as JSON or for people."""
    text = json.dumps(report, indent=2) if arguments.json else "\n".join(lines(report))
    sys.stdout.write(text + "\n")
    return DONE


def _columns(*rows: tuple[str, ...]) -> Iterator[str]:
    """Align cells: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _positive(text: str) -> int:
    """Read a whole number from 1 on, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be >= 1")
    return number


@contextmanager
def _progress(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr and give the function that moves it on."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Into a log file a bar would only put blank lines.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda steps: progress.advance(task, steps)


def _silence_megatron() -> None:
    """Keep Megatron and torch from telling, at import, about what the CLI does not use."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)(\.|$)")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _warn(message: str) -> None:
    sys.stderr.write(f"warning: {message}\n")


def _complain(command_name: str, error: Exception, status: int) -> int:
    """Say in one line what went wrong; return the exit status."""
    sys.stderr.write(f"{command_name}: error: {' '.join(str(error).split())}\n")
    return status
