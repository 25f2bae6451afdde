"""Runs over several machines: what is wrong on one of them, and who ends when it is. Layer 2."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)

from megatron_ext.config import ConfigError
from megatron_ext.telemetry.heartbeat import STATUS_FOLDER, Pulse, own_status
from megatron_ext.trainer.compose import load_config, said_in_lines
from megatron_ext.trainer.ranks import addresses, launch, rendezvous, shared_folder
from megatron_ext.trainer.ranks.agent import _Agent, main
from megatron_ext.trainer.ranks.launch import NO_RESTART
from megatron_ext.trainer.ranks.processes import children
from megatron_ext.trainer.ranks.rendezvous import NAME, BoundRendezvous, create_handler
from tests.processes import Program, listening, running
from tests.ranks import run_ranks
from tests.trainer.ranks.test_rendezvous import SECRET, free_port


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDZV_SECRET", SECRET)


def machine(host: str, port: int) -> BoundRendezvous:
    """One of two machines."""
    return create_handler(RendezvousParameters(NAME, f"{host}:{port}", "none", 2, 2))


# Settings


@pytest.mark.parametrize(
    ("rank", "local_rank", "status", "said"),
    [
        ("0", "0", 2, "error: data.path (/data): not there\n"),
        ("8", "0", 2, f"error: {socket.gethostname()}: data.path (/data): not there\n"),
        ("1", "1", 0, ""),
        ("9", "1", 0, ""),
    ],
)
def test_a_setting_that_is_wrong_on_one_machine_is_said(
    rank: str,
    local_rank: str,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(SystemExit) as ended, said_in_lines():
        raise ConfigError(["data.path (/data): not there"])
    assert (ended.value.code, capsys.readouterr().err) == (status, said)


def _check_shared(rank: int, folders: list[str], writes: bool) -> tuple[Any, list[str]]:
    """Each rank is a machine with this folder as the run's."""
    shared_folder.PATIENCE_S = 0.0
    config = load_config([f"run_dir={folders[rank]}", "data.path="])
    status = own_status(rank=rank, num_ranks=len(folders), limit_s=600)
    folder = Path(config.run_dir) / STATUS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if writes:
        Pulse(folder, status)
    torch.distributed.barrier()
    return _as_a_machine(rank, lambda: shared_folder.check_shared(config))


def _as_a_machine(rank: int, check: Callable[[], None]) -> tuple[Any, list[str]]:
    """Return the status with which a check ends this rank, the only one of its machine, and why."""
    said: list[str] = []
    launch.logger.error = lambda *words: said.append(words[0] % words[1:])  # type: ignore
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    try:
        check()
    except SystemExit as ended:
        return ended.code, said
    finally:
        os.environ.update(LOCAL_RANK=str(rank))
        del os.environ["LOCAL_WORLD_SIZE"], launch.logger.error
    return None, said


def test_a_run_directory_that_machines_do_not_share_ends_all_ranks(tmp_path: Path) -> None:
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert run_ranks(_check_shared, 2, [one, one], True) == [(None, []), (None, [])]
    (status, said), others = run_ranks(_check_shared, 2, [one, two], True)
    assert (status, others) == (2, (2, []))
    host = socket.gethostname()
    assert said == [
        f"error: run_dir ({two}): host {host} does not see what rank 0, on host {host}, writes "
        "there: all machines must share its file system"
    ]
    # A full disk says something else.
    assert run_ranks(_check_shared, 2, [str(tmp_path / "full")] * 2, False) == [(None, [])] * 2


def _check_same(rank: int, folders: list[str], names: list[str]) -> tuple[Any, list[str]]:
    """Each rank is a machine with these files of data, in a folder of its own."""
    with chdir(folders[rank]):
        return _as_a_machine(rank, lambda: shared_folder.check_same("data.path (text)", names))


def test_data_that_differ_between_machines_end_all_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "same.bin").write_bytes(bytes(5 << 20))
        (folder / "other.bin").write_bytes(bytes(4 << 20) + bytes([number]))
        (folder / "short.bin").write_bytes(bytes(number))
    (folders[0] / "lost.bin").touch()
    given = [str(folder) for folder in folders]
    assert run_ranks(_check_same, 2, given, ["same.bin", "nowhere.bin"]) == [(None, [])] * 2
    for name, here, there in (
        ("other.bin", r"4,194,305 bytes, checksum of its ends \w+", r"4,194,305 bytes, .*"),
        ("short.bin", "0 bytes, .*", "1 bytes, .*"),
        ("lost.bin", "0 bytes, .*", "No such file or directory"),
    ):
        (status, (said,)), others = run_ranks(_check_same, 2, given, ["same.bin", name])
        assert (status, others) == (2, (2, []))
        host = re.escape(socket.gethostname())
        assert re.fullmatch(
            rf"error: data.path \(text\): {name} differs between host {host} \({here}\) and host "
            rf"{host} \({there}\): all machines must have the same data",
            said,
        )


# Addresses


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses of names, one for each time that they are asked for; the last one stays."""
    known: dict[str, list[str]] = {}
    real: Callable[..., Any] = socket.getaddrinfo

    def look_up(host: str, *rest: Any, **more: Any) -> Any:
        found = known.get(host, [host])
        address = found.pop(0) if len(found) > 1 else found[0]
        if not address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(address, *rest, **more)

    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(addresses, "_RETRY_S", 0.0)
    return known


def test_a_name_may_come_to_be_known_later(
    names: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    names["train-0.train"] = ["", "", "127.0.0.1"]
    assert addresses.own_address_towards("train-0.train", 29500) == "127.0.0.1"
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for an address of train-0.train: Name or service not known"
    ]


def test_a_name_that_nobody_knows_is_one_line(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names["frist"] = [""]
    monkeypatch.setattr(addresses, "JOIN_TIMEOUT", rendezvous.JOIN_TIMEOUT * 0)
    with pytest.raises(RendezvousConnectionError) as refused:
        machine("frist", 29500)
    assert str(refused.value) == (
        "the machines cannot meet at frist:29500 (MASTER_ADDR:MASTER_PORT): Name or service not "
        "known"
    )


def test_a_name_that_is_loopback_here_is_no_place_to_meet(names: dict[str, list[str]]) -> None:
    names["node1"] = ["127.0.1.1"]
    port = free_port()
    with pytest.raises(RendezvousError) as refused:
        machine("node1", port)
    assert str(refused.value) == (
        "MASTER_ADDR (node1) is 127.0.1.1 on this machine, where no other reaches it (see "
        "/etc/hosts): set MASTER_ADDR, on all machines, to an address that they reach"
    )
    for host in ("127.0.0.1", "localhost"):  # For machines that are one.
        machine(host, free_port())


def test_the_first_machine_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT", rendezvous.JOIN_TIMEOUT / 6000)

    def elsewhere(host: str, port: int) -> TCPStore:
        raise OSError(rendezvous.errno.EADDRNOTAVAIL, "not an address of this machine")

    monkeypatch.setattr(rendezvous, "_listening_store", elsewhere)
    port = free_port()
    with pytest.raises(RendezvousConnectionError) as refused:
        machine("127.0.0.1", port)
    assert str(refused.value).startswith(
        f"the machines cannot meet at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT): no agent "
        "answers: is the run started there"
    )


def test_another_program_at_the_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and never says a word."""
    monkeypatch.setattr(rendezvous, "_ANSWER_TIMEOUT", rendezvous._ANSWER_TIMEOUT / 600)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(RendezvousConnectionError) as refused:
        machine("127.0.0.1", int(listener.getsockname()[1]))
    assert "another program of this machine has the port" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "1"}, "lo"),
        ({"LOCAL_WORLD_SIZE": "2"}, None),
        ({"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "ib0"}, "ib0"),
    ],
)
def test_gloo_takes_the_interface_that_leads_to_the_first_machine(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it takes that of the machine's own name, which may be loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    master = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (master | given).items():
        monkeypatch.setenv(name, value)
    launch._choose_interface()
    chosen = os.environ.pop("GLOO_SOCKET_IFNAME", None)
    assert chosen == expected


# Agents


def test_a_machine_learns_that_another_gave_up_and_not_that_it_is_done() -> None:
    port = free_port()
    first, second = machine("127.0.0.1", port), machine("127.0.0.1", port)
    first.shutdown()
    assert second.num_nodes_waiting() == 0
    first.give_up()
    # A store answers one agent before it has read what another has sent.
    first._store.wait([rendezvous._GAVE_UP])
    with pytest.raises(RendezvousClosedError, match=f"{socket.gethostname()} has ended the run"):
        second.num_nodes_waiting()
    with pytest.raises(RendezvousClosedError, match=f"{socket.gethostname()} has ended the run"):
        second.next_rendezvous()


def test_ranks_may_end_by_themselves_where_the_store_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine may have ended a little before."""

    def lost(self: BoundRendezvous) -> bool:
        raise RendezvousConnectionError("lost")

    one = machine("127.0.0.1", free_port())
    monkeypatch.setattr(BoundRendezvous, "is_closed", lost)
    assert one.num_nodes_waiting() == 0
    monkeypatch.setattr(rendezvous, "LOST_PATIENCE_S", 0.0)
    with pytest.raises(RendezvousConnectionError, match="lost"):
        one.num_nodes_waiting()


@pytest.mark.parametrize(
    ("statuses", "ends_with"), [([1], None), ([1, 2], 2), ([NO_RESTART], 1), ([-9], None)]
)
def test_what_would_come_again_is_not_started_again(
    statuses: list[int], ends_with: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = dict(enumerate(SimpleNamespace(exitcode=status) for status in statuses))
    result = RunResult(WorkerState.FAILED, failures=failures)  # type: ignore[arg-type]
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: result)
    agent = object.__new__(_Agent)
    if ends_with is None:
        assert agent._monitor_workers(SimpleNamespace()) is result  # type: ignore[arg-type]
        return
    with pytest.raises(SystemExit) as ended:
        agent._monitor_workers(SimpleNamespace())  # type: ignore[arg-type]
    assert ended.value.code == ends_with


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")
def test_a_wrong_setting_on_one_machine_ends_the_agents_of_all(tmp_path: Path) -> None:
    """Ranks are shells: on the first machine they wait for ever, on the second they end with 2."""
    port = free_port()
    agent = [
        *("env", "-u", "OMP_NUM_THREADS"),
        *(sys.executable, "-m", "megatron_ext.trainer.ranks.agent", "--nnodes", "2"),
        *("--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "3"),
    ]
    says = "echo rank with $OMP_NUM_THREADS thread"
    waits = [*agent, "--no-python", "sh", "-c", f"{says}; exec sleep 1000"]
    fails = [*agent, "--no-python", "sh", "-c", f"{says}; exit 2"]
    with ExitStack() as stack:
        first = stack.enter_context(running(waits, tmp_path / "output", RDZV_SECRET=SECRET))
        first.wait_for(lambda: port in {each for _, each in listening([first.pid])}, "store")
        second = stack.enter_context(running(fails, tmp_path / "output", RDZV_SECRET=SECRET))
        assert second.status() == 2
        assert first.status() == 1
    assert "Traceback" not in first.output() + second.output()
    ended = f"error: {socket.gethostname()} has ended the run"
    assert first.output().splitlines()[-1].startswith(ended)
    for agent_of in (first, second):  # Not started again.
        assert agent_of.output().splitlines().count("rank with 1 thread") == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")
def test_signals_are_heeded_where_torch_waits_for_other_machines(tmp_path: Path) -> None:
    """Ranks are shells: on one machine they end well, on the other they note signals and go on."""
    port = free_port()
    agent = [
        *(sys.executable, "-m", "megatron_ext.trainer.ranks.agent", "--nnodes", "2"),
        *("--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--no-python", "sh", "-c"),
    ]
    with ExitStack() as stack:

        def start(rank: str) -> Program:
            command = [*agent, rank]
            return stack.enter_context(running(command, tmp_path / "output", RDZV_SECRET=SECRET))

        # Alone it waits for the others, and has no ranks.
        alone = start("exit 0")
        alone.wait_for(lambda: port in {each for _, each in listening([alone.pid])}, "store")
        os.kill(alone.pid, signal.SIGTERM)
        assert alone.status() == 143
        assert alone.output() == "ended at once by SIGTERM; nothing more was saved\n"

        done = start("echo a rank; exit 0")
        other = start("trap 'exit 7' TERM; while :; do sleep 0.1; done")
        done.wait_for_output("a rank")
        done.wait_for(lambda: not children(done.pid), "end of the rank")
        other.wait_for(lambda: children(other.pid), "rank")
        os.kill(other.pid, signal.SIGSTOP)
        asked_at = time.monotonic()
        os.kill(done.pid, signal.SIGTERM)
        assert done.status() == 0
        assert time.monotonic() - asked_at < 30  # torch's wait takes 300.
        assert done.output().splitlines()[1:] == [
            "SIGTERM: all ranks of this machine have ended well, and what they had to save is "
            "saved; other machines were not waited for"
        ]
        os.kill(other.pid, signal.SIGCONT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPUs")
def test_a_machine_without_gpus_must_know_its_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--nproc-per-node", "gpu", "-m", "megatron_ext.train"])
    assert refused.value.code == 2
    assert re.fullmatch("error: .*no GPU.*RANKS_PER_NODE .*\n", capsys.readouterr().err)
