"""A rank that hangs is named by all others, with its place, and the run ends. Real signals."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from megatron_ext.config import BalanceConfig, ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.telemetry.heartbeat import (
    DONE,
    FAILED,
    GAVE_UP,
    STATUS_FOLDER,
    Note,
    Status,
    own_status,
    read_statuses,
)
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.ranks import watchdog as watchdogs
from megatron_ext.trainer.ranks.watchdog import HANGING, Watchdog, ended, judge, told, watch_over
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides

LIMIT_S = 12.0
"""Far more than a step takes on a busy machine, and what these tests wait for."""


def status(rank: int, **values: Any) -> Status:
    one = own_status(rank=rank, num_ranks=3, limit_s=600)
    return replace(one, beat=9, time=time.time(), note=Note("forward", 149, 2), **values)


def judged(*now: Status, still: tuple[int, ...] = ()) -> str:
    """The verdict where all ranks but those in `still` have beaten again; N for a time till now."""
    before = [replace(one, beat=one.beat - (one.rank not in still)) for one in now]
    return re.sub(r"heartbeat \d+ s ago", "heartbeat N s ago", judge(before, now))


WAITING: dict[str, Any] = dict(waits=True, still_s=600.0, moves=7)


@pytest.mark.parametrize(
    ("now", "still", "expected"),
    [
        (
            [status(0, **WAITING), status(1, **WAITING, host="b", pid=5), status(2, **WAITING)],
            (1,),
            "rank 1 (host b, process 5) hangs in step 149, forward, layer 2: its process does not "
            "run, last heartbeat N s ago",
        ),
        (
            [
                status(0, **WAITING),
                status(1, host="b", pid=5, still_s=601.0, moves=7, line="spin (a.py:3)"),
                status(2, **WAITING),
            ],
            (),
            "rank 1 (host b, process 5) hangs in step 149, forward, layer 2: its main thread has "
            "not moved for 601 s, in spin (a.py:3)",
        ),
        # All wait: the one that is least far has not made the call that the others are in.
        (
            [
                status(0, **WAITING),
                status(1, **WAITING),
                status(2, **(WAITING | dict(moves=6)), host="b", pid=5),
            ],
            (),
            "rank 2 (host b, process 5) hangs in step 149, forward, layer 2: its main thread has "
            "not moved for 600 s",
        ),
        (
            [status(0, **WAITING), status(2, state=DONE), status(1, started=1, pid=5, host="b")],
            (),
            "rank 1 (host b, process 5) hangs in step 149, forward, layer 2: its main thread has "
            "not moved for 0 s",
        ),
        (
            [status(0, **WAITING)],
            (),
            "no sign of ranks [1, 2]: they have no status, or a damaged one",
        ),
        (
            [
                status(0, state=FAILED, reason="RuntimeError: connection closed", host="a", pid=1),
                replace(status(1, state=FAILED, reason="KeyError: 'x'", host="b", pid=5), time=1.0),
                status(2, **WAITING),
            ],
            (2,),
            "rank 1 (host b, process 5) failed in step 149, forward, layer 2: KeyError: 'x'",
        ),
    ],
)
def test_who_hangs(now: list[Status], still: tuple[int, ...], expected: str) -> None:
    assert judged(*now, still=still) == expected


def test_a_rank_that_runs_and_writes_nothing_is_not_called_stopped() -> None:
    """Its disk may be full."""
    now = [status(0), status(1), status(2)]
    assert (
        "hangs in step 149, forward, layer 2: its process runs, but cannot write (is the disk"
        in (judged(*now, still=(1,)))
    )


def _fail(folder: Path, rank: int, error: BaseException, **last: Any) -> logging.LogRecord:
    """What this rank logs at its end."""
    watchdog = Watchdog(folder / STATUS_FOLDER, own_status(rank=rank, num_ranks=3, limit_s=600))
    watchdog._pulse.status = replace(watchdog._pulse.status, **last)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    try:
        watchdog.fail(error)
    finally:
        logging.getLogger("megatron_ext").removeHandler(handler)
        watchdog._ended.set()
        watchdog._thread.join()
    (record,) = said
    return record


def _left(cause: Exception) -> SystemExit:
    left = SystemExit(1)
    left.__cause__ = cause
    return left


def test_the_rank_that_failed_first_speaks_and_names_its_log(tmp_path: Path) -> None:
    first = _fail(tmp_path, 1, _left(KeyError("x")))
    assert first.getMessage() == (
        f"rank 1 failed in start: KeyError: 'x' (see {tmp_path}/logs/rank_00001.log)"
    )
    assert not hasattr(first, "is_log_only")
    second = _fail(tmp_path, 0, _left(RuntimeError("Connection closed by peer")))
    assert second.getMessage().startswith("rank 0: rank 1 (host ")
    assert hasattr(second, "is_log_only")


def test_an_error_after_long_work_is_of_the_rank_itself(tmp_path: Path) -> None:
    """A full disk, or a setting, is no reason to start again: the rank ends with its own status."""
    with pytest.raises(OSError, match="No space") as full:
        raise OSError(errno.ENOSPC, "No space left on device")
    said = _fail(tmp_path, 0, _left(full.value), still_s=600.0)
    assert said.getMessage().startswith("rank 0 failed in start: OSError: [Errno 28] No space")
    watchdog = Watchdog(tmp_path / "all", own_status(rank=0, num_ranks=2, limit_s=600))
    watchdog._pulse.status = replace(watchdog._pulse.status, still_s=600.0)
    watchdog.fail(SystemExit(2))  # As all ranks agreed, and rank 0 has said.


def test_a_rank_whose_wait_has_failed_is_not_named_for_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(watchdogs, "judge", lambda _, now: seen.extend(now) or "rank 1 hangs")
    monkeypatch.setattr(os, "_exit", seen.append)
    with pytest.raises(ValueError, match="not been initialized") as failed:
        distributed_c10d._get_default_group()  # In torch's code, as waits are.
    last = {"line": "wait (torch.py:7)", "still_s": 600.0, "beat_s": 0.1}
    said = _fail(tmp_path, 0, _left(failed.value), **last)
    assert said.getMessage().startswith("rank 0: rank 1 hangs (own stacks: ")
    assert (seen[0].line, seen[0].waits, seen[-1]) == ("wait (torch.py:7)", True, HANGING)


def test_a_wrong_setting_that_a_rank_finds_is_a_line_a_problem(tmp_path: Path) -> None:
    said = _fail(tmp_path, 0, _left(ConfigError(["a (1) must be 2", "b (3) must be 4"])))
    assert said.getMessage() == "error: a (1) must be 2\nerror: b (3) must be 4"


def test_many_that_do_not_beat_are_one_line() -> None:
    now = [replace(status(rank, host="b", pid=5), num_ranks=12) for rank in range(12)]
    verdict = judged(*now, still=tuple(range(1, 12)))
    assert verdict.count("does not run") == 4
    assert verdict.endswith("; and 7 ranks more")


def test_a_process_of_this_machine_that_is_gone_has_died() -> None:
    now = [status(0), status(1, started=1), status(2)]
    assert ended(now) == f"rank 1 (host {now[1].host}, process {os.getpid()}) died in " + str(
        now[1].note
    )
    assert ended(now, besides=1) == ""
    assert told(now) == ""
    assert told([*now, status(3, state=GAVE_UP, reason="rank 1 hangs")]) == "rank 1 hangs"


def _sleep_in_a_layer(rank: int, arguments: list[str]) -> None:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.mcore.moe_layer import BalancedMoELayer
    from megatron_ext.trainer.loop import Training

    parallel_state.destroy_model_parallel()
    config = load_config(arguments)
    compute = BalancedMoELayer.routed_experts_compute

    def sleep_for_ever(layer: Any, *inputs: Any) -> Any:
        if layer.layer_number == 2 and training.step == 2:
            signal.pause()
        return compute(layer, *inputs)

    with watch_over(config):
        training = Training(config)
        if rank == 1:
            BalancedMoELayer.routed_experts_compute = sleep_for_ever  # Until the process ends.
        training.run()


@pytest.mark.slow
def test_a_main_thread_that_sleeps_is_named_by_all(data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), f"timeout_s={LIMIT_S}"]
    with pytest.raises(RuntimeError, match=f"died with exit code {HANGING}"):
        run_ranks(_sleep_in_a_layer, 2, arguments, timeout_s=400)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    for one in read_statuses(tmp_path / STATUS_FOLDER):
        if one.state != GAVE_UP:  # Ended with the first that gave up, by who runs the ranks.
            continue
        place = "hangs in step 3, forward, layer 2, microbatch 0: its main thread has not moved for"
        assert one.reason.startswith(f"rank 1 (host {one.host}, process ")
        assert place in one.reason
        assert "in sleep_for_ever (" in one.reason
    assert any(one.state == GAVE_UP for one in read_statuses(tmp_path / STATUS_FOLDER))


def _await(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def _steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _doctor(run_dir: Path, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "megatron_ext", "doctor", "--run", str(run_dir), "--json"]
    told = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120)
    return told.returncode, json.loads(told.stdout)


@pytest.mark.slow
def test_a_pause_is_survived_and_a_stopped_rank_is_named(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_ext.train", *overrides(data, tmp_path)]
    command += ["steps=1000000", f"timeout_s={LIMIT_S}"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment, umask=0
    ) as process:
        try:
            _attack(process, tmp_path)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    # Whatever the user's mask: where every user may write, no second run would begin.
    assert not [each for each in tmp_path.rglob("*") if each.stat().st_mode & stat.S_IWOTH]


def _attack(process: subprocess.Popen[str], run_dir: Path) -> None:
    _await(lambda: _steps(run_dir) >= 3, process)
    ranks = read_statuses(run_dir / STATUS_FOLDER)
    assert [one.rank for one in ranks] == [0, 1]

    # The machine is paused: all ranks at once, for longer than the limit.
    for one in ranks:
        os.kill(one.pid, signal.SIGSTOP)
    paused_at = time.monotonic()
    _, state = _doctor(run_dir)
    assert [row["process"] for row in state["ranks"]] == ["stopped", "stopped"]
    time.sleep(max(1.1 * LIMIT_S - (time.monotonic() - paused_at), 0))  # The pause itself.
    for one in ranks:
        os.kill(one.pid, signal.SIGCONT)
    steps = _steps(run_dir)
    _await(lambda: _steps(run_dir) >= steps + 3, process)
    _await(lambda: _doctor(run_dir)[1]["is_well"], process)
    status, state = _doctor(run_dir, "--stacks")
    assert state["verdict"].startswith("runs, in step ")
    assert [row["host"] for row in state["ranks"]] == [one.host for one in ranks]
    assert all("in run_rank" in row["stacks"] for row in state["ranks"]), state
    assert status == 0

    os.kill(ranks[1].pid, signal.SIGSTOP)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"rank 0: rank 1 (host {ranks[1].host}, process {ranks[1].pid}) hangs in step " in errors
    assert ": its process does not run (it is stopped), last heartbeat " in errors
    _, last = read_statuses(run_dir / STATUS_FOLDER)
    assert str(last.note) in errors
    assert last.note.step >= _steps(run_dir) - 50
    assert not [one for one in ranks if one.process != "gone"]
    status, state = _doctor(run_dir)
    assert status == 1
    assert state["verdict"].startswith("ended: rank 1 (host ")


def _finish(rank: int, folder: str, fails: bool) -> None:
    config = load_config(["data.path=nowhere", f"run_dir={folder}"])
    with watch_over(config):
        if fails and rank == 1:
            raise KeyError("a thing")


def test_what_became_of_a_run_is_in_its_files(tmp_path: Path) -> None:
    folder = tmp_path / STATUS_FOLDER
    run_ranks(_finish, 2, str(tmp_path), False)
    assert [one.state for one in read_statuses(folder)] == [DONE, DONE]
    # As if a run of three ranks had been here before.
    values = json.loads((folder / "rank_00001.json").read_text())
    (folder / "rank_00002.json").write_text(json.dumps(values | {"rank": 2}))
    with pytest.raises(RuntimeError, match="a thing"):
        run_ranks(_finish, 2, str(tmp_path), True)
    zero, one = read_statuses(folder)
    assert zero.state == DONE
    assert (one.state, one.reason) == (FAILED, "KeyError: 'a thing'")


@pytest.mark.parametrize("given", ["0", "-1", ".inf", "soon"])
def test_a_limit_is_a_number_of_seconds(given: str) -> None:
    rule = rf"balance\.timeout_s \('?{given}'?\) must be 'auto' or .* > 0"
    with pytest.raises(ConfigError, match=rule):
        load_config(["data.path=nowhere", f"balance.timeout_s={given}"])


def test_groups_wait_longer_than_the_watchdog() -> None:
    config = load_config(["data.path=nowhere", "timeout_s=30"])
    assert config.group_timeout.total_seconds() == 60
    assert config.balance.wait_limit_s is None
    assert BalanceConfig(timeout_s=5).wait_limit_s == 5.0
