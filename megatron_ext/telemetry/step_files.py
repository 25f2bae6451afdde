"""Writes files every few steps, beside the training; a file is whole, or not there.

A file's name has its last step and the pipeline stage of the writing rank. Steps that a killed run
has not written are lost. When a run continues from a checkpoint, the recorder of the files decides
about files with later steps.

No file can stop the training: a file that cannot be written is left out, and a file that cannot be
read is moved aside, each with a warning.
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
"""A file is due early when its steps take more bytes of memory than this."""


class StepFiles:
    """One rank's files in a folder; a thread writes one file at a time.

    So memory holds two files at most, each of at most `_MOST_BYTES` and one step more. The folder
    is made with the first file.
    """

    def __init__(self, folder: Path, *, steps_per_file: int, pp_rank: int, pp_size: int) -> None:
        self._folder = folder
        self._steps_per_file = steps_per_file
        self._pp_rank, self._pp_size = pp_rank, pp_size
        self._suffix = f"stage_{pp_rank}.npz"
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[bool] | None = None
        for unfinished in folder.glob(f".*_{self._suffix}.*.partial"):
            self.change(unfinished, unfinished.unlink)

    def path(self, last_step: int) -> Path:
        """Return the path of the file that ends with this step."""
        return self._folder / f"step_{last_step:08d}_{self._suffix}"

    def existing(self) -> Iterator[tuple[int, Path]]:
        """Yield last step and path of each existing file of this rank's stages, by step.

        If an earlier part of the run had more pipeline stages than now, each rank also cares for
        the files of some of these stages.
        """
        for path in sorted(self._folder.glob("step_*_stage_*.npz")):
            name = re.fullmatch(r"step_(\d+)_stage_(\d+)", path.stem)
            if name and int(name[2]) % self._pp_size == self._pp_rank:
                yield int(name[1]), path

    def change(self, path: Path, change: Callable[[], object]) -> None:
        """Call `change`, which reads or changes an existing file; warn if that fails.

        A damaged file is moved aside.
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
        """Return the path of an existing file when its last step is this one."""
        return path.with_name(f"step_{last_step:08d}_{path.name.split('_', 2)[2]}")

    def is_due(self, num_steps: int, num_bytes: int) -> bool:
        """Return whether a file with so many steps and bytes is due."""
        return num_steps == self._steps_per_file or num_bytes > _MOST_BYTES

    def start(self, path: Path, write: Callable[[Path], None]) -> None:
        """Wait for the file before, and start to write a file."""
        self.wait()
        self._writing = self._thread.submit(write_or_warn, path, write)

    def wait(self) -> None:
        """Wait until the started file is written."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Wait until the started file is written, and end the thread."""
        self.wait()
        self._thread.shutdown()


def write_or_warn(path: Path, write: Callable[[Path], None]) -> bool:
    """Return whether `write` wrote the file; if it fails, warn."""
    try:
        write(path)
    except Exception as error:  # Of any class, because a file must not stop the training.
        logger.warning("warning: %s is left out: %s", path, error)
        return False
    return True
