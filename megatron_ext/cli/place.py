"""`megatron-ext place`: places replicas, experts or samples before a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.arguments import existing_path, positive
from megatron_ext.cli import options
from megatron_ext.cli.output import progress, show
from megatron_ext.files.tables import fill, text_table


def add(commands: Any) -> None:
    """Add the command and those below it."""
    place = options.add_group(
        commands, "place", "place replicas or experts before a run, from the record of another"
    )
    _add_craft(place)
    _add_eplb(place)
    _add_sem_moe(place)


def _add_craft(place: Any) -> None:
    craft = options.add_command(
        place,
        "craft",
        run_craft,
        "place replicas in the layers of a trace that gain most by them",
        "megatron-ext place craft runs/train/trace --slots 2 --out placement.npz\n"
        "  megatron-ext replay runs/train/trace --strategies craft balance.placement=placement.npz",
    )
    options.add_trace(craft)
    options.add_balance(
        craft,
        ("slots", "S", "most replicas of a rank in a layer"),
        ("tolerance", "T", "imbalance - 1 that is good enough in the run to come"),
        ("min_quota", "N", "fewest assignments of a replica in the run to come"),
    )
    options.add_nvlink_domain(craft)
    craft.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help="most replicas of a rank over all layers (default: as many as gain more than the "
        "average replica)",
    )
    craft.add_argument(
        "--even",
        action="store_true",
        help="put equally many replicas on every rank over all layers, so that memory is even",
    )
    _add_file(craft, "PLACEMENT.npz")


def _add_eplb(place: Any) -> None:
    eplb = options.add_command(
        place,
        "eplb",
        run_eplb,
        "place all experts by the loads of a trace, for a checkpoint",
        "megatron-ext place eplb runs/train/trace --out layout.npz\n"
        "  megatron-ext checkpoint relayout runs/train layout.npz --out start/step_100",
    )
    options.add_trace(eplb)
    for option, metavar, what in (
        ("--groups", "G", "groups of experts that stay on one node each, if G is a multiple of N"),
        ("--nodes", "N", "nodes of an EP group"),
    ):
        eplb.add_argument(
            option, type=positive, default=1, metavar=metavar, help=f"{what} (%(default)s)"
        )
    _add_file(eplb, "LAYOUT.npz")


def _add_sem_moe(place: Any) -> None:
    sem_moe = options.add_command(
        place,
        "sem_moe",
        run_sem_moe,
        "place experts, samples and tokens that belong together on one rank",
        "megatron-ext place sem_moe runs/train/routes --ranks 8 --out semantics.npz\n"
        "  megatron-ext checkpoint relayout runs/train semantics.npz --out start/step_100",
    )
    sem_moe.add_argument(
        "routes",
        type=existing_path,
        metavar="ROUTES",
        help="a run's folder of routes (logging.route_samples), or a file: tokens' choices by id",
    )
    sem_moe.add_argument(
        "--ranks", type=positive, required=True, metavar="R", help="ranks of an EP group"
    )
    sem_moe.add_argument(
        "--evaluate",
        type=existing_path,
        metavar="ROUTES",
        help="choices to measure the placement with (default: those it is made from)",
    )
    sem_moe.add_argument(
        "--global-batch",
        type=positive,
        metavar="N",
        help="samples of a batch in that measurement, a multiple of R (8 R)",
    )
    _add_file(sem_moe, "SEMANTICS.npz")


def _add_file(parser: argparse.ArgumentParser, metavar: str) -> None:
    options.add_out(
        parser, metavar, "where to write it", required=True, replaces="an existing file"
    )


def run_craft(arguments: argparse.Namespace) -> int:
    """Place replicas, write them, and show what each layer gains."""
    options.check_out(arguments)
    balance = options.balance_config(arguments)
    from megatron_ext.files.placement import write_placement
    from megatron_ext.methods.craft.place import place, replica_counts

    asked = options.asked(balance)
    loads = options.read_trace(arguments)
    options.warn_of_empty_slots(loads, asked)
    layout = asked.layout("craft", loads)
    replays = len(replica_counts(layout)) + 1
    with progress("Replaying", replays * len(loads)) as on_load:
        crafted = place(
            loads,
            layout,
            asked.planning,
            budget=arguments.budget,
            even=arguments.even,
            on_load=on_load,
        )
    write_placement(arguments.out, crafted.placement, overwrite=arguments.overwrite)
    report = {
        "path": str(arguments.out),
        "loads": len(loads),
        "ranks": layout.ep_size,
        "experts": layout.num_experts,
        "slots": layout.slots,
        "budget": crafted.budget,
        "even": arguments.even,
        "layers": crafted.layers(),
    }
    return show(arguments, report, _craft_lines)


def _craft_lines(report: dict[str, Any]) -> Iterator[str]:
    layers = report["layers"]
    total = sum(layer["replicas"] for layer in layers)
    most = report["ranks"] * report["slots"] * len(layers)
    yield f"placement     {report['path']}"
    yield f"replicas      {total} of {most} that slots allow, at most {report['budget']} a rank"
    yield ""
    forms = {
        "layer": "{layer}",
        "replicas": "{replicas}",
        "slots": "{slot_limit}",
        "balancedness before": "{balancedness_before:.3f}",
        "after": "{balancedness_after:.3f}",
    }
    yield text_table(*fill(forms, layers))


def run_eplb(arguments: argparse.Namespace) -> int:
    """Rearrange all experts, write the arrangement, and show how even ranks would have been."""
    options.check_out(arguments)
    from megatron_ext.files.relayout import write_layout
    from megatron_ext.methods.eplb.rearrange import rearrange

    loads = options.read_trace(arguments)
    rearranged = rearrange(loads, num_groups=arguments.groups, num_nodes=arguments.nodes)
    layout = {layer: one.expert for layer, one in rearranged.items()}
    write_layout(arguments.out, layout, overwrite=arguments.overwrite)
    _, ranks, experts = loads.load.shape
    report = {
        "path": str(arguments.out),
        "loads": len(loads),
        "ranks": ranks,
        "experts": experts,
        "groups": arguments.groups,
        "nodes": arguments.nodes,
        "layers": [
            {"layer": layer, "imbalance_before": one.before, "imbalance_after": one.after}
            for layer, one in rearranged.items()
        ],
    }
    return show(arguments, report, _eplb_lines)


def _eplb_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"layout        {report['path']}"
    yield ""
    forms = {
        "layer": "{layer}",
        "imbalance before": "{imbalance_before:.3f}",
        "after": "{imbalance_after:.3f}",
    }
    yield text_table(*fill(forms, report["layers"]))


def run_sem_moe(arguments: argparse.Namespace) -> int:
    """Cluster experts and samples, write what was learned, and show how many tokens stay."""
    options.check_out(arguments)
    from megatron_ext.files.routes import read_routes
    from megatron_ext.methods.sem_moe.learn import STEPS, check_batches, check_fit, compare, learn
    from megatron_ext.methods.sem_moe.savings import compare_tokens, sample_starts
    from megatron_ext.methods.sem_moe.semantics import write_semantics

    routes = read_routes(arguments.routes)
    measured = routes if arguments.evaluate is None else read_routes(arguments.evaluate)
    global_batch = arguments.global_batch or 8 * arguments.ranks
    # Learning takes long: check first that its result can be measured.
    check_fit(measured, routes)
    check_batches(measured, arguments.ranks, global_batch)
    sample_starts(measured, arguments.ranks)
    with progress("Clustering", STEPS * len(routes.layers)) as on_layer:
        semantics = learn(routes, arguments.ranks, on_layer=on_layer)
    measured_samples = compare(measured, semantics, global_batch)
    with progress("Dealing tokens", len(routes.layers)) as on_layer:
        measured_tokens = compare_tokens(measured, semantics, on_layer=on_layer)
    report = {
        "path": str(arguments.out),
        "samples": routes.num_samples,
        "ranks": arguments.ranks,
        "experts": routes.num_experts,
        "layers": list(routes.layers),
        "global_batch": global_batch,
        "measured": measured_samples,
        "measured_tokens": measured_tokens,
    }
    write_semantics(arguments.out, semantics, overwrite=arguments.overwrite)
    return show(arguments, report, _sem_moe_lines)


def _sem_moe_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"semantics     {report['path']}"
    yield f"learned from  {report['samples']} samples, {len(report['layers'])} layers"
    yield ""
    keys = ("local_activation_rate", "imbalance", "load_imbalance_rate")
    yield text_table(
        ("placed", "local activation rate", "imbalance", "load-imbalance rate"),
        [(name, *(f"{one[key]:.3f}" for key in keys)) for name, one in report["measured"].items()],
    )
    yield ""
    yield text_table(
        ("tokens of a sample dealt", "local activation rate", "moved", "sent", "imbalance"),
        [
            (name, *(f"{value:.3f}" for value in one.values()))
            for name, one in report["measured_tokens"].items()
        ],
    )
