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
from typing import TypeAlias

import torch
from torch import Tensor

from megatron_ext.files.loads import TRACE_FIELDS, Loads, read_loads, write_loads
from megatron_ext.telemetry.recorder import Computed
from megatron_ext.telemetry.step_files import StepFiles

Key: TypeAlias = tuple[int, int, int]
"""Step, microbatch and layer of a load."""


class TraceWriter:
    """Collects a run's loads and writes a file every few steps.

    A run that continues from a checkpoint drops the recorded loads of steps after `start_step`, the
    checkpoint's step; a new run has 0.
    """

    def __init__(self, files: StepFiles, *, start_step: int) -> None:
        self._files = files
        self._loads: list[Tensor] = []
        self._predicted: list[Tensor | None] = []
        self._keys: list[Key] = []
        self._num_steps = 0
        for _, path in self._files.existing():
            self._files.change(path, partial(self._shorten, path, start_step))

    def write(self, step: int, computed: Sequence[Computed]) -> None:
        """Take the loads of a step; the loads of a layer are in the order of the microbatches."""
        microbatches: Counter[int] = Counter()
        for one in computed:
            self._keys.append((step, microbatches[one.layer_number], one.layer_number))
            self._loads.append(one.load)
            self._predicted.append(one.predicted.cpu() if one.predicted is not None else None)
            microbatches[one.layer_number] += 1
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
