"""`doctor`: what it finds is what is there, and what is wrong has a name."""

import importlib.metadata
import json
import tomllib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from megatron_ext.cli.examine import PACKAGES, cuda_mismatch
from megatron_ext.transport.gpu_driver import Driver
from tests.cli.command import run
from tests.transport.test_gpu_probe import Cuda

ROOT = Path(__file__).parents[2]


def test_doctor(capsys):
    import torch

    status, stdout, _ = run(capsys, "doctor", "--json")
    report = json.loads(stdout)
    assert status == (1 if report["problems"] else 0)
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["versions"]["megatron-core"] == importlib.metadata.version("megatron-core")
    assert bool(report["devices"]) == torch.cuda.is_available()
    assert "quota" in report["strategies"]
    assert report["transport_auto"] in report["transports"]
    assert report["shared_memory"]["free_bytes"] <= report["shared_memory"]["total_bytes"]


def test_doctor_names_what_is_wrong(capsys, monkeypatch):
    known = {"numpy": "2.0.1", "megatron-ext": "0.1.0", "torch": "2.13.0", "hydra-core": "1.3.8"}

    def version(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    def no_library():
        raise RuntimeError("the library is not built")

    requirements = ["numpy<1", "torch>=2.10", "wandb>=1; extra == 'wandb'"]
    monkeypatch.setattr("megatron_ext.ops.load_library", no_library)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(importlib.metadata, "version", version)
    status, stdout, _ = run(capsys, "doctor")
    assert status == 1
    assert [line for line in stdout.splitlines() if line.startswith("problem: ")] == [
        "problem: megatron-core is not installed: pip install 'megatron-core'",
        "problem: numpy 2.0.1 is installed, <1 is needed: pip install 'numpy<1'",
        "problem: the library is not built",
    ]
    assert "not here             wandb: pip install 'megatron-ext[wandb]'" in stdout
    assert "not here             native part: the library is not built" in stdout


def test_doctor_says_what_is_here_and_how_to_get_the_rest(capsys, monkeypatch, tmp_path):
    for name in ("cmake", "ninja", "sbatch"):
        (tmp_path / name).write_text("#!/bin/sh")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("megatron_ext.ops.from_source._tools_path", lambda: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    _, stdout, _ = run(capsys, "doctor", "--json")
    found = {each["name"]: (each["here"], each["said"]) for each in json.loads(stdout)["features"]}
    assert found["native part"] == (True, "loads and plans")
    assert found["Slurm"] == (True, str(tmp_path / "sbatch"))
    here, how = found["what builds it"]
    assert not here
    assert how.startswith("there is no c++: install g++")
    assert len(found) == 6 + len(PACKAGES)
    monkeypatch.setenv("PATH", "")
    status, stdout, _ = run(capsys, "doctor")
    assert "not here             Slurm: log in to a machine that has sbatch" in stdout
    # What may be absent is no failure.
    assert status == (1 if "problem: " in stdout else 0)


@pytest.mark.parametrize(
    ("release", "of_torch", "said"),
    [
        ("release 13.0, V13.0.88", "13.1", None),
        ("release 13.0, V13.0.88", None, None),
        ("release 13.0, V13.0.88", "12.8", "is of CUDA 13.0 and torch 2.99.0 of CUDA 12.8: both"),
        ("release 12.9, V12.9.1", "13.0", "is of CUDA 12.9 and torch 2.99.0 of CUDA 13.0: both"),
        ("a compiler", "13.0", "is of CUDA an unknown version and torch"),
    ],
)
def test_doctor_compares_the_cuda_of_nvcc_and_torch(
    capsys, monkeypatch, tmp_path, release, of_torch, said
):
    import torch

    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, {release}'\n")
    nvcc.chmod(0o755)
    fake_gpus(monkeypatch, tmp_path, Cuda(2, fabric=False))
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    _, stdout, _ = run(capsys, "doctor", "--gpu", "--json")
    problems = json.loads(stdout)["problems"]
    assert problems == [problem for problem in problems if said and said in problem]
    assert len(problems) == (said is not None)
    assert (cuda_mismatch() is None) == (said is None)


def test_doctor_says_how_to_get_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra in extras.keys() - {"dev", "docs"}:
        (package,) = (name for name, how in PACKAGES.items() if f"'megatron-ext[{extra}]'" in how)
        assert any(Requirement(line).name == package for line in extras[extra])


def fake_gpus(monkeypatch, tmp_path, cuda, *, major=9, channels=(), shared_memory=232448):
    """Let this machine have GPUs, with a driver that is a fake."""
    import torch

    from megatron_ext.cli import examine
    from megatron_ext.transport import gpu_driver

    gpu = SimpleNamespace(
        name="NVIDIA Fake",
        uuid="1-2-3",
        major=major,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=shared_memory,
    )
    for name in channels:
        (tmp_path / name).touch()
    monkeypatch.setattr(examine, "_CHANNELS", tmp_path)
    monkeypatch.setattr("megatron_ext.ops.has_cuda_part", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda.num_devices)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda number: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_driver, "Driver", partial(Driver, cuda))


def test_doctor_says_how_gpus_reach_each_other(capsys, monkeypatch, tmp_path):
    apart = {(a, b) for a in range(4) for b in range(4) if a // 2 != b // 2}
    cuda = Cuda(4, fabric=False, apart=apart)
    fake_gpus(monkeypatch, tmp_path, cuda)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    status, stdout, _ = run(capsys, "doctor", "--gpu")
    assert status == 0
    for line in (
        "GPU 3                NVIDIA Fake, sm_90, 132 multiprocessors, 1-2-3",
        "moving replicas takes 32 blocks to send weights, 33 to add gradients",
        "GPU 2                reads memory of GPU 3",
        "not of GPU 0: cuMemSetAccess: no peer (217)",
        "fabric               no handles of the fabric: cuMemCreate: not permitted (800)",
        "IMEX channels        none (needed for NVLink between machines)",
        "CUDA_DEVICE_MAX_CONNECTIONS=1: one for all streams, so what waits",
        "(4 EP ranks on cuda): transport cuda, domains of 2 ranks: rank 0 does not reach rank 2",
    ):
        assert line in stdout
    assert not cuda.live

    fake_gpus(monkeypatch, tmp_path, Cuda(2, fabric=True), channels=["channel0"])
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    status, stdout, _ = run(capsys, "doctor", "--gpu", "--json")
    report = json.loads(stdout)
    assert (status, report["problems"], report["fabric"]) == (0, [], "")
    assert report["obstacles"] == [["", ""], ["", ""]]
    assert (report["imex_channels"], report["queues"]) == (["channel0"], None)
    assert (report["auto"]["transport"], report["auto"]["nvlink_domain"]) == ("cuda", 2)


def test_doctor_says_what_a_gpu_lacks(capsys, monkeypatch, tmp_path):
    fake_gpus(monkeypatch, tmp_path, Cuda(2, fabric=False, apart={(0, 1), (1, 0)}), major=8)
    status, stdout, _ = run(capsys, "doctor", "--gpu")
    assert status == 1
    assert "problem: NVIDIA Fake (compute capability 8.0) has no bulk copies" in stdout
    assert "GPU 0                reads memory of no other GPU" in stdout
    assert "So replicas go through transport collective, a message each" in stdout

    fake_gpus(monkeypatch, tmp_path, Cuda(2, fabric=True), major=12, shared_memory=101376)
    status, stdout, _ = run(capsys, "doctor", "--gpu")
    assert "not of GPU 1: a block on NVIDIA Fake has 101376 bytes of shared memory" in stdout
    assert "So replicas go through transport collective, a message each" in stdout

    monkeypatch.setattr("megatron_ext.ops.has_cuda_part", lambda: False)
    status, stdout, _ = run(capsys, "doctor", "--gpu")
    assert status == 1
    assert "problem: the library of megatron_ext has no CUDA part" in stdout


def test_doctor_without_a_gpu_says_so_in_one_line(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, stdout, stderr = run(capsys, "doctor", "--gpu")
    assert (status, stdout[:6], stdout.count("\n"), stderr) == (0, "no GPU", 1, "")
    status, stdout, _ = run(capsys, "doctor", "--gpu", "--json")
    assert (status, json.loads(stdout)) == (0, {"gpus": [], "problems": []})
    status, _, stderr = run(capsys, "doctor", "--gpu", "--run", "recipes")
    assert (status, "--run" in stderr, "--gpu" in stderr) == (2, True, True)
