"""Checkpoints of a run: Megatron's `dist_checkpointing`, logical experts only.

A checkpoint is a folder `RUN/checkpoints/step_00000100`. It is written under another name, synced
and renamed when complete, so a run that dies while saving leaves nothing that would be taken for a
checkpoint. It holds the model, the optimizer, the state of the random generators, `run.json` (the
step, the position in the data and the shape of the model, which can be read without Megatron) and
`checksums.json`. A checkpoint holds no slots and no replicas, so balancing may differ between
saving and loading. The parallel sizes may differ, too.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.distributed import DistributedDataParallel

from checkpoints_tools.folder import (
    RUN_FILE,
    find_changes,
    list_checkpoints,
    look_through_objects,
    read_checksums,
    read_run,
)
from megatron_ext.files.whole import sync
from megatron_ext.trainer.checkpoints.choice import (
    distrust,
    find_checkpoint,
    model_differences,
    model_shape,
)
from megatron_ext.trainer.checkpoints.megatron_lm import missing, start_from, unknown
from megatron_ext.trainer.checkpoints.state import (
    adam_steps,
    fit_to_saved,
    load_state,
    saved_state,
    sizes_in,
)
from megatron_ext.trainer.checkpoints.writer import CheckpointWriter, describe, of_all, tell
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.model.settings import transformer_config
from megatron_ext.trainer.ranks.launch import end_all

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run, as one rank sees them. Every method is called by all ranks.

    Where a checkpoint cannot be loaded, or one that is required cannot be saved, all ranks raise
    `SystemExit` with status `NO_RESTART`, after rank 0 has said why in one line. `vocab_size` is
    that of the data.
    """

    def __init__(
        self,
        config: TrainConfig,
        chunks: list[DistributedDataParallel],
        optimizer: Any,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._chunks = chunks
        self._optimizer = optimizer
        self._folder = Path(config.run_dir) / "checkpoints"
        self._writing: CheckpointWriter | None = None
        self._newest_step: int | None = None
        self._damaged: dict[Path, str] = {}
        self._settings: dict[str, Any] = {}

    def load_newest(self) -> tuple[int, int, int]:
        """Load the newest checkpoint that is whole.

        Returns:
            Its step, and the samples and tokens until then; zeros if the run begins anew.
        """
        checkpoint, data = self._choose(), self._config.data
        if checkpoint is None:
            return 0, 0, 0
        if (checkpoint / RUN_FILE).exists():
            run = read_run(checkpoint)
            read = partial(self._read, checkpoint, run.get("layers", "local"))
            load_state(self._chunks, self._optimizer, run, read)
            logger.info("continuing from %s", checkpoint)
            self._settings = run.get("settings", {})
        else:
            run = {"step": self._start_from(checkpoint)}
        samples = run.get("consumed_samples", run["step"] * data.global_batch_size)
        return run["step"], samples, run.get("consumed_tokens", samples * data.sequence_length)

    def keep_settings(self, settings: dict[str, Any]) -> None:
        """Save these settings from now on, and warn of those that were others until now.

        They decide which sample comes when, and, beside the model's sizes, what the model computes.
        """
        before = self._settings
        names = {**before, **settings} if before else ()
        changed = [name for name in names if before.get(name) != settings.get(name)]
        if changed and dist.get_rank() == 0:
            logger.warning(
                "warning: %s: other than until the checkpoint; samples that were trained on may "
                "come again before others, or the model may compute something else",
                ", ".join(changed),
            )
        self._settings = settings

    def _start_from(self, checkpoint: Path) -> int:
        try:
            step, no_adam = start_from(self._chunks, self._optimizer, checkpoint)
        except ValueError as error:
            end_all(str(error))
        if step >= self._config.steps:
            end_all(f"steps ({self._config.steps}) must be > {step}, where {checkpoint} begins")
        left = f"Adam's state ({no_adam}), " if no_adam else ""
        logger.info(
            "starting from %s, iteration %d; not taken: %slearning rate, random generators, "
            "position in the data",
            checkpoint,
            step,
            left,
        )
        return step

    def _read(self, checkpoint: Path, layers: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Fill a sharded state from a checkpoint of layers of this `transformer_impl`."""
        own, saved = {}, sizes_in(checkpoint)
        if layers != transformer_config(self._config).transformer_impl:
            own = fit_to_saved(wanted, saved)
        model = {name: part for name, part in wanted.items() if name.startswith("model")}
        lacking = of_all(missing(wanted, saved))
        if problems := lacking or unknown(model, saved, of_optimizer=False):
            end_all(f"checkpoint {checkpoint}: {problems[0]}")
        return merge(dist_checkpointing.load(wanted, str(checkpoint)), own)

    def save(self, step: int, consumed_samples: int, consumed_tokens: int) -> None:
        """Save the state after this step, or begin to with `checkpoint.asynchronous`.

        A checkpoint that cannot be saved is warned of and left out, unless `checkpoint.required`.
        """
        self.finish()
        if problem := tell(self._make_folder(step) if dist.get_rank() == 0 else None):
            self._give_up(step, problem)
            return
        in_background = self._config.checkpoint.asynchronous
        megatron = transformer_config(self._config)
        run = {
            "step": step,
            "optimizer_steps": adam_steps(self._optimizer),
            "consumed_samples": consumed_samples,
            "settings": self._settings,
            "consumed_tokens": consumed_tokens,
            "num_ranks": dist.get_world_size(),
            "parallel": {
                name: getattr(self._config.parallel, name)
                for name in ("tp_size", "pp_size", "ep_size")
            },
            "model": model_shape(self._config, self._vocab_size),
            "layers": megatron.transformer_impl,
            "router_groups": megatron.moe_router_group_topk and megatron.moe_router_num_groups,
        }
        state = saved_state(self._chunks, self._optimizer)
        folder = self._unfinished(step)
        self._writing = CheckpointWriter(state, run, folder, in_background=in_background)
        if not in_background:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint that is being written, if all ranks have written their part."""
        if self._writing is None:
            return
        written = torch.tensor(int(self._writing.is_written()), device="cuda")
        dist.all_reduce(written, op=dist.ReduceOp.MIN)
        if written.item():
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and complete it."""
        if self._writing is None:
            return
        writer, self._writing = self._writing, None
        step, problem = writer.run["step"], writer.finish()
        if dist.get_rank() == 0 and problem is None:
            problem = self._put_in_place(step)
        if problem := tell(problem):
            self._give_up(step, problem)
        else:
            self._newest_step = step

    def saved_at(self, step: int) -> Path | None:
        """Return the complete checkpoint of this step, if it is the last that this run saved."""
        return self._folder / _name(step) if step == self._newest_step else None

    def _choose(self) -> Path | None:
        """Return the checkpoint to load: all ranks look through a share of each candidate."""
        while checkpoint := self._candidate():
            found, foreign = self._look_through(checkpoint)
            if foreign:
                end_all(distrust(checkpoint, foreign[0]))
            if not found:
                break
            self._damaged[checkpoint] = found[0]
        if self._damaged and dist.get_rank() == 0:
            damaged = self._damaged.items()
            why = "; ".join(f"checkpoint {each} is damaged: {how}" for each, how in damaged)
            logger.warning("warning: %s; continuing from %s", why, checkpoint)
        return checkpoint

    def _look_through(self, checkpoint: Path) -> tuple[list[str], list[str]]:
        """Return what all ranks together find damaged, and foreign."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        if self._config.checkpoint.verify:
            names = sorted(read_checksums(checkpoint) or {})
            if changes := of_all(find_changes(checkpoint, names[rank::num_ranks])):
                return changes, []
        if self._config.checkpoint.trust:
            return [], []
        damaged, foreign = look_through_objects(checkpoint, rank, num_ranks)
        return of_all(damaged), of_all(foreign)

    def _candidate(self) -> Path | None:
        """Return rank 0's choice by files' names and sizes; note the damaged ones before it."""
        checkpoint, problem = None, None
        if dist.get_rank() == 0:
            try:
                checkpoint = find_checkpoint(self._config, self._damaged)
                if checkpoint:
                    found = model_differences(self._config, checkpoint, self._vocab_size)
                    problem = next(iter(found), None)
            except ValueError as error:
                problem = str(error)
        checkpoint, self._damaged, problem = tell((checkpoint, self._damaged, problem))
        if problem:
            end_all(problem)
        return checkpoint

    def _unfinished(self, step: int) -> Path:
        return self._folder / f".{_name(step)}.unfinished"

    def _make_folder(self, step: int) -> str | None:
        """Make the folder to write into, on rank 0; return why it could not be made."""
        unfinished = self._unfinished(step)
        for left in self._folder.glob(".step_*.unfinished"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
        except OSError as error:
            return describe(error, unfinished)
        return None

    def _put_in_place(self, step: int) -> str | None:
        """Give the folder its name and delete old ones, on rank 0; return why that failed."""
        folder = self._folder / _name(step)
        try:
            if folder.exists():
                shutil.rmtree(folder)
            self._unfinished(step).rename(folder)
            sync(self._folder)
            sync(self._folder.parent)
        except OSError as error:
            return describe(error, folder)
        self._damaged.pop(folder, None)
        checkpoints = list_checkpoints(Path(self._config.run_dir))
        # Newer ones were passed over as damaged; a damaged one does not count as kept.
        until_now = checkpoints[: checkpoints.index(folder) + 1]
        whole = [each for each in until_now if each not in self._damaged]
        kept = whole[-self._config.checkpoint.keep :]
        for old in checkpoints:
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return None

    def _give_up(self, step: int, problem: str) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._unfinished(step), ignore_errors=True)
        said = f"the checkpoint of step {step} was not saved: {problem}"
        if self._config.checkpoint.required:
            end_all(f"{said} (checkpoint.required)")
        if dist.get_rank() == 0:
            logger.warning("warning: %s; training goes on without it", said)


def _name(step: int) -> str:
    return f"step_{step:08d}"
