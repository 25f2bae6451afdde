"""What the launcher gives its ranks. Layer 2."""

import json
import os
import platform
import resource
import statistics
from pathlib import Path

import pytest
import torch

from megatron_ext.trainer.launch import CPU_ENVIRONMENT, join_ranks, launch_ranks

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")

BLOCK = 64 << 20
"""Bytes that the C library would return to the kernel as soon as they are free."""
ROUNDS = 10


def _report(folder: str) -> None:
    with join_ranks():
        faults = []
        for _ in range(ROUNDS):
            before = _faults()
            torch.ones(BLOCK // 4)
            faults.append(_faults() - before)
        report = {
            "environment": {name: os.environ.get(name) for name in CPU_ENVIRONMENT},
            "faults": faults,
        }
        Path(folder, "report.json").write_text(json.dumps(report))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _report_of_a_rank(folder: Path) -> dict:
    launch_ranks(_report, str(folder), num_ranks=1)
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
@on_a_cpu
def test_a_rank_keeps_the_memory_it_freed(monkeypatch, tmp_path):
    for name in CPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    report = _report_of_a_rank(tmp_path)
    assert report["environment"] == CPU_ENVIRONMENT
    if platform.libc_ver()[0] == "glibc":
        # Returned to the kernel, it would take a fault for each huge page at least, in every round.
        assert statistics.median(report["faults"]) < BLOCK // (2 << 20), report


@pytest.mark.slow
@on_a_cpu
def test_what_a_user_has_set_stays(monkeypatch, tmp_path):
    for name in CPU_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    report = _report_of_a_rank(tmp_path)
    assert report["environment"] == CPU_ENVIRONMENT | {"MALLOC_TRIM_THRESHOLD_": "131072"}
