"""A short campaign: every way to end a run once, and most kinds of damage. Layer 3."""

import subprocess
import sys

import pytest
import torch


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
