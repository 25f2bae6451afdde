"""Files that a run writes every few steps, beside the training: whole, or not there.

A file is named by its last step and by the pipeline stage of the rank that writes it. Steps that a
killed run has not written are lost. When the run continues from a checkpoint, the recorder of the
files decides what becomes of files beyond it.

The training goes on whatever happens to a file: one that cannot be written is left out, and one
that cannot be read is moved aside, each with a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

logger = logging.getLogger(__name__)

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
            self.change(unfinished, unfinished.unlink)

    def path(self, last_step: int) -> Path:
        """Path of the file that ends with this step."""
        return self._folder / f"step_{last_step:08d}_{self._suffix}"

    def existing(self) -> Iterator[tuple[int, Path]]:
        """Last step and path of each existing file of this rank's stages, in the order of steps.

        An earlier part of the run may have had more pipeline stages than now; each rank then also
        has some of these stages.
        """
        for path in sorted(self._folder.glob("step_*_stage_*.npz")):
            name = re.fullmatch(r"step_(\d+)_stage_(\d+)", path.stem)
            if name and int(name[2]) % self._pp_size == self._pp_rank:
                yield int(name[1]), path

    def change(self, path: Path, change: Callable[[], object]) -> None:
        """Call `change`, which reads or changes an existing file; warn if that fails.

        A file that cannot be read for what is in it is moved aside.
        """
        try:
            change()
        except OSError as error:
            logger.warning("warning: %s stays as it is: %s", path, error)
        except Exception as error:  # Damage can be anything.
            aside = path.with_name(f"{path.name}.damaged")
            logger.warning("warning: %s, now %s: %s", path, aside.name, error)
            self.change(path, partial(path.replace, aside))

    def shortened(self, path: Path, last_step: int) -> Path:
        """Path of an existing file if its last step becomes this step."""
        return path.with_name(f"step_{last_step:08d}_{path.name.split('_', 2)[2]}")

    def is_due(self, num_steps: int, num_bytes: int) -> bool:
        """Whether a file of so many steps, which take so many bytes, is to be written."""
        return num_steps == self._steps_per_file or num_bytes > _MOST_BYTES

    def start(self, path: Path, write: Callable[[Path], None]) -> None:
        """Begin to write a file, after waiting for the file before."""
        self.wait()
        self._writing = self._thread.submit(_write_or_warn, path, write)

    def wait(self) -> None:
        """Wait until all is written that was begun."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait until all is written, and end the thread."""
        self.wait()
        self._thread.shutdown()


def _write_or_warn(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except Exception as error:  # Whatever it is: the steps of the training are worth more.
        logger.warning("warning: %s is left out: %s", path, error)
