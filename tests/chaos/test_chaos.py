"""A short campaign: every way to end a run once, and most kinds of damage. Layer 3."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import left_in_shared_memory, unused_shared_files


def test_what_is_left_in_shared_memory_is_what_nobody_uses():
    before = unused_shared_files()
    file = Path(f"/dev/shm/left_{os.getpid()}")
    with file.open("w"):
        assert file.name not in left_in_shared_memory(before, patience_s=0)
    try:
        assert file.name in left_in_shared_memory(before, patience_s=0)
    finally:
        file.unlink()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")
def test_ten_strikes_leave_no_trace():
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--kills", "10"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert done.stdout.splitlines()[-1] == "no difference"
