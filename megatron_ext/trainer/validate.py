"""Checks of a run before it starts: settings, Megatron, the data, the checkpoint.

Megatron is imported where it is needed: on a CPU, the caller enables the platform first.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_ext.arguments import one_line
from megatron_ext.balance.planner import LayerPlanner, plan_layout
from megatron_ext.balance.strategies import STRATEGIES, PlanSettings
from megatron_ext.balance.strategies.strategy import StaysMegatron
from megatron_ext.config import ConfigError, field_problems
from megatron_ext.files.placement import read_placement
from megatron_ext.files.recipes import nearest_recipe, recipe_names, shipped_recipes
from megatron_ext.trainer.checkpoints.choice import find_checkpoint, model_differences
from megatron_ext.trainer.config import MEGATRON_NAMES, TrainConfig
from megatron_ext.trainer.data import DATA_ERRORS, find_data, has_data, open_data
from megatron_ext.trainer.early import run_dir_problems
from megatron_ext.words import did_you_mean


def validate(config: TrainConfig, *, num_ranks: int, needs_data: bool = True) -> None:
    """Check a run's settings against each other, Megatron, the data and the checkpoint.

    Needs no process group. Imports Megatron. Without `needs_data`, the data need not be there, nor
    the packages that the run asks for.

    Raises:
        ConfigError: With all problems.
    """
    if problems := config.type_problems():
        raise ConfigError(problems)
    problems = config.problems()
    values_fit = not any(
        field_problems(type(section), section) for section in (config, *config.sections())
    )
    if values_fit:
        problems += _check_sections(config)
        problems += _check_ranks(config, num_ranks)
        problems += _check_domain(config)
    if not problems:
        problems += _check_placement(config)
    problems += _check_megatron(config, values_fit=values_fit, sizes_fit=not problems)
    problems += _check_needed_file(config)
    problems += _check_hooks(config) if values_fit else ()
    problems += _check_engine(config) if needs_data else ()
    if needs_data or has_data(config):
        problems += _check_data(config, values_fit=values_fit)
    problems += run_dir_problems(config, begins=needs_data)
    if not problems:
        problems += _check_checkpoint(config)
    if problems:
        raise ConfigError(problems)


def _multiple(value: int, name: str, of: int, of_name: str) -> Iterator[str]:
    if value % of:
        yield f"{name} ({value}) must be a multiple of {of_name} ({of})"


def _check_sections(config: TrainConfig) -> Iterator[str]:
    """Check sizes of one section that must divide or fit sizes of another section."""
    from megatron_ext.trainer.model.settings import UNEVEN_STAGES

    samples, tp_size = config.logging.route_samples, config.parallel.tp_size
    divided = [
        ("model.num_experts", "parallel.ep_size"),
        ("model.num_attention_heads", "parallel.tp_size"),
        ("data.sequence_length", "parallel.tp_size"),
    ]
    if not any(config.megatron.get(name) for name in UNEVEN_STAGES):
        divided.append(("model.num_layers", "parallel.pp_size * parallel.vpp_size"))
    if not (config.megatron.get("kv_channels") or config.megatron.get("multi_latent_attention")):
        divided.append(("model.hidden_size", "model.num_attention_heads"))
    yield from _check_uneven_stages(config)
    for name, by in divided:
        size = math.prod(attrgetter(factor)(config) for factor in by.split(" * "))
        yield from _multiple(attrgetter(name)(config), name, size, by)
    if samples and tp_size > 1:
        yield (
            f"logging.route_samples ({samples}) must be 0 with parallel.tp_size ({tp_size}) > 1: "
            "no rank's router sees whole samples"
        )
    if samples and config.megatron.get("overlap_moe_expert_parallel_comm"):
        yield (
            f"logging.route_samples ({samples}) must be 0 with "
            "megatron.overlap_moe_expert_parallel_comm: the model is not called with its tokens"
        )


def _check_uneven_stages(config: TrainConfig) -> Iterator[str]:
    """Check the layers that a first and last pipeline stage of their own leave to the others."""
    parallel = config.parallel
    own = {
        name: layers
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if isinstance(layers := config.megatron.get(name), int) and layers
    }
    layers, stages = config.model.num_layers - sum(own.values()), parallel.pp_size - len(own)
    fits = layers >= 0 and layers % (stages * parallel.vpp_size) == 0 if stages > 0 else layers == 0
    if own and not fits:
        given = " and ".join(f"megatron.{name} ({value})" for name, value in own.items())
        yield (
            f"{given} must leave layers that divide by the other stages: {layers} of "
            f"model.num_layers ({config.model.num_layers}) for {stages} of "
            f"parallel.pp_size ({parallel.pp_size})"
        )


def expert_shards(config: TrainConfig) -> int:
    """Return the ranks that share an expert, by the section `megatron`; 1 by default."""
    shards = config.megatron.get("expert_tensor_parallel_size", 1)
    if shards is None:  # As Megatron reads it.
        return config.parallel.tp_size
    return max(1, shards) if isinstance(shards, int) else 1


def _check_ranks(config: TrainConfig, num_ranks: int) -> Iterator[str]:
    """Check that parallel sizes divide the number of ranks, and that batches fit these ranks."""
    parallel, data = config.parallel, config.data
    if num_ranks < 1:
        yield f"the number of ranks ({num_ranks}) must be >= 1"
        return
    yield from _check_recipe_ranks(config, num_ranks)
    if beyond := [rank for rank in config.profile.ranks if rank >= num_ranks]:
        yield f"profile.ranks ({beyond}) must be < the number of ranks ({num_ranks})"
    shards = expert_shards(config)
    per_expert = " * megatron.expert_tensor_parallel_size" if shards > 1 else ""
    for size, name in (
        (parallel.ep_size * shards, f"parallel.ep_size{per_expert}"),
        (parallel.tp_size, "parallel.tp_size"),
    ):
        yield from _multiple(
            num_ranks, "the number of ranks", size * parallel.pp_size, f"{name} * parallel.pp_size"
        )
    if num_ranks % (parallel.tp_size * parallel.pp_size):
        return
    of_microbatch = data.micro_batch_size * num_ranks // (parallel.tp_size * parallel.pp_size)
    yield from _multiple(
        data.global_batch_size,
        "data.global_batch_size",
        of_microbatch,
        "data.micro_batch_size * data-parallel ranks",
    )
    if parallel.vpp_size > 1:
        yield from _multiple(
            data.global_batch_size // of_microbatch,
            "microbatches of a step",
            parallel.pp_size,
            "parallel.pp_size",
        )


def _check_recipe_ranks(config: TrainConfig, num_ranks: int) -> Iterator[str]:
    wanted = config.parallel.num_ranks
    if num_ranks >= wanted:
        return
    nearest = nearest_recipe(config.recipe, recipe_names(shipped_recipes()), num_ranks=num_ranks)
    near = f"the nearest recipe for so many is {nearest}; " if nearest else ""
    cure = f"start so many (--ranks {wanted})"
    if config.hardware.summary:
        cure = "size=tiny makes the model small enough for ranks without a GPU"
    rule = f"must be >= parallel.num_ranks ({wanted})"
    yield f"the number of ranks ({num_ranks}) {rule}: {near}{cure}"


def _check_domain(config: TrainConfig) -> Iterator[str]:
    """Check that EP groups are in one NVLink domain, unless a setting gives the domain's size."""
    ep_size, domain = config.parallel.ep_size, config.hardware.domain_ranks
    strategy = STRATEGIES.get(config.balance.strategy)
    has_replicas = strategy is not None and strategy.kind is strategy.planner
    if domain is None or ep_size <= domain or config.balance.domain_ranks or not has_replicas:
        return
    yield (
        f"parallel.ep_size ({ep_size}) must be <= {domain}, the ranks of an NVLink domain "
        f"({config.hardware.summary}), or balance.nvlink_domain must say how many ranks reach each "
        f"other: balance.nvlink_domain={domain} keeps replicas inside"
    )


def _check_megatron(config: TrainConfig, *, values_fit: bool, sizes_fit: bool) -> list[str]:
    """Check the section `megatron` and the balancing, and let Megatron check its settings."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from megatron_ext.mcore.limits import validate_for_balancing
    from megatron_ext.trainer.model.settings import (
        overridable_settings,
        transformer_class,
        transformer_config,
        transformer_settings,
        unquantized,
    )

    settings = transformer_settings(config) if values_fit else {}
    described = transformer_class(config)
    known = {megatron.name: megatron for megatron in fields(described)}
    hints = get_type_hints(described)
    problems = []
    for name, value in config.megatron.items():
        if name not in known:
            version = importlib.metadata.version("megatron-core")
            problems.append(
                f"megatron.{name}: Megatron-Core {version} has no setting of this name"
                f"{did_you_mean(name, known)}"
            )
        elif name in settings:
            here = f"; here it is {MEGATRON_NAMES[name]}" if name in MEGATRON_NAMES else ""
            problems.append(
                f"megatron.{name} ({value}) cannot be set there: "
                f"it is {settings[name]!r} by the other sections{here}"
            )
        elif not _has_type(value, hints[name]) and not (value is None is known[name].default):
            wanted = re.sub(r"[a-z_.]+\.|<class '(\w+)'>", r"\1", str(hints[name]))
            problems.append(f"megatron.{name} ({value!r}) must be of type {wanted}")
    if (graphs := config.megatron.get("cuda_graph_impl", "none")) != "none":
        problems.append(
            f"megatron.cuda_graph_impl ({graphs}) must be none: this program captures no graphs; "
            "Megatron's own programs do, which `python -m megatron_ext.pretrain` runs balanced"
        )
    if config.megatron.get("moe_paged_stash"):
        problems.append(
            "megatron.moe_paged_stash (True) must be False: this program does not run a step again "
            "if the stash was full; Megatron's own programs do, which "
            "`python -m megatron_ext.pretrain` runs balanced"
        )
    # The numbers of experts and ranks were checked above, under their names here.
    ep_size = max(1, config.parallel.ep_size)
    sizes = {"num_moe_experts": ep_size, "expert_model_parallel_size": ep_size}
    checked = SimpleNamespace(**(overridable_settings(config) | config.megatron | settings | sizes))
    problems += validate_for_balancing(checked, config.balance)
    if sizes_fit and not problems:
        try:
            # With quantization, Megatron asks for the version of Transformer Engine; that it must
            # be there is said once (`_check_engine`).
            transformer_config(config if HAVE_TE else unquantized(config))
        except (ValueError, AssertionError, TypeError) as error:
            problems.append(f"Megatron: {one_line(error)}")
    return problems


def _check_engine(config: TrainConfig) -> Iterator[str]:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    from megatron_ext.trainer.model.settings import recipe_of

    asked, recipe = config.model.transformer_impl, recipe_of(config)
    if HAVE_TE or (asked != "transformer_engine" and recipe is None):
        return
    what = f"quantization by {recipe}" if recipe else f"model.transformer_impl ({asked})"
    way_out = "leave out megatron.fp8 or megatron.fp4" if recipe else "model.transformer_impl=local"
    yield (
        f"{what}: Transformer Engine is not installed: "
        f"pip install --no-build-isolation 'megatron-ext[te]', or {way_out}"
    )


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation of Megatron's; True where that is hard to tell."""
    kind = get_origin(hint)
    if kind in (Union, UnionType):
        return any(_has_type(value, each) for each in get_args(hint))
    if kind is Literal:
        return value in get_args(hint)
    if kind is Callable:
        return callable(value)
    if isinstance(value, bool):
        return hint in (bool, Any)
    if hint is float:
        return isinstance(value, int | float)
    kind = kind or hint
    # Lists of YAML stand for tuples, too.
    return not isinstance(kind, type) or isinstance(value, list if kind is tuple else kind)


def _check_placement(config: TrainConfig) -> Iterator[str]:
    balance = config.balance
    if not balance.placement:
        return
    try:
        placement = read_placement(Path(balance.placement))
        layout = plan_layout(
            balance.strategy,
            num_experts=config.model.num_experts,
            ep_size=config.parallel.ep_size,
            slots=balance.slots,
            nvlink_domain=balance.domain_ranks,
        )
        # With that setting of Megatron's, not every layer has experts.
        all_layers = range(1, config.model.num_layers + 1)
        layers = placement.layers if "moe_layer_freq" in config.megatron else all_layers
        for layer in layers:
            LayerPlanner(balance.strategy, layout, PlanSettings(placement=placement), layer=layer)
    except (FileNotFoundError, ValueError, ModuleNotFoundError) as error:
        yield f"balance.placement ({balance.placement}): {one_line(error)}"


def _check_needed_file(config: TrainConfig) -> Iterator[str]:
    """Check that a setting names the file without which the strategy does nothing."""
    name = config.balance.strategy
    kind = STRATEGIES[name].kind if name in STRATEGIES else None
    needs = kind.needs if isinstance(kind, StaysMegatron) else ()
    if needs and not any(attrgetter(setting)(config) for setting in needs):
        yield (
            f"{' or '.join(needs)} must name a file with balance.strategy={name}: "
            f"`megatron-ext place {name}` makes one from a run's routes"
        )


def _check_hooks(config: TrainConfig) -> Iterator[str]:
    """Check the files of methods' hooks, and that the run can follow these files."""
    from megatron_ext.methods.run_hook import run_hooks
    from megatron_ext.trainer.model.settings import overridable_settings, transformer_settings

    settings = overridable_settings(config) | transformer_settings(config) | config.megatron
    manifest = find_data(config)
    vocab_size = manifest.vocab_size if manifest else None
    for setting, path, hook in run_hooks(config.data):
        checked = SimpleNamespace(**settings)
        for problem in hook.problems(path, checked, config.balance, vocab_size):
            yield f"{setting} ({path}): {one_line(problem)}"


def _check_data(config: TrainConfig, *, values_fit: bool) -> Iterator[str]:
    from megatron_ext.trainer.model.build import dataset

    try:
        manifest = open_data(config)
        if values_fit and 0 < config.model.vocab_size < manifest.vocab_size:
            yield (
                f"model.vocab_size ({config.model.vocab_size}) must be >= "
                f"{manifest.vocab_size}, the tokens of {config.data.path}; 0 takes these"
            )
        elif values_fit:
            dataset(config, manifest, "train")
            if config.eval_every:
                dataset(config, manifest, "validation")
    except DATA_ERRORS as error:
        problem = one_line(error)
        known = problem.startswith("data.")
        yield problem if known else f"data.path ({config.data.path}): {problem}"


def _check_checkpoint(config: TrainConfig) -> Iterator[str]:
    try:
        if checkpoint := find_checkpoint(config, {}):
            manifest = find_data(config)
            vocab_size = manifest.vocab_size if manifest else 0
            yield from model_differences(config, checkpoint, vocab_size)
    except ValueError as error:
        yield str(error)
