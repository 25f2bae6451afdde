"""Two machines' agents on this machine, attacked by somebody who reaches their ports. Layer 2."""

from __future__ import annotations

import base64
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.registry import _create_c10d_handler

from megatron_ext.trainer.logs.rank_logs import rank_log
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.ranks.agent import main
from megatron_ext.trainer.ranks.processes import children
from megatron_ext.trainer.ranks.rendezvous import NAME, create_handler
from tests.processes import Program, listening, running
from tests.trainer.dataset import overrides
from tests.trainer.ranks.test_signals import ENDLESS, LOOPBACK

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")

FACTORIES = {NAME: create_handler, "c10d": _create_c10d_handler}
SECRET = "0123456789abcdef"
SHARED = "torch.rendezvous.none"
"""Where torch keeps what agents share, in a run without an id: stores list their names."""


CONTINUES = re.compile(r"continuing from .*/step_(\d+)")


class Crafted:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def saved(run_dir: Path) -> list[Path]:
    return list(run_dir.glob("checkpoints/step_*"))


def outputs(agents: list[Program]) -> str:
    return "".join(agent.output() for agent in agents)


@pytest.mark.slow
def test_two_machines(data: Path, tmp_path: Path) -> None:
    run_dir, port = tmp_path / "run", free_port()
    training = ["-m", "megatron_ext.train", *overrides(data, run_dir), *ENDLESS]
    command = [
        *("nohup", sys.executable, "-m", "megatron_ext.trainer.ranks.agent"),
        *("--max-restarts", "1"),
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *(*training, "checkpoint.every=10", "checkpoint.keep=2"),
    ]
    with ExitStack() as stack:
        agents: list[Program] = [
            stack.enter_context(running(command, tmp_path / "output", RDZV_SECRET=SECRET))
            for _ in range(2)
        ]
        agents[0].wait_for(lambda: read_metrics(run_dir), "first step")
        heard = [each for agent in agents for each in listening(agent.pids())]
        assert port in {each for _, each in heard}
        assert {address for address, _ in heard} <= LOOPBACK
        for _, each in heard:  # An address of this machine at which a store of torch's own answers.
            with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
                stranger.connect(("127.0.0.2", each))
        another = subprocess.run(
            [sys.executable, *training], capture_output=True, text=True, timeout=600
        )
        assert another.returncode == 2
        assert re.search(rf"error: run_dir \({run_dir}\): .*in use", another.stderr)

        agents[0].wait_for(lambda: saved(run_dir), "checkpoint")
        os.kill(children(agents[1].pid)[0], signal.SIGKILL)
        agents[0].wait_for(lambda: CONTINUES.search(outputs(agents)), "restart")
        said = CONTINUES.search(outputs(agents))
        assert said is not None
        assert "restart 1 of 1" in outputs(agents)
        agents[0].wait_for(lambda: len(read_metrics(run_dir)) > int(said[1]), "step after it")
        for agent in agents:  # What a lost terminal sends, and nohup has it ignored.
            os.kill(agent.pid, signal.SIGHUP)
        steps = len(read_metrics(run_dir))
        agents[0].wait_for(lambda: len(read_metrics(run_dir)) > steps + 1, "step without terminal")
        for agent in agents:
            os.kill(agent.pid, signal.SIGUSR1)
        for agent in agents:
            assert agent.status() == 138
            agent.wait_until_gone()
    last = len(read_metrics(run_dir))
    assert (run_dir / "checkpoints" / f"step_{last:08d}").is_dir()


ELASTIC_AGENT = """
from datetime import timedelta
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout
# How long machines that are enough wait for more.
RendezvousTimeout._DEFAULT_TIMEOUTS["last_call"] = timedelta(seconds=1)
from megatron_ext.trainer.ranks.agent import main
main()
"""


@pytest.mark.slow
def test_one_machine_goes_on_where_two_are_not_needed(data: Path, tmp_path: Path) -> None:
    """With NNODES=1:2, after all that runs on one of them is gone."""
    run_dir, port = tmp_path / "run", free_port()
    command = [
        *(sys.executable, "-c", ELASTIC_AGENT, "--max-restarts", "3", "--nnodes", "1:2"),
        *("--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("-m", "megatron_ext.train", *overrides(data, run_dir), *ENDLESS),
        *("parallel.ep_size=1", "checkpoint.every=5"),
    ]
    with ExitStack() as stack:
        agents: list[Program] = [
            stack.enter_context(running(command, tmp_path / "output", RDZV_SECRET=SECRET))
            for _ in range(2)
        ]

        def num_ranks() -> int:
            return sum(len(children(agent.pid)) for agent in agents)

        agents[0].wait_for(lambda: saved(run_dir) and num_ranks() == 2, "checkpoint of two")
        # Who holds the store has to stay: machines meet there.
        (left,) = (a for a in agents if port in {each for _, each in listening([a.pid])})
        (lost,) = (agent for agent in agents if agent is not left)
        os.killpg(lost.pid, signal.SIGKILL)
        left.wait_for(lambda: CONTINUES.search(left.output()), "start of one")
        said = CONTINUES.search(left.output())
        assert said is not None
        left.wait_for(lambda: len(read_metrics(run_dir)) > int(said[1]) + 1, "step of one")
        assert "rank 0 of 1 on host" in rank_log(run_dir, 0).read_text()
        os.kill(left.pid, signal.SIGUSR1)
        assert left.status() == 138


def attack(port: int, file: Path) -> None:
    """Replace what the agents share by what writes the file."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    assert SHARED in store.list_keys(), "the attack would meet nothing"
    assert not any(SECRET in name for name in store.list_keys())
    store.set(SHARED, base64.b64encode(pickle.dumps(Crafted(file))).decode())


@pytest.mark.parametrize("backend", [NAME, "c10d"])
def test_what_a_stranger_writes_is_executed_by_torch_alone(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDZV_SECRET", SECRET)
    port, executed = free_port(), tmp_path / "executed"
    params = RendezvousParameters(backend, f"127.0.0.1:{port}", "none", 1, 1, "127.0.0.1")
    handler = FACTORIES[backend](params)
    try:
        handler.next_rendezvous()
        attack(port, executed)
        refuses = pytest.raises(RendezvousStateError, match="was not written by this run")
        with refuses if backend == NAME else suppress(Exception):
            while not executed.exists():  # What was read is kept for a second.
                handler.num_nodes_waiting()
    finally:
        handler._stop_heartbeats()
    assert executed.exists() == (backend == "c10d")


def test_agents_without_a_secret_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RDZV_SECRET", raising=False)
    with pytest.raises(SystemExit) as refused:
        main(["-m", "megatron_ext.train"])
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith("error: RDZV_SECRET must be a secret")
