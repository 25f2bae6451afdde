"""Files that a run writes every few steps, beside the training: whole, or not there.

A file is named by its last step and by the pipeline stage of the rank that writes it. What a killed
run has not written is lost; whoever continues it decides what becomes of later files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_MOST_BYTES = 64 << 20
"""What is kept in memory before a file is written early, in bytes."""


class StepFiles:
    """One rank's files in a folder, written by a thread, one at a time.

    So memory is bounded: by what two files hold, each of at most `_MOST_BYTES` and one step more.

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
        """Where the file goes that ends with this step."""
        return self._folder / f"step_{last_step:08d}_{self._suffix}"

    def existing(self) -> Iterator[tuple[int, Path]]:
        """The last step and path of each file that this rank cares for, in the order of steps.

        The run that is continued may have had more stages: each of theirs has a rank here, too.
        """
        for path in sorted(self._folder.glob("step_*_stage_*.npz")):
            _, last_step, _, stage = path.stem.split("_")
            if int(stage) % self._pp_size == self._pp_rank:
                yield int(last_step), path

    def shortened(self, path: Path, last_step: int) -> Path:
        """Where an existing file goes if it now ends with this step."""
        return path.with_name(f"step_{last_step:08d}_{path.name.split('_', 2)[2]}")

    def is_due(self, num_steps: int, num_bytes: int) -> bool:
        """Whether so many steps, which take so many bytes, are to be written."""
        return num_steps == self._steps_per_file or num_bytes > _MOST_BYTES

    def start(self, write: Callable[[], None]) -> None:
        """Begin to write a file, when the one before is written.

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
