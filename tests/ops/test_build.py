"""A wheel made without Torch works elsewhere: its native part is built at first use, and once."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_ext.ops import build, from_source

ROOT = Path(__file__).parents[2]
(BUILT,) = ROOT.glob(f"build/*-{sys.implementation.cache_tag}")

# Takes objects that the set-up of this environment has built, and compiles what it has not.
COMPILER = """#!/bin/sh
for word; do
    case "$before $word" in "-o CMakeFiles/megatron_ext.dir/"*.o)
        [ -f "$BUILT/$word" ] && cp "$BUILT/$word" "$word" && echo "$word:" >"$word.d" && exit ;;
    esac
    before=$word
done
exec c++ "$@"
"""
# Uses the wheel that was put into a folder, instead of what this environment has.
FIRST_USE = """
import sys
sys.meta_path = [each for each in sys.meta_path if "ScikitBuild" not in type(each).__name__]
sys.path.insert(0, sys.argv[1])
import torch
import megatron_ext
from megatron_ext.ops import load_library
assert megatron_ext.__file__.startswith(sys.argv[1])
load_library()
(loaded,) = torch.ops.loaded_libraries
marks = torch.ops.megatron_ext.count_load(torch.ones(3, 2, dtype=torch.bool), None)
assert marks[0].tolist() == [3, 3]
print(loaded, megatron_ext.__version__)
"""


@pytest.mark.slow
def test_a_wheel_made_without_torch_works_elsewhere(tmp_path):
    stub, compiler = tmp_path / "stub", tmp_path / "compiler"
    stub.mkdir()
    (stub / "torch.py").write_text("raise ImportError('no torch in the build environment')")
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    # Without nvcc, which takes minutes.
    path = f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    environment = os.environ | {"PATH": path, "CUDA_HOME": "/nowhere"}

    settings = {"build-dir": str(tmp_path / "build")}
    make = f"import scikit_build_core.build as b; b.build_wheel({str(tmp_path)!r}, {settings!r})"
    made = subprocess.run(
        [sys.executable, "-c", make],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(stub)},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    target = tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(target)
    assert (target / "megatron_ext" / "recipes" / "quickstart.yaml").is_file()

    cache = tmp_path / "cache"
    environment |= {"XDG_CACHE_HOME": str(cache), "CXX": str(compiler), "BUILT": str(BUILT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_USE, str(target)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    (library,) = cache.glob("megatron_ext/*.so")
    assert [out for out, _ in said] == [f"{library} {wheel.name.split('-')[1]}\n"] * 2
    assert f"torch-{torch.__version__}-" in library.name
    assert (cache / "megatron_ext").stat().st_mode & 0o777 == 0o700
    # One of the two has built it, and has said so in a line.
    (line,) = "".join(err for _, err in said).splitlines()
    assert line.startswith(f"megatron_ext: building the native part for torch {torch.__version__}")


def test_a_library_for_another_torch_is_not_used(tmp_path, monkeypatch):
    installed = build._installed()
    assert build._MARK.search(installed.read_bytes())
    assert build.library() == installed
    other = tmp_path / "libmegatron_ext.so"
    monkeypatch.setattr(build, "_installed", lambda: other)
    monkeypatch.setattr(from_source, "_cached", lambda sources, _: sources)
    for content in (b"...\0megatron_ext for torch 1.0.0\0...", b"without a mark"):
        other.write_bytes(content)
        assert build.library() == ROOT / "csrc"


def test_sources_and_tools_name_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(from_source, "cuda_compiler", lambda: None)
    names = {from_source._name(ROOT / "csrc")}
    (tmp_path / "a.cpp").write_text("1")
    names.add(from_source._name(tmp_path))
    (tmp_path / "a.cpp").write_text("2")
    names.add(from_source._name(tmp_path))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    names.add(from_source._name(tmp_path))
    monkeypatch.setattr(from_source, "cuda_compiler", lambda: "nvcc")
    names.add(from_source._name(tmp_path))
    assert len(names) == 5


def test_what_keeps_it_from_being_built_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_installed", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler.*g\+\+.*CXX"):
        build.library()

    monkeypatch.delenv("CXX")
    monkeypatch.setattr(from_source, "_sources", lambda: tmp_path)  # no CMakeLists.txt
    with pytest.raises(RuntimeError, match="does not build") as said:
        build.library()
    cache = tmp_path / "cache" / "megatron_ext"
    (log,) = cache.glob("*.log")
    assert str(log) in str(said.value)
    assert "CMakeLists.txt" in log.read_text()

    cache.chmod(0o777)
    with pytest.raises(RuntimeError, match=f"{cache} must belong to you"):
        build.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(log))
    with pytest.raises(RuntimeError, match=f"Not a directory.*{cache}.*XDG_CACHE_HOME"):
        build.library()
