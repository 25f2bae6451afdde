"""`doctor`: what it finds is what is there, and what is wrong has a name."""

import importlib.metadata
import json

from tests.cli.command import run


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
        "problem: megatron-core is not installed",
        "problem: numpy 2.0.1 is installed, <1 is needed",
        "problem: the library is not built",
    ]
