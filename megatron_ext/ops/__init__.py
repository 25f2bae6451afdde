"""Loads the compiled library, which defines `torch.ops.megatron_ext.*`.

The ops are declared in `csrc/bindings/library.cpp`; `csrc/include/megatron_ext/api.h` says what
they do. Importing this module loads nothing.
"""

from __future__ import annotations

import functools

import torch

from megatron_ext.ops.build import library


@functools.cache
def load_library() -> None:
    """Load the compiled library once; later calls do nothing. Builds it where there is none.

    Raises:
        RuntimeError: If the library cannot be built or does not load; says why.
    """
    path = library()
    try:
        torch.ops.load_library(path)
    except OSError as error:
        reason = error.__cause__ or error
        raise RuntimeError(
            f"{path} does not load with torch {torch.__version__} ({reason}); remove it, and it is "
            "built again"
        ) from error


def has_cuda_part() -> bool:
    """Return whether the compiled library was built with its CUDA part; loads it."""
    load_library()
    try:
        torch.classes.megatron_ext.PeerExchange  # noqa: B018
    except RuntimeError:  # torch's way to say that there is no such class
        return False
    return True
