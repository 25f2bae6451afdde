"""The host part with AddressSanitizer and UndefinedBehaviorSanitizer, in build/sanitized."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILER = "g++"
# Without debugging information, which takes a third of the time; reports name functions.
FLAGS = "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all"


def build() -> Path:
    """Build the library as far as sources have changed; returns its folder, with all objects."""
    folder = ROOT / "build" / "sanitized"
    configure = ["cmake", "-G", "Ninja", "-S", str(ROOT / "csrc"), "-B", str(folder)]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=None"]
    configure += [f"-DCMAKE_CXX_COMPILER={COMPILER}", f"-DCMAKE_CXX_FLAGS={FLAGS}"]
    # What is derived in one library and used in another cannot be checked: no type information.
    configure[-1] += " -fno-sanitize=vptr"
    for command in configure, ["cmake", "--build", str(folder)]:
        # CUDACXX: the CUDA part is left out.
        environment = os.environ | {"CUDACXX": "none", "PATH": _with_tools()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}:\n{done.stdout}{done.stderr}")
    return folder


def _with_tools() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def environment() -> dict[str, str]:
    """Return what a Python that loads the library needs."""
    libraries = [
        subprocess.check_output([COMPILER, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    # Python and torch keep memory to their end on purpose.
    options = "detect_leaks=0:allocator_may_return_null=1"
    return os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": options}
