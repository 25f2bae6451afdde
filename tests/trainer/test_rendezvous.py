"""Two machines' agents on this machine, attacked by somebody who reaches their ports. Layer 2."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from megatron_ext.trainer.run_log import read_metrics
from tests.processes import Program, listening, running
from tests.trainer.dataset import overrides
from tests.trainer.test_signals import ENDLESS, LOOPBACK

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")

SECRET = "0123456789abcdef"


class Crafted:
    """Writes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def attack(port: int, file: Path) -> str:
    """Replace what the agents share by what writes the file; return the name under which it is."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    names = store.list_keys()
    assert not any(SECRET in name for name in names)
    (shared,) = [name for name in names if "torch.rendezvous." in name]
    # The name in the store, without the mark that the client puts before each.
    store.set(shared.removeprefix("/"), base64.b64encode(pickle.dumps(Crafted(file))).decode())
    return shared


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_two_machines(data: Path, tmp_path: Path) -> None:
    run_dir, port, evil = tmp_path / "run", free_port(), tmp_path / "executed"
    command = [
        *(sys.executable, "-m", "megatron_ext.trainer.agent"),
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("-m", "megatron_ext.train", *overrides(data, run_dir), *ENDLESS),
        "checkpoint.every=900000",
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

        attack(port, evil)
        for agent in agents:
            agent.wait_for_output("was not written by this run")
        for agent in agents:
            os.kill(agent.pid, signal.SIGUSR1)
        for agent in agents:
            assert agent.status() == 138
            agent.wait_until_gone()
    assert not evil.exists()
    last = len(read_metrics(run_dir))
    assert (run_dir / "checkpoints" / f"step_{last:08d}").is_dir()
