"""Writes the exact loads of a run to `trace/`, as files of loads that are whole or not there.

One rank of each pipeline stage writes, of one EP group: the first of those that share its experts.
Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from megatron_ext.offline.loads import TRACE_FIELDS, Loads, read_loads, write_loads

TRACE_FOLDER = "trace"

_MOST_BYTES = 64 << 20
"""Loads that are kept in memory before a file is written early, in bytes."""


Key: TypeAlias = tuple[int, int, int]
"""Step, microbatch and layer of a load."""


class LayerLoad(NamedTuple):
    """The load of one microbatch in one layer."""

    layer_number: int
    """1-based, as in Megatron."""
    load: Tensor
    """Assignments from source rank to logical expert, int64 [R, E]."""
    predicted: Tensor | None = None
    """What the layer before predicted of it, int64 [R, E]; None where nothing was."""


class TraceWriter:
    """Collects a run's loads and writes a file every few steps.

    Files are written by a thread beside the training, one at a time. So memory is bounded: by the
    loads of two files, each of at most `_MOST_BYTES` and one step more. What a killed run has not
    written is lost; what it wrote after the checkpoint that a run continues from is dropped.

    Args:
        run_dir: The run's directory.
        steps_per_file: Steps in a file, >= 1.
        start_step: The step of the checkpoint that the run continues from, 0 for a new run.
        pp_rank: This rank's pipeline stage; part of the files' names.
    """

    def __init__(
        self, run_dir: Path, *, steps_per_file: int, start_step: int, pp_rank: int
    ) -> None:
        self._folder = run_dir / TRACE_FOLDER
        self._steps_per_file = steps_per_file
        self._suffix = f"stage_{pp_rank}.npz"
        self._loads: list[Tensor] = []
        self._predicted: list[Tensor | None] = []
        self._keys: list[Key] = []
        self._num_steps = 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        self._drop_after(start_step)

    def write(self, step: int, loads: Sequence[LayerLoad]) -> None:
        """Take the loads of a step, of each layer in the order of its microbatches.

        Raises:
            OSError: The file before could not be written.
        """
        microbatches: dict[int, int] = {}
        for layer, load, predicted in loads:
            microbatch = microbatches.get(layer, 0)
            microbatches[layer] = microbatch + 1
            self._keys.append((step, microbatch, layer))
            self._loads.append(load.cpu())
            self._predicted.append(predicted.cpu() if predicted is not None else None)
        self._num_steps += 1
        num_bytes = sum(load.nbytes for load in self._loads)
        if self._num_steps == self._steps_per_file or num_bytes > _MOST_BYTES:
            self._start_file()

    def close(self) -> None:
        """Write what was collected, and wait until all is written.

        Raises:
            OSError: A file could not be written.
        """
        self._start_file()
        self._wait()
        self._thread.shutdown()

    def _start_file(self) -> None:
        self._wait()
        if self._loads:
            self._writing = self._thread.submit(
                self._write_file, self._keys, self._loads, self._predicted
            )
        self._keys, self._loads, self._predicted = [], [], []
        self._num_steps = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
        self._writing = None

    def _write_file(
        self, keys: list[Key], loads: list[Tensor], predicted: list[Tensor | None]
    ) -> None:
        step, microbatch, layer = torch.tensor(keys).T.contiguous()
        path = self._folder / f"step_{int(step[-1]):08d}_{self._suffix}"
        trace = {"step": step, "microbatch": microbatch, "layer": layer}
        load, known = torch.stack(loads), None
        if any(one is not None for one in predicted):
            nothing = torch.full_like(load[0], -1)
            known = torch.stack([nothing if one is None else one for one in predicted])
        write_loads(path, Loads(load, trace, known), overwrite=True)

    def _drop_after(self, last_step: int) -> None:
        """Drop the loads of later steps, and what a killed run left unfinished."""
        for unfinished in self._folder.glob(f".*_{self._suffix}.*.partial"):
            unfinished.unlink()
        for path in sorted(self._folder.glob(f"step_*_{self._suffix}")):
            loads = read_loads(path)
            keys = list(zip(*(loads.trace[name].tolist() for name in TRACE_FIELDS), strict=True))
            kept = [place for place, (step, _, _) in enumerate(keys) if step <= last_step]
            if len(kept) == len(keys):
                continue
            if kept:
                self._write_file(
                    [keys[i] for i in kept],
                    [loads.load[i] for i in kept],
                    [loads.prediction(i) for i in kept],
                )
            path.unlink()
