"""`megatron-ext train`: trains a model; with `--dry-run` says what a run is, and would need."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.output import DONE, show, warn
from megatron_ext.config import ConfigError, unless_auto
from megatron_ext.files.tables import text_table
from megatron_ext.trainer.command import IMBALANCE, main

if TYPE_CHECKING:
    from megatron_ext.lab.forecast import Forecast
    from megatron_ext.lab.hardware import Hardware
    from megatron_ext.trainer.config import TrainConfig
    from megatron_ext.trainer.model.dry_run import DryRun, Stage
    from megatron_ext.transport import Choice

_GB = 1e9

_STATIC = ("weights", "gradients", "optimizer", "slots", "slot_gradients")
"""What a stage holds before any activation."""

LEFT_OUT = (
    "what a backward needs for a moment, workspaces, buffers of communication, and what an "
    "allocator cannot use"
)


def add(commands: Any) -> None:
    """List the command; its words go to `run` unread."""
    commands.add_parser("train", help="train a model from a recipe and settings")


def run(words: list[str]) -> int:
    """Call the entry point of training, which has its own help and its own exits."""
    main(words, dry_run=dry_run)
    return DONE


def dry_run(options: argparse.Namespace) -> None:
    """Print what the run would need, and as JSON the settings, too."""
    from omegaconf import OmegaConf

    from megatron_ext.trainer.compose import load_without_data

    config, num_ranks = load_without_data(
        options.overrides, options.config_dir, options.config_name, num_ranks=options.ranks
    )
    imbalance = _imbalance(options.imbalance, config.parallel.ep_size)
    vocab_size, vocab_from = _vocabulary(config)
    hardware, transport = _machine(config)

    from megatron_ext.trainer.model.dry_run import dry_run as count
    from megatron_ext.trainer.model.settings import assumes_transformer_engine

    counted = count(config, num_ranks=num_ranks, vocab_size=vocab_size, imbalances=(1.0, imbalance))
    is_asked = options.imbalance is not None
    costs, replication, step = _forecast(config, counted, imbalance, hardware, is_asked=is_asked)
    report = {
        "config": OmegaConf.to_container(OmegaConf.structured(config)),
        "ranks": num_ranks,
        "microbatches": counted.num_microbatches,
        "vocabulary": {"size": vocab_size, "from": vocab_from},
        "params": {
            "total": counted.params.dense + counted.params.experts,
            "active": counted.active,
            "mtp": counted.params.mtp,
        },
        "imbalance": imbalance,
        "stages": [_stage(stage, imbalance) for stage in counted.stages],
        "buffers": _buffers(config, counted, imbalance),
        "fits_with": _fits_with(config, counted, imbalance, hardware, vocab_size),
        "memory_bytes": None if hardware is None else hardware.memory_bytes,
        "machine": None if hardware is None else hardware.summary,
        "layers": "transformer_engine" if assumes_transformer_engine(config) else "local",
        "auto": {
            "transport": transport.name,
            "nvlink_domain": transport.domain_ranks,
            "why": transport.line,
            "timeout_s": config.balance.wait_limit_s or config.timeout_s,
            **_budget(config),
            "link_bandwidth": costs and costs.link_bandwidth,
            "assignment_time": costs and costs.assignment_time,
        },
        "replication": replication and dataclasses.asdict(replication),
        "step": step and dataclasses.asdict(step) | {"speed_up": step.speed_up},
    }
    show(options, report, _lines)


def _imbalance(asked: float | None, ep_size: int) -> float:
    if asked is None:
        return min(IMBALANCE, float(ep_size))
    if not 1 <= asked <= ep_size:
        raise ConfigError([f"--imbalance ({asked}) must be from 1 to parallel.ep_size ({ep_size})"])
    return asked


def _machine(config: TrainConfig) -> tuple[Hardware | None, Choice]:
    """Return the machine that the recipe names, and what replicas move over there."""
    from megatron_ext.lab.forecast import forecast_transport
    from megatron_ext.lab.hardware import recipe_hardware

    try:
        hardware = recipe_hardware(config)
        return hardware, forecast_transport(config, hardware)
    except (ValueError, RuntimeError) as error:
        raise ConfigError([str(error)]) from None


def _forecast(
    config: TrainConfig,
    counted: DryRun,
    imbalance: float,
    hardware: Hardware | None,
    *,
    is_asked: bool,
) -> Forecast:
    """Return what balancing would do there; nothing without a machine or experts.

    Nor, with a warning, where no load has an imbalance that nobody asked for.
    """
    from megatron_ext.lab.forecast import Forecast, forecast

    if hardware is None:
        return Forecast()
    try:
        return forecast(config, counted, imbalance=imbalance, hardware=hardware)
    except ValueError as error:
        if is_asked:
            raise ConfigError([f"--imbalance ({imbalance}): {error}"]) from None
        warn(f"no forecast of replicas and steps: {error}; --imbalance chooses another")
        return Forecast()


def _fits_with(
    config: TrainConfig,
    counted: DryRun,
    imbalance: float,
    hardware: Hardware | None,
    vocab_size: int,
) -> dict[str, Any] | None:
    """Return with which settings a run would fit that does not; None if it does, or none are."""
    from megatron_ext.trainer.model.dry_run import what_fits

    most = max(stage.static + stage.activations[imbalance] for stage in counted.stages)
    if hardware is None or most <= hardware.memory_bytes:
        return None
    fits = what_fits(
        config,
        num_ranks=counted.num_ranks,
        vocab_size=vocab_size,
        imbalance=imbalance,
        memory_bytes=hardware.memory_bytes,
    )
    return fits and {"overrides": fits[0], "bytes": fits[1]}


def _budget(config: TrainConfig) -> dict[str, Any]:
    """Return what moving replicas takes of a GPU: as given, else for each architecture."""
    from megatron_ext.transport.gpus import BUDGETS, budget_of

    balance = config.balance
    asked = unless_auto(balance.push_blocks), unless_auto(balance.grad_reduce_share)
    of_gpus = {f"{major}.x": budget_of((major, 0), *asked) for major in BUDGETS}
    return {
        name: given if given is not None else {gpu: getattr(of_gpus[gpu], name) for gpu in of_gpus}
        for name, given in zip(("push_blocks", "grad_reduce_share"), asked, strict=True)
    }


def _vocabulary(config: TrainConfig) -> tuple[int, str]:
    """Return the number of tokens that the model knows, and who says so."""
    from megatron_ext.data.tokenizer import ByteTokenizer
    from megatron_ext.trainer.data import find_data

    if config.model.vocab_size:
        return config.model.vocab_size, "model.vocab_size"
    if manifest := find_data(config):
        return manifest.vocab_size, f"the data in {config.data.path}"
    return ByteTokenizer.vocab_size, "bytes, as there are no data and model.vocab_size is 0"


def _stage(stage: Stage, imbalance: float) -> dict[str, Any]:
    activations = {"even": stage.activations[1.0], "uneven": stage.activations[imbalance]}
    return {
        "stage": stage.pp_rank,
        **{name: getattr(stage, name) for name in ("layers", "params", *_STATIC)},
        "activations": activations,
        "memory": {name: stage.static + size for name, size in activations.items()},
    }


def _buffers(config: TrainConfig, counted: DryRun, imbalance: float) -> dict[str, Any] | None:
    """Return the buffers that plans allow, and what they save of a rank's activations."""
    from megatron_ext.trainer.model.dry_run import recommended_buffers
    from megatron_ext.trainer.validate import expert_shards

    buffers = recommended_buffers(config, tokens=counted.tokens)
    if buffers is None or imbalance == 1:
        return None
    # Activations grow with the rows of experts, of which even loads have as many as choices.
    choices = counted.tokens * config.model.topk * expert_shards(config)
    most = max(stage.activations[imbalance] - stage.activations[1.0] for stage in counted.stages)
    rows_saved = buffers.usual_rows - buffers.rows
    saved = round(most / (imbalance - 1) * rows_saved / choices)
    return dataclasses.asdict(buffers) | {"saved_bytes": saved}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    params, imbalance = report["params"], report["imbalance"]
    also = f", and {params['mtp']:,} that predict further tokens" if params["mtp"] else ""
    vocabulary = report["vocabulary"]
    yield (
        f"Parameters: {params['total']:,}, {params['active']:,} active for a token{also}. "
        f"Vocabulary: {vocabulary['size']:,} ({vocabulary['from']})."
    )
    yield (
        f"{report['ranks']} ranks, {report['microbatches']} microbatches a step. One rank of each "
        f"pipeline stage, GB; activations at even loads and on the busiest rank at {imbalance:g}:"
    )
    if report["layers"] == "transformer_engine":
        yield (
            "Assumed: Transformer Engine's layers (attention keeps no scores), fused gradients; "
            "model.transformer_impl=local counts Megatron's."
        )
    yield ""
    yield text_table(_HEADER, [_row(stage) for stage in report["stages"]])
    yield ""
    yield LEGEND
    if report["memory_bytes"] is not None:
        most = max(stage["memory"]["uneven"] for stage in report["stages"])
        share = most / report["memory_bytes"]
        verdict = "fits" if share <= 1 else "does NOT fit"
        yield (
            f"Busiest rank: {most / _GB:.1f} GB of {report['memory_bytes'] / _GB:.0f} GB "
            f"({report['machine']}): {verdict}. Left out: {LEFT_OUT}."
        )
        if share > 1:
            yield _advice(report["fits_with"])
    if (buffers := report["buffers"]) is not None:
        yield (
            f"With HybridEP's buffers of fixed size, plans need moe_expert_rank_capacity_factor "
            f"{buffers['factor']:g}: {buffers['rows']:,} rows instead of {buffers['usual_rows']:,} "
            f"with 1.5, and {buffers['saved_bytes'] / _GB:.2f} GB less of activations."
        )
    auto = report["auto"]
    yield f"{auto['why']}. Replicas: domains of {auto['nvlink_domain']} ranks."
    if report["machine"] is not None:
        yield (
            f"Moving replicas takes push_blocks {_by_gpu(auto['push_blocks'])} and "
            f"grad_reduce_share {_by_gpu(auto['grad_reduce_share'])} of a GPU."
        )
    if auto["link_bandwidth"] is None:
        yield (
            "Costs of balance.objective=time, and of replication: only with a machine, as in "
            "hardware=server_8_h100."
        )
        return
    yield (
        f"Costs of balance.objective=time: {auto['link_bandwidth'] / _GB:.4g} GB/s, "
        f"{1e6 * auto['assignment_time']:.3g} us an assignment (as given, else of the machine; a "
        "run measures them)."
    )
    if (moved := report["replication"]) is None:
        yield "Replication: none, or by earlier loads, predictions or a placement: no forecast."
    else:
        yield _replication_line(moved)
    if (step := report["step"]) is None:
        yield (
            "Time of a step: the simulator has no model of tensor parallelism, of replicas by "
            "earlier loads, predictions or a placement, nor of one EP rank."
        )
    else:
        yield _step_line(step, report)


def _advice(fits: dict[str, Any] | None) -> str:
    if fits is None:
        return (
            "Neither parallel.recompute=full nor larger EP groups of these ranks would be enough: "
            "more ranks, more pipeline stages or a smaller data.micro_batch_size may be."
        )
    return f"It fits with {' '.join(fits['overrides'])}: {fits['bytes'] / _GB:.1f} GB."


def _step_line(step: dict[str, Any], report: dict[str, Any]) -> str:
    said = f"A step takes {step['step_ms']:.0f} ms by the simulator's model (not measured)"
    if report["config"]["balance"]["strategy"] == "none":
        return f"{said}; {step['share_of_ideal']:.2f} of the speed of even routing."
    here = " Plans take as long as on this machine." if step["solve_from"] == "here" else ""
    return (
        f"{said} at an imbalance of {report['imbalance']:g}, {step['speed_up']:.2f} x as fast as "
        f"without balancing ({step['without_ms']:.0f} ms), {step['share_of_ideal']:.2f} of the "
        f"speed of even routing.{here}"
    )


def _replication_line(moved: dict[str, Any]) -> str:
    return (
        f"Replication in a layer and microbatch, by the simulator's model: imbalance "
        f"{moved['imbalance_before']:.2f} -> {moved['imbalance_after']:.2f} by "
        f"{moved['replicas']:.1f} replicas; the busiest rank moves "
        f"{moved['weight_bytes'] / _GB:.3f} GB of weights in {moved['weight_ms']:.3f} ms (and "
        f"again in backward) and {moved['grad_bytes'] / _GB:.3f} GB of gradients in "
        f"{moved['grad_ms']:.3f} ms; its experts' forward takes {moved['experts_ms']:.3f} ms "
        f"instead of {moved['experts_before_ms']:.3f} ms."
    )


def _by_gpu(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{each} (compute capability {gpu})" for gpu, each in value.items())


LEGEND = (
    "slots, slot grads: weights and gradients of replicas; activations: kept for backward; all: "
    "the rank's memory;\nat even loads, and uneven: on the busiest rank."
)
"""Explains the columns of the table of stages."""

_HEADER = (
    *("stage", "layers", "parameters", "weights", "gradients", "optimizer", "slots", "slot grads"),
    *("activations", "uneven", "all", "all uneven"),
)


def _row(stage: dict[str, Any]) -> tuple[str, ...]:
    sizes = [stage[name] for name in _STATIC]
    sizes += [*stage["activations"].values(), *stage["memory"].values()]
    return (
        str(stage["stage"]),
        str(len(stage["layers"])),
        f"{stage['params']:,}",
        *(f"{size / _GB:.2f}" for size in sizes),
    )
