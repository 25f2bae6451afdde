"""Writes the exact loads of a run to `trace/`; a file is whole, or not there.

One rank of each pipeline stage writes the loads of one EP group: the first EP group of those that
hold the same experts.
Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatron_ext.files.loads import TRACE_FIELDS, Loads, read_loads, write_loads
from megatron_ext.files.run_dir import TRACE_FOLDER
from megatron_ext.telemetry.step_files import StepFiles

Key: TypeAlias = tuple[int, int, int]
"""Step, microbatch and layer of a load."""


class LayerLoad(NamedTuple):
    """The load of one microbatch in one layer."""

    layer_number: int
    """1-based, as in Megatron."""
    load: Tensor
    """Assignments from source rank to logical expert, int64 [R, E]."""
    predicted: Tensor | None = None
    """The layer before's prediction of the load, int64 [R, E]; None without one."""


class TraceWriter:
    """Collects a run's loads and writes a file every few steps.

    A run that continues from a checkpoint drops the recorded loads of later steps.

    Args:
        run_dir: The run's directory.
        steps_per_file: Steps in a file, >= 1.
        start_step: The step of the checkpoint that the run continues from, 0 for a new run.
        pp_rank: This rank's pipeline stage.
        pp_size: Pipeline stages of the run.
    """

    def __init__(
        self, run_dir: Path, *, steps_per_file: int, start_step: int, pp_rank: int, pp_size: int
    ) -> None:
        self._files = StepFiles(
            run_dir / TRACE_FOLDER,
            steps_per_file=steps_per_file,
            pp_rank=pp_rank,
            pp_size=pp_size,
        )
        self._loads: list[Tensor] = []
        self._predicted: list[Tensor | None] = []
        self._keys: list[Key] = []
        self._num_steps = 0
        for _, path in self._files.existing():  # The loads of later steps are dropped.
            self._files.change(path, partial(self._shorten, path, start_step))

    def write(self, step: int, loads: Sequence[LayerLoad]) -> None:
        """Take the loads of a step; the loads of a layer are in the order of the microbatches."""
        microbatches: dict[int, int] = {}
        for layer, load, predicted in loads:
            microbatch = microbatches.get(layer, 0)
            microbatches[layer] = microbatch + 1
            self._keys.append((step, microbatch, layer))
            self._loads.append(load.cpu())
            self._predicted.append(predicted.cpu() if predicted is not None else None)
        self._num_steps += 1
        kept = (*self._loads, *self._predicted)
        num_bytes = sum(one.nbytes for one in kept if one is not None)
        if self._files.is_due(self._num_steps, num_bytes):
            self._start_file()

    def flush(self) -> None:
        """Write the loads collected so far, and wait for the end of all writes."""
        self._start_file()
        self._files.wait()

    def close(self) -> None:
        """Write the loads collected so far, and end."""
        self._start_file()
        self._files.close()

    def _start_file(self) -> None:
        if self._loads:
            path, loads = self._files.path(self._keys[-1][0]), (self._loads, self._predicted)
            self._files.start(path, partial(_write_file, self._keys, *loads))
        self._keys, self._loads, self._predicted = [], [], []
        self._num_steps = 0

    def _shorten(self, path: Path, last_step: int) -> None:
        loads = read_loads(path)
        keys = list(zip(*(loads.trace[name].tolist() for name in TRACE_FIELDS), strict=True))
        kept = [place for place, (step, _, _) in enumerate(keys) if step <= last_step]
        if len(kept) == len(keys):
            return
        if kept:
            _write_file(
                [keys[i] for i in kept],
                [loads.load[i] for i in kept],
                [loads.prediction(i) for i in kept],
                self._files.shortened(path, keys[kept[-1]][0]),
            )
        path.unlink()


def _write_file(
    keys: list[Key], loads: list[Tensor], predicted: list[Tensor | None], path: Path
) -> None:
    step, microbatch, layer = torch.tensor(keys).T.contiguous()
    trace = {"step": step, "microbatch": microbatch, "layer": layer}
    load, known = torch.stack(loads), None
    if any(one is not None for one in predicted):
        nothing = torch.full_like(load[0], -1)
        known = torch.stack([nothing if one is None else one for one in predicted])
    write_loads(path, Loads(load, trace, known), overwrite=True)
