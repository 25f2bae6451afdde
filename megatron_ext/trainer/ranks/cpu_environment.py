"""The environment of ranks on a CPU. A process must have most of it when it starts.

A shell that starts ranks sets what this module prints when it is run.
"""

from __future__ import annotations

import os
import sys

CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Activations come and go every step. What was freed stays with the process, as it does with a
    # GPU's allocator, and in huge pages: else page faults cost the busiest rank a third of a step.
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""What is set where it is not set already; only glibc reads the last two."""


def set_cpu_environment() -> None:
    """Set it for processes that this one starts."""
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    for name in CPU_ENVIRONMENT.keys() - os.environ.keys():
        sys.stdout.write(f"export {name}={CPU_ENVIRONMENT[name]}\n")
