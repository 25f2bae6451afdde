"""The compiled library for the Torch that is here: as installed, or built at first use.

A library works with one version of Torch, and has its name in it. An installation has one if Torch
was there when it was made; else `from_source.py` makes it.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import torch

_LIBRARY = "libmegatron_ext.so"
_MARK = re.compile(rb"megatron_ext for torch ([^\0]+)")


def library() -> Path:
    """Return the library for this Torch; builds it if there is none.

    Raises:
        RuntimeError: It cannot be built; says why.
    """
    if (installed := _installed()) is not None:
        mark = _MARK.search(installed.read_bytes())
        # With another Torch it might be loaded, and then crash.
        if mark is not None and mark[1].decode() == torch.__version__:
            return installed
    # Imported here, because few processes build.
    from megatron_ext.ops.from_source import built_library

    return built_library(_LIBRARY)


def _installed() -> Path | None:
    # Asked of the installed distribution and not looked for beside this file: an editable install
    # keeps the library in the environment, so environments with different Torch can share a tree.
    try:
        distribution = importlib.metadata.distribution("megatron-ext")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"megatron_ext/ops/{_LIBRARY}")))
    return path if path.is_file() else None
