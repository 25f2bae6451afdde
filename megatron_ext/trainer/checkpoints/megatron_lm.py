"""Starts a run from a checkpoint of Megatron-LM or Megatron-Bridge, in the format `torch_dist`.

A start takes the weights, the iteration and, where it fits, Adam's state. Megatron itself cuts them
for other parallel sizes. Before anything is loaded, all ranks compare names and shapes: Megatron
would fill up an embedding of another vocabulary, and leave out what this model does not have.

Megatron-LM writes Adam's state in one of two ways, and the checkpoint says in which:

- `fully_reshardable`, by parameter: loads under any parallel sizes;
- `dp_reshardable`, its default: as the flat buffers of the distributed optimizer lie in memory,
  without names. Loads only into buffers of the same order, and sizes alone do not show the order.
  So the weights in these buffers are compared with those of the model.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.distributed import DistributedDataParallel

from checkpoints_tools.contents import is_of_optimizer
from checkpoints_tools.folder import COMMON_FILE, TABLE_FILE, stored_bytes
from checkpoints_tools.pickles import read_object, read_table
from megatron_ext.arguments import one_line
from megatron_ext.data.tokenizer import padded_vocab_size
from megatron_ext.trainer.checkpoints.state import (
    METADATA,
    adam_can_load,
    fit_to_saved,
    model_key,
    model_state,
    sizes_in,
)
from megatron_ext.trainer.checkpoints.writer import of_all

_ADAM = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.optimizer/shard_")
"""An object with the settings and steps of Adam, in a checkpoint of buffers."""
_SHARDING = "distrib_optim_sharding_type"
_BUFFERS = "dp_reshardable"

_SETTINGS = (
    (re.compile(r"(word_embeddings|output_layer)\.weight$"), -2, "model.vocab_size"),
    (re.compile(r"(word_embeddings|output_layer|router)\.weight$"), -1, "model.hidden_size"),
    (re.compile(r"\.router\.weight$"), -2, "model.num_experts"),
    (re.compile(r"\.experts\.linear_fc2\.weight$"), -1, "model.expert_hidden_size"),
    (re.compile(r"\.layers\.(?!\d)"), 0, "model.num_layers"),
)
"""Which setting decides a tensor's size: by its name and axis."""


def start_from(
    chunks: list[DistributedDataParallel], optimizer: Any, checkpoint: Path
) -> tuple[int, str | None]:
    """Load a checkpoint of another Megatron program. All ranks call it, before their first step.

    Returns:
        The iteration after which the checkpoint was saved, and why Adam's state was not taken; None
        if it was.

    Raises:
        ValueError: The checkpoint does not fit the model, or does not say its iteration. All ranks
            raise it, before anything is loaded. The message is one line.
    """
    is_release = checkpoint.name == "release"  # To begin with, at iteration 0.
    try:
        common = dist_checkpointing.load_common_state_dict(str(checkpoint))
        iteration = 0 if is_release else int(common["iteration"])
        metadata = dict(common.get("content_metadata") or {})
    except (
        AttributeError,  # Of Megatron-Core 0.16, when the file of common values is missing.
        CheckpointingException,
        pickle.UnpicklingError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        said = one_line(error)
        if not (checkpoint / COMMON_FILE).exists():
            said = f"it has no {COMMON_FILE}, which this version of Megatron-Core asks for"
        raise ValueError(f"checkpoint {checkpoint} does not say its iteration: {said}") from None
    saved = sizes_in(checkpoint)
    model = model_state(chunks, metadata)
    own = fit_to_saved(model, saved)
    if problems := of_all(_misfits(model, saved)) or unknown(model, saved, of_optimizer=False):
        raise ValueError(f"checkpoint {checkpoint}: {problems[0]}")
    weights = merge(_filled(checkpoint, model), own)
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(weights[model_key(index, chunks)])
    optimizer.reload_model_params()
    if is_release:
        return iteration, "it is a release"
    return iteration, _load_adam(chunks, optimizer, checkpoint, common, saved)


def _load_adam(
    chunks: list[DistributedDataParallel],
    optimizer: Any,
    checkpoint: Path,
    common: dict[str, Any],
    saved: Mapping[str, torch.Size | None],
) -> str | None:
    """Load Adam's state if it fits; otherwise leave Adam new, and return why."""
    steps = _steps_of_adam(checkpoint, common.get("optimizer"))
    if steps is None:
        return "the checkpoint has none"
    metadata = METADATA | (common.get("content_metadata") or {})
    in_buffers = metadata[_SHARDING] == _BUFFERS
    if not in_buffers:
        metadata[_SHARDING] = METADATA[_SHARDING]
    with adam_can_load(optimizer, steps):
        model = model_state(chunks, metadata)
        fit_to_saved(model, saved)
        state = optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
        mains = _detach_buffers(state) if in_buffers else []
        problems = of_all(_misfits(state, saved))
        if in_buffers and not problems:
            problems = unknown(state, saved, of_optimizer=True)
        if not problems:
            state = _filled(checkpoint, state)
            there = [entry["param"] for entry in _entries(state)] if in_buffers else []
            # The model's weights may have been rounded to bfloat16.
            same = all(
                torch.equal(weight, main) or torch.equal(weight.bfloat16().float(), main)
                for weight, main in zip(there, mains, strict=True)
            )
            problems = of_all([] if same else ["another order"])
        if not problems:
            # Megatron writes into views of the weights, where these are float32.
            with torch.no_grad():
                optimizer.load_state_dict(state)
            return None
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)
    if in_buffers:
        return f"saved in the layout of other ranks or experts, {_BUFFERS}"
    return problems[0]


def _detach_buffers(state: dict[str, Any]) -> list[torch.Tensor]:
    """Let the state of buffers be read beside these buffers, with Adam's own settings.

    Returns:
        The main weights in these buffers, float32, in order.
    """
    for part in _parts(state):
        for name, value in part.items():
            if isinstance(value, ShardedObject):
                part[name] = value.data
        # Sizes, which are compared as those of tensors.
        for name in ("per_bucket_numel", "per_bucket_numel_unpadded"):
            part["param_state"].pop(name, None)
    mains = [entry["param"].data for entry in _entries(state)]
    for tensor in nested_values(state):
        if isinstance(tensor, ShardedTensor):
            tensor.data = torch.empty_like(tensor.data)
    return mains


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the distributed optimizers of a chain, or of a single one."""
    some = (state, *state.values())
    return [one for one in some if isinstance(one, dict) and "param_state" in one]


def _entries(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what buffers hold of each parameter, in order, without what fills them up."""
    for part in _parts(state):
        for buffers in part["param_state"].values():
            for bucket in (bucket for buckets in buffers.values() for bucket in buckets):
                for entry in bucket:
                    padding = entry["padding"]
                    if not getattr(padding, "obj", padding):
                        yield entry


def _filled(checkpoint: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return a sharded state with the checkpoint's values, and nothing else of the checkpoint."""
    leaves = [leaf for leaf in nested_values(wanted) if isinstance(leaf, ShardedBase)]
    # Megatron adds what the checkpoint holds beside tensors, under names of its own.
    names = {id(leaf): f"leaf {number}" for number, leaf in enumerate(leaves)}
    asked = {names[id(leaf)]: leaf for leaf in leaves}
    found = dist_checkpointing.load({"wanted": asked}, str(checkpoint))["wanted"]

    def value(leaf: Any) -> Any:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf.unwrap()
        return found[names[id(leaf)]] if isinstance(leaf, ShardedBase) else leaf

    filled: dict[str, Any] = dict_list_map_inplace(value, wanted)
    return filled


def _tensors(wanted: Any) -> Iterator[ShardedTensor]:
    for leaf in nested_values(wanted):
        if isinstance(leaf, ShardedTensorFactory):
            yield from _tensors(leaf.build())
        elif isinstance(leaf, ShardedTensor):
            yield leaf


def missing(wanted: dict[str, Any], saved: Mapping[str, torch.Size | None]) -> list[str]:
    """Return which tensors of a sharded state the checkpoint lacks."""
    keys = sorted({tensor.key for tensor in _tensors(wanted)} - saved.keys())
    return [f"it has no {key}, which this run has" for key in keys]


def _misfits(wanted: dict[str, Any], saved: Mapping[str, torch.Size | None]) -> list[str]:
    """Return which tensors of a sharded state the checkpoint lacks, or has in another shape."""
    problems = missing(wanted, saved)
    for tensor in (each for each in _tensors(wanted) if each.key in saved):
        here, there = tuple(tensor.global_shape), tuple(saved[tensor.key] or ())
        if here != there:
            way_out = _way_out(tensor.key, here, there)
            problems.append(f"{tensor.key} has shape {there}, in this run {here}{way_out}")
    return problems


def _way_out(key: str, here: tuple[int, ...], there: tuple[int, ...]) -> str:
    """Return which setting gives a tensor the checkpoint's shape, where that is known."""
    for name, axis, setting in _SETTINGS:
        if name.search(key) and len(here) == len(there) and here[axis] != there[axis]:
            size = there[axis]
            if setting == "model.vocab_size":
                padded = padded_vocab_size(size, tensor_parallel=1)
                if padded != size:
                    return f": {setting} cannot fit, as it is filled up to a multiple of 128"
            return f": {setting} must be {size}"
    return ""


def unknown(
    wanted: dict[str, Any], saved: Mapping[str, torch.Size | None], *, of_optimizer: bool
) -> list[str]:
    """Return which tensors of the checkpoint no rank asks for; the same on all ranks."""
    known = set(of_all(sorted({tensor.key for tensor in _tensors(wanted)})))
    return [
        f"it has {key}, which this run has not"
        for key, size in saved.items()
        if size is not None and is_of_optimizer(key) == of_optimizer and key not in known
    ]


def _steps_of_adam(checkpoint: Path, of_optimizer: Any) -> int | None:
    """Return how many steps Adam made by the checkpoint; None if it does not say so."""
    steps = set(_steps_in(of_optimizer))
    for index, stored in read_table(checkpoint / TABLE_FILE).storage_data.items():
        if _ADAM.search(index.fqn):
            steps |= set(_steps_in(read_object(stored_bytes(checkpoint, stored))))
    return max(steps, default=None)


def _steps_in(tree: Any) -> Iterator[int]:
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    for name, value in tree.items() if isinstance(tree, dict) else ():
        if name in ("step", "common_step") and value is not None:
            yield int(value)
        else:
            yield from _steps_in(value)
