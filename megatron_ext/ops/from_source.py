"""Builds the compiled library, where an installation has none for its Torch.

The first process that needs a library builds the sources, which are installed too, into the user's
cache: a library for each Torch and state of the sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

_TOOLS = {
    "cmake": "pip install cmake",
    "ninja": "pip install ninja",
    "c++": "install g++ 11 or later, or name a compiler in CXX",
}


def built_library(file_name: str) -> Path:
    """Return the library in the user's cache; builds it if there is none.

    A build leaves it in a file of this name.

    Raises:
        RuntimeError: It cannot be built; says why.
    """
    try:
        return _cached(_sources(), file_name)
    except OSError as error:
        raise RuntimeError(
            f"the native part cannot be built: {error}; XDG_CACHE_HOME names another folder for it"
        ) from error


def _sources() -> Path:
    for folder in Path(__file__).parents[1:3]:  # In a wheel in the package, in a clone beside it.
        if (folder / "csrc" / "CMakeLists.txt").is_file():
            return folder / "csrc"
    raise RuntimeError(
        "the compiled library of megatron_ext is missing, and so are its sources: "
        "install the package again"
    )


def _cached(sources: Path, file_name: str) -> Path:
    """Return the library in the cache. One process builds it, others wait meanwhile."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_ext"
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise RuntimeError(
            f"{folder} must belong to you and be writable by nobody else: what is in it is run"
        )
    path = folder / f"{_name(sources)}.so"
    if not path.is_file():
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _build(sources, path, file_name)
    return path


def _name(sources: Path) -> str:
    """Name all that a library depends on."""
    digest = hashlib.sha256()
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(sources)}\n{len(text)}\n".encode() + text)
    device = "cuda" if cuda_compiler() else "host"
    return f"torch-{torch.__version__}-{platform.machine()}-{device}-{digest.hexdigest()[:16]}"


def cuda_compiler() -> str | None:
    """Return the compiler for the CUDA part, if there is one and Torch has CUDA."""
    if torch.version.cuda is None:
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def missing_tool() -> str | None:
    """Return what building lacks and how to get it, in one line; None if nothing."""
    for tool, how in _TOOLS.items():
        program = os.environ.get("CXX", tool) if tool == "c++" else tool
        if shutil.which(program, path=_tools_path()) is None:
            return f"there is no {program}: {how}"
    return None


def _tools_path() -> str:
    # Tools that pip installed need not be in PATH.
    places = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user")]
    return os.pathsep.join([*places, os.environ.get("PATH", os.defpath)])


def _build(sources: Path, path: Path, file_name: str) -> None:
    """Build the library, as an installation does, and move it to `path` when it is whole.

    Raises:
        RuntimeError: A tool is missing, or the build fails.
    """
    if missing := missing_tool():
        raise RuntimeError(f"the native part cannot be built: {missing}")
    environment = os.environ | {"PATH": _tools_path()}
    if nvcc := cuda_compiler():
        environment["CUDACXX"] = nvcc
    without = "" if nvcc or torch.version.cuda is None else ", without its CUDA part (no nvcc)"
    sys.stderr.write(
        f"megatron_ext: building the native part for torch {torch.__version__}{without}; "
        "once, takes minutes ...\n"
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        configure = ["cmake", "-G", "Ninja", "-S", str(sources), "-B", made]
        configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        log = path.with_suffix(".log")
        with log.open("w") as written:
            for command in configure, ["cmake", "--build", made]:
                done = subprocess.run(
                    command, env=environment, stdout=written, stderr=subprocess.STDOUT
                )
                if done.returncode:
                    raise RuntimeError(f"the native part does not build; {log} says why")
        (Path(made) / file_name).replace(path)
