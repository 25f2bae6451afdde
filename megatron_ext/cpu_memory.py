"""The memory of ranks on a CPU, which stays with the process when it is freed, as a GPU's does."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": (_M_MMAP_THRESHOLD, 1 << 30),
    "MALLOC_TRIM_THRESHOLD_": (_M_TRIM_THRESHOLD, -1),  # Nothing is given back.
}
"""Parameters of glibc's `mallopt` and their values, by the variable that a user may have set."""


def keep_freed_memory() -> None:
    """Have this process keep what it frees, in huge pages if PyTorch has allocated nothing yet.

    Activations come and go every step: else page faults cost the busiest rank a third of a step.
    A variable that is set stays. Without glibc only huge pages have an effect.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, setting in _SETTINGS.items():
            if name not in os.environ:
                mallopt(*setting)
