"""What a rank notes of itself, and what of it others find in its file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.filesystem

from megatron_ext.telemetry import heartbeat
from megatron_ext.telemetry.heartbeat import (
    DONE,
    FAILED,
    GAVE_UP,
    Note,
    Pulse,
    own_status,
    read_statuses,
    status_path,
    waits_at,
)
from tests.ranks import run_ranks

LIMIT_S = 100.0


@pytest.fixture(autouse=True)
def _first_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat._MainThread, "note", Note())


def pulse(folder: Any, rank: int = 0) -> Pulse:
    return Pulse(folder, own_status(rank=rank, num_ranks=2, limit_s=LIMIT_S))


def test_a_file_says_where_its_rank_is(tmp_path: Any) -> None:
    one = pulse(tmp_path)
    assert str(read_statuses(tmp_path)[0].note) == "start"
    heartbeat.note("load")
    one.beat()
    assert str(read_statuses(tmp_path)[0].note) == "load"
    heartbeat.note("forward", step=3)
    written = one.beat()
    (found,) = read_statuses(tmp_path)
    assert found == written
    assert (found.rank, found.pid, found.beat, found.still_s) == (0, os.getpid(), 2, 0.0)
    assert str(found.note) == "step 3, forward"
    assert found.process == "runs"
    one.end(DONE)
    assert read_statuses(tmp_path)[0].state == DONE


@pytest.mark.parametrize("state", [FAILED, GAVE_UP])
def test_the_reason_is_one_line(state: str, tmp_path: Any) -> None:
    one = pulse(tmp_path)
    one.end(state, "ValueError: fi\x1b[2Jrst\nsecond")
    (found,) = read_statuses(tmp_path)
    assert (found.state, found.reason) == (state, r"ValueError: fi\x1b[2Jrst")


def test_time_without_a_move_is_counted_in_ticks(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    one = pulse(tmp_path)
    for _ in range(5):
        now[0] += 2.0
        assert one.beat().moves == 0
    assert one.status.still_s == 10.0
    # The machine is paused: the clock jumps, but this process did not run either.
    now[0] += 1e6
    assert one.beat().still_s == 10.0 + one.status.lost_s
    heartbeat.note("forward", step=1)
    heartbeat.note("forward", step=1)
    assert one.beat().still_s == 0.0
    # The same place once more is a move as well.
    heartbeat.note("forward")
    now[0] += 2.0
    assert (one.beat().still_s, one.status.moves) == (0.0, 1)


def test_a_process_that_ended_or_another_of_its_number_is_gone(tmp_path: Any) -> None:
    status = pulse(tmp_path).status
    assert replace(status, started=status.started + 1).process == "gone"
    assert replace(status, pid=2**22 + 1).process == "gone"
    assert replace(status, host="elsewhere").process == "?"
    # A container with the host's network has the host's name.
    assert replace(status, namespace="pid:[1]").process == "?"


def test_a_rank_that_writes_a_checkpoint_waits_for_no_other() -> None:
    assert waits_at(torch.distributed.distributed_c10d.__file__, 1)
    assert not waits_at(torch.distributed.checkpoint.filesystem.__file__, 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", '{"rank": 0', "[1]", '{"rank": 0}', "\0" * 40, "[" * 100_000),
        {"state": "unheard of"},
        {"time": "now"},
        {"still_s": 10**400},
        {"note": ["forward", "two"]},
        {"note": ["forward"] * 9},
        {"num_ranks": 10**9},
    ],
)
def test_a_torn_file_is_as_good_as_none(text: str | dict[str, Any], tmp_path: Any) -> None:
    pulse(tmp_path, rank=1)
    if isinstance(text, dict):
        good = json.loads(status_path(tmp_path, 1).read_text())
        text = json.dumps(good | {"rank": 0} | text)
    status_path(tmp_path, 0).write_text(text)
    (tmp_path / "rank_00007.partial").write_text("")
    assert [status.rank for status in read_statuses(tmp_path)] == [1]
    assert read_statuses(tmp_path / "missing") == []
    assert json.loads(status_path(tmp_path, 1).read_text())["rank"] == 1


def test_a_full_disk_stops_nothing(tmp_path: Any) -> None:
    one = pulse(tmp_path)
    status_path(tmp_path, 0).unlink()
    tmp_path.rmdir()
    one.beat()


def _note_a_step(rank: int, recompute: str) -> dict[str, list[str]]:
    from megatron_ext.config import BalanceConfig
    from tests.mcore.parity import balanced_gpt, balanced_layers

    gpt = balanced_gpt(dict(ep=2, recompute=recompute), BalanceConfig(tolerance=0.0))
    layers = balanced_layers(gpt)
    gpt.forward_backward()
    unwatched = {name: grad.clone() for name, grad in gpt.gradients().items()}
    heartbeat.note_layers(layers)
    heartbeat.note("forward", step=4)
    gpt.chunks[0].zero_grad_buffer()
    gpt.forward_backward()
    # The notes are no part of what is computed.
    assert all(torch.equal(unwatched[name], grad) for name, grad in gpt.gradients().items())
    seen: list[str] = []
    for layer in layers:
        layer.router.register_forward_pre_hook(lambda *_: seen.append(str(heartbeat.last_note())))
        layer.router.weight.register_hook(lambda _: seen.append(str(heartbeat.last_note())))
    heartbeat.note("forward", step=5)
    gpt.forward_backward(num_microbatches=2)
    trained, seen[:] = list(seen), []
    heartbeat.note("evaluate")
    with torch.no_grad():
        gpt.forward_backward(forward_only=True)
    return {"trained": trained, "evaluated": list(seen)}


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_layers_note_their_forward_and_backward(recompute: str) -> None:
    again = [] if recompute == "none" else ["backward"]
    for notes in run_ranks(_note_a_step, 2, recompute):
        expected = []
        for microbatch in (0, 1):
            expected += [
                f"step 5, forward, layer {layer}, microbatch {microbatch}" for layer in (1, 2)
            ]
            for layer in (2, 1):
                expected += [f"step 5, {stage}, layer {layer}" for stage in [*again, "backward"]]
        assert notes["trained"] == expected
        assert [note.split(", microbatch")[0] for note in notes["evaluated"]] == [
            f"step 5, evaluate, layer {layer}" for layer in (1, 2)
        ]
