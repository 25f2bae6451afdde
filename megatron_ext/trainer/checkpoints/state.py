"""The state of a run in a checkpoint: model, optimizer, generators, by logical parameter or rank.

Nothing here depends on how the state is cut into files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemReader

METADATA = {
    # Optimizer state by parameter, not by data-parallel shard: readable under other parallel sizes.
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def model_state(chunks: list[DistributedDataParallel], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the model's sharded state, by chunk, as a checkpoint with this metadata stores it."""
    return {
        model_key(index, chunks): chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }


def sharded_state(
    chunks: list[DistributedDataParallel], optimizer: Any, *, is_loading: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is stored by logical parameter or rank, and the optimizer's other values.

    The other values are settings and the number of steps, which come from the config and
    `run.json`. Megatron orders them by parallel sizes, so a checkpoint that held them would only
    load under equal sizes.
    """
    metadata = dict(METADATA)  # Megatron adds its process groups, which may be others next time.
    state = model_state(chunks, metadata)
    state["optimizer"], optimizer_settings = extract_sharded_base(
        optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    )
    generators = {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }
    state["generators"] = ShardedObject(
        "generators", generators, (dist.get_world_size(),), (dist.get_rank(),)
    )
    return state, optimizer_settings


def saved_state(chunks: list[DistributedDataParallel], optimizer: Any) -> dict[str, Any]:
    """Return the sharded state to save, also before the first step."""
    # Megatron asks for state that Adam gets in its first step.
    has_state = adam_steps(optimizer) > 0
    with nullcontext() if has_state else adam_can_load(optimizer, 0):
        return sharded_state(chunks, optimizer, is_loading=False)[0]


def load_state(
    chunks: list[DistributedDataParallel],
    optimizer: Any,
    run: dict[str, Any],
    read: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """Put what a checkpoint holds into model, optimizer and generators.

    The generators continue only if the number of ranks is the same as when saving; otherwise they
    keep their seeds. `read` fills a sharded state from the checkpoint's files.
    """
    # Skipped steps are not the optimizer's; a checkpoint without this number has none of them.
    steps = run.get("optimizer_steps", run["step"])
    with adam_can_load(optimizer, steps):
        wanted, optimizer_settings = sharded_state(chunks, optimizer, is_loading=True)
        if run["num_ranks"] != dist.get_world_size():
            del wanted["generators"]
        state = read(wanted)
        for index, chunk in enumerate(chunks):
            chunk.module.load_state_dict(state[model_key(index, chunks)])
        loaded = merge(optimizer_settings, state["optimizer"])
        # Megatron marks what a rank keeps to itself; its own loading takes the mark off.
        loaded = dict_list_map_inplace(
            lambda each: each.unwrap() if isinstance(each, LocalNonpersistentObject) else each,
            loaded,
        )
        _give_steps(loaded, steps)
        optimizer.load_state_dict(loaded)
    if "generators" in state:
        generators = state["generators"]
        torch.set_rng_state(generators["cpu"])
        torch.cuda.set_rng_state(generators["device"])
        get_cuda_rng_tracker().set_states(generators["tracker"])


def _give_steps(state: dict[Any, Any], steps: int) -> None:
    """Put the steps where Megatron left out a zero: in states that are not spread over ranks."""
    if {"state", "param_groups"} <= state.keys():
        state["state"].setdefault("common_step", torch.tensor(float(steps)))
        return
    for part in state.values():
        if isinstance(part, dict):
            _give_steps(part, steps)


_NORM_NAMES = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
"""Of the norm before experts: as Transformer Engine's layers are saved, and as Megatron's own."""


def sizes_in(checkpoint: Path) -> dict[str, torch.Size | None]:
    """Return the size of each tensor in a checkpoint, by key, and None for each other object.

    Megatron's own function for this fails with torch 2.15, whose table has the strides, too.
    """
    table = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key: getattr(entry, "size", None) for key, entry in table.items()}


def fit_to_saved(wanted: dict[str, Any], saved: Collection[str]) -> dict[str, Any]:
    """Let a state be read from a checkpoint, with the keys `saved`, of layers of the other kind.

    Tensors of the sharded state `wanted` get the names of the checkpoint. States for quantization,
    which no checkpoint of the other kind has, are taken out, and returned with their values.
    """
    for part in nested_values(wanted):
        for name, other in (_NORM_NAMES, _NORM_NAMES[::-1]):
            if isinstance(part, ShardedTensor) and part.key not in saved:
                part.key = part.key.replace(name, other)
    own: dict[str, Any] = {}
    for chunk, parts in wanted.items():
        if not chunk.startswith("model"):
            continue
        for name in [each for each in parts if each.endswith("_extra_state")]:
            if parts[name].unique_key not in saved:
                own.setdefault(chunk, {})[name] = parts.pop(name).data
    return own


def adam_steps(optimizer: Any) -> int:
    """Return how many steps Adam made; the parts of a chain step together."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    adams = [part.optimizer for part in parts if part.optimizer is not None]
    # PyTorch's Adam counts for each parameter, others for a group. Megatron gives a loaded group
    # the number as well, which PyTorch's then leaves as it was.
    steps = [state["step"] for adam in adams for state in adam.state.values() if "step" in state]
    steps += [group["step"] for adam in adams for group in adam.param_groups if "step" in group]
    return int(steps[0]) if steps else 0


@contextmanager
def adam_can_load(optimizer: Any, step: int) -> Iterator[None]:
    """Tell Adam how many steps were made, and help Megatron load into PyTorch's Adam.

    Megatron takes PyTorch's Adam where Transformer Engine and Apex are not installed. Two faults
    are mended. Megatron loads into existing state, but Adam has state only after a step. The
    distributed optimizer looks for the state `step` among tensors without it, and gives all
    parameters one tensor of that name, which each of them would then count up.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    pytorch = [part for part in parts if isinstance(part.optimizer, torch.optim.Adam)]
    for part in parts:
        for group in part.optimizer.param_groups:
            if part not in pytorch:
                group["step"] = step
                continue
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    sharded = [part for part in pytorch if hasattr(part, "_set_main_param_and_optimizer_states")]
    for part in sharded:
        part._set_main_param_and_optimizer_states = partial(_set_state_but_step, part)
    yield
    for part in sharded:
        del part._set_main_param_and_optimizer_states
    for part in pytorch:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _set_state_but_step(
    part: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]
) -> None:
    group_idx, order = part.model_param_group_index_map[model_param]
    main_param = part.optimizer.param_groups[group_idx]["params"][order]
    kept = {"step": part.optimizer.state[main_param]["step"]}
    type(part)._set_main_param_and_optimizer_states(part, model_param, tensors | kept)


def model_key(index: int, chunks: list[DistributedDataParallel]) -> str:
    """Return the name of a rank's model chunk in a state, which is Megatron's."""
    return f"model{index}" if len(chunks) > 1 else "model"
