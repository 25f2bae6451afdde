"""Writes the exact loads of a run to `trace/`; a file is whole, or not there.

One rank of each pipeline stage writes the loads of one EP group: the first EP group of those that
hold the same experts.
Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.files.loads import TRACE_FIELDS, Loads, read_loads, write_loads
from megatron_ext.telemetry.recorder import Computed
from megatron_ext.telemetry.step_files import StepFiles


class _Load(NamedTuple):
    """A load, its place in the trace, and the prediction of it if there is one."""

    step: int
    microbatch: int
    layer: int
    load: Tensor
    predicted: Tensor | None


class TraceWriter:
    """Collects a run's loads and writes a file every few steps.

    A run that continues from a checkpoint drops the recorded loads of steps after `start_step`, the
    checkpoint's step; a new run has 0.
    """

    def __init__(self, files: StepFiles, *, start_step: int) -> None:
        self._files = files
        self._loads: list[_Load] = []
        self._num_steps = 0
        for _, path in self._files.existing():
            self._files.change(path, partial(self._shorten, path, start_step))

    def write(self, step: int, computed: Sequence[Computed]) -> None:
        """Take the loads of a step; the loads of a layer are in the order of the microbatches."""
        microbatches: Counter[int] = Counter()
        for one in computed:
            layer, predicted = one.layer_number, one.predicted
            predicted = predicted.cpu() if predicted is not None else None
            self._loads.append(_Load(step, microbatches[layer], layer, one.load, predicted))
            microbatches[layer] += 1
        self._num_steps += 1
        kept = (tensor for one in self._loads for tensor in (one.load, one.predicted))
        num_bytes = sum(tensor.nbytes for tensor in kept if tensor is not None)
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
            path = self._files.path(self._loads[-1].step)
            self._files.start(path, partial(_write_file, self._loads))
        self._loads, self._num_steps = [], 0

    def _shorten(self, path: Path, last_step: int) -> None:
        loads = read_loads(path)
        places = zip(*(loads.trace[name].tolist() for name in TRACE_FIELDS), strict=True)
        kept = [
            _Load(step, microbatch, layer, loads.load[index], loads.prediction(index))
            for index, (step, microbatch, layer) in enumerate(places)
            if step <= last_step
        ]
        if len(kept) == len(loads):
            return
        if kept:
            _write_file(kept, self._files.shortened(path, kept[-1].step))
        path.unlink()


def _write_file(loads: list[_Load], path: Path) -> None:
    places = torch.tensor([one[: len(TRACE_FIELDS)] for one in loads]).T.contiguous()
    load, predicted = torch.stack([one.load for one in loads]), None
    if any(one.predicted is not None for one in loads):
        nothing = torch.full_like(load[0], -1)
        predicted = torch.stack(
            [nothing if one.predicted is None else one.predicted for one in loads]
        )
    trace = dict(zip(TRACE_FIELDS, places, strict=True))
    write_loads(path, Loads(load, trace, predicted), overwrite=True)
