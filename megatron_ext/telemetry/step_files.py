"""Files that a run writes every few steps, beside the training: whole, or not there.

A file is named by its last step and by the pipeline stage of the rank that writes it. Steps that a
killed run has not written are lost. When the run continues from a checkpoint, the recorder of the
files decides what becomes of files beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_MOST_BYTES = 64 << 20
"""A file is written early when its steps take so many bytes of memory."""


class StepFiles:
    """One rank's files in a folder, written by a thread, one at a time.

    So memory is bounded: two files are in it at most, each of at most `_MOST_BYTES` and one step
    more.

    Args:
        folder: Where they are; made with the first file.
        steps_per_file: Steps in a file, >= 1.
        pp_rank: This rank's pipeline stage.
        pp_size: Pipeline stages of the run.
    """

    def __init__(self, folder: Path, *, steps_per_file: int, pp_rank: int, pp_size: int) -> None:
        self._folder = folder
        self._steps_per_file = steps_per_file
        self._pp_rank, self._pp_size = pp_rank, pp_size
        self._suffix = f"stage_{pp_rank}.npz"
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[None] | None = None
        for unfinished in folder.glob(f".*_{self._suffix}.*.partial"):
            unfinished.unlink()

    def path(self, last_step: int) -> Path:
        """Path of the file that ends with this step."""
        return self._folder / f"step_{last_step:08d}_{self._suffix}"

    def existing(self) -> Iterator[tuple[int, Path]]:
        """Last step and path of each existing file of this rank's stages, in the order of steps.

        An earlier part of the run may have had more pipeline stages than now; each rank then also
        has some of these stages.
        """
        for path in sorted(self._folder.glob("step_*_stage_*.npz")):
            _, last_step, _, stage = path.stem.split("_")
            if int(stage) % self._pp_size == self._pp_rank:
                yield int(last_step), path

    def shortened(self, path: Path, last_step: int) -> Path:
        """Path of an existing file if its last step becomes this step."""
        return path.with_name(f"step_{last_step:08d}_{path.name.split('_', 2)[2]}")

    def is_due(self, num_steps: int, num_bytes: int) -> bool:
        """Whether a file of so many steps, which take so many bytes, is to be written."""
        return num_steps == self._steps_per_file or num_bytes > _MOST_BYTES

    def start(self, write: Callable[[], None]) -> None:
        """Begin to write a file, after waiting for the file before.

        Raises:
            OSError: The file before could not be written.
        """
        self._wait()
        self._writing = self._thread.submit(write)

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: A file could not be written.
        """
        self._wait()
        self._thread.shutdown()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
