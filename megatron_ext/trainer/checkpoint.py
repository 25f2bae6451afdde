"""Checkpoints of a run: Megatron's `dist_checkpointing`, logical experts only.

A checkpoint is a folder `RUN/checkpoints/step_00000100`. It is written under another name and
renamed when complete, so a run that dies while saving leaves nothing that would be taken for a
checkpoint. It holds the model, the optimizer, the state of the random generators and `run.json`:
the step, the position in the data and the shape of the model, which can be read without Megatron.
A checkpoint holds no slots and no replicas, so balancing may differ between saving and loading. The
parallel sizes may differ, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext.config import TrainConfig

RUN_FILE = "run.json"

_METADATA = {
    # Optimizer state by parameter, not by data-parallel shard: readable under other parallel sizes.
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

_FREE_MODEL_FIELDS = ("experts", "precision", "aux_loss")
"""Fields of the section `model` that may change between saving and loading."""


def find_checkpoint(config: TrainConfig) -> Path | None:
    """Return the checkpoint that the run starts from: its own newest, `checkpoint.load`, or None.

    Raises:
        FileNotFoundError: `checkpoint.load` is no complete checkpoint.
    """
    own = _complete(Path(config.run_dir))
    if own or config.checkpoint.load is None:
        return own[-1] if own else None
    folder = Path(config.checkpoint.load)
    if not (folder / RUN_FILE).is_file():
        raise FileNotFoundError(
            f"checkpoint.load ({folder}) is not a complete checkpoint: it has no {RUN_FILE}"
        )
    return folder


def model_differences(config: TrainConfig, checkpoint: Path) -> list[str]:
    """Return the differences between the checkpoint's model and the run's, one line each."""
    saved = json.loads((checkpoint / RUN_FILE).read_text())["model"]
    return [
        f"model.{name} ({value}) must be {saved.get(name)}, as in the checkpoint {checkpoint}"
        for name, value in _model_shape(config).items()
        if saved.get(name) != value
    ]


def save_checkpoint(
    config: TrainConfig, chunks: list[DistributedDataParallel], optimizer: Any, step: int
) -> Path:
    """Save the state after `step` steps and delete surplus old checkpoints. All ranks call it.

    Returns:
        The complete checkpoint.
    """
    folder = Path(config.run_dir) / "checkpoints" / f"step_{step:08d}"
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if dist.get_rank() == 0:
        for old in (unfinished, folder):
            shutil.rmtree(old, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state, _ = _sharded_state(chunks, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(unfinished))
    dist.barrier()
    if dist.get_rank() == 0:
        run = {
            "step": step,
            "optimizer_steps": _adam_steps(optimizer),
            "consumed_samples": step * config.data.global_batch_size,
            "num_ranks": dist.get_world_size(),
            "model": _model_shape(config),
        }
        (unfinished / RUN_FILE).write_text(json.dumps(run, indent=2) + "\n")
        unfinished.rename(folder)
        for old in _complete(Path(config.run_dir))[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return folder


def load_checkpoint(
    checkpoint: Path, chunks: list[DistributedDataParallel], optimizer: Any
) -> dict[str, int]:
    """Load model, optimizer and generators. All ranks call it.

    The generators continue only if the number of ranks is the same as when saving; otherwise they
    keep their seeds.

    Returns:
        `step`, `consumed_samples` and `num_ranks` as they were when it was saved.
    """
    run = json.loads((checkpoint / RUN_FILE).read_text())
    # Skipped steps are not the optimizer's; a checkpoint without this number has none of them.
    with _adam_can_load(optimizer, run.get("optimizer_steps", run["step"])):
        wanted, optimizer_settings = _sharded_state(chunks, optimizer, is_loading=True)
        if run["num_ranks"] != dist.get_world_size():
            del wanted["generators"]
        state = dist_checkpointing.load(wanted, str(checkpoint))
        for index, chunk in enumerate(chunks):
            chunk.module.load_state_dict(state[_model_key(index, chunks)])
        optimizer.load_state_dict(merge(optimizer_settings, state["optimizer"]))
    if "generators" in state:
        generators = state["generators"]
        torch.set_rng_state(generators["cpu"])
        torch.cuda.set_rng_state(generators["device"])
        get_cuda_rng_tracker().set_states(generators["tracker"])
    return {name: run[name] for name in ("step", "consumed_samples", "num_ranks")}


def _sharded_state(
    chunks: list[DistributedDataParallel], optimizer: Any, *, is_loading: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is stored by logical parameter or rank, and the optimizer's other values.

    The other values are settings and the number of steps, which come from the config and
    `run.json`. Megatron orders them by parallel sizes, so a checkpoint that held them would only
    load under equal sizes.
    """
    metadata = dict(_METADATA)  # Megatron adds its process groups, which may be others next time.
    state: dict[str, Any] = {
        _model_key(index, chunks): chunk.module.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(chunks)
    }
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


def _adam_steps(optimizer: Any) -> int:
    """Return how many steps Adam made; the parts of a chain step together."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    adams = [part.optimizer for part in parts if part.optimizer is not None]
    steps = [group["step"] for adam in adams for group in adam.param_groups if "step" in group]
    steps += [state["step"] for adam in adams for state in adam.state.values() if "step" in state]
    return int(steps[0])


@contextmanager
def _adam_can_load(optimizer: Any, step: int) -> Iterator[None]:
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


def _model_key(index: int, chunks: list[DistributedDataParallel]) -> str:
    return f"model{index}" if len(chunks) > 1 else "model"


def _model_shape(config: TrainConfig) -> dict[str, Any]:
    return {
        name: value
        for name, value in asdict(config.model).items()
        if name not in _FREE_MODEL_FIELDS
    }


def _complete(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(file.parent for file in run_dir.glob(f"checkpoints/step_*/{RUN_FILE}"))
