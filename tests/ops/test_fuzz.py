"""The fuzz of the ops sees crashes, hangs and calls that are refused without reason."""

import collections
import os
import random
import signal
import time

import pytest

from tests.ops import fuzz


def test_each_defect_is_told_with_its_try(monkeypatch):
    monkeypatch.setattr(fuzz, "PATIENCE_S", 1.0)

    def attempt(seed):
        if seed == "7-1":
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == "7-3":
            raise fuzz.Defect("rows have not arrived")
        if seed == "7-4":
            time.sleep(60)
        return collections.Counter({("push", "accepted"): 2})

    outcomes, defects = fuzz.run(6, 7, attempt)
    assert outcomes == {("push", "accepted"): 6}
    assert [each.strip() for each in defects] == [
        "try 7-1 ended by SIGKILL",
        "try 7-3: Defect: rows have not arrived",
        "try 7-4 had no end in 1 s",
    ]


def test_valid_calls_must_be_accepted():
    def refuse(value):
        raise ValueError("no")

    call = fuzz.Calls(random.Random(1))
    call.changes = 0.0
    with pytest.raises(fuzz.Defect, match="push refuses a valid call: no"):
        call("push", refuse, 1)
    call.changes = 1.0
    assert call("push", lambda value: value, 1) != 1
    with pytest.raises(fuzz.Stop):  # A changed call has been accepted before.
        call("push", refuse, 1)
    assert call.outcomes["push", "ValueError"] == 1
