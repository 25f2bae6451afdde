"""A Slurm of two nodes, both of them this machine, as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NODES = ("127.0.0.1", "127.0.0.2")
"""Names of the nodes, which need no name service."""

_PATIENCE_S = 300
_CONFIG = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
# A job that is queued again waits as long, too; Slurm takes no less.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdTimeout=6
MessageTimeout=3
KillWait=2
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname=localhost Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName={nodes[1]} NodeHostname=localhost Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why there can be no cluster here; empty if there can be."""
    missing = [name for name in ("munged", "slurmctld", "slurmd") if not _program(name)]
    if missing:
        return f"{', '.join(missing)}: not installed (tests/run.sh installs Slurm as root)"
    return "" if os.getuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """A running Slurm.

    Args:
        folder: For all its files; a short path, since a socket is in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self._file = folder / "slurm.conf"
        self._file.write_text(_CONFIG.format(folder=folder, nodes=NODES, ports=_free_ports(3)))
        (folder / "state").mkdir()
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.environment = os.environ | {"SLURM_CONF": str(self._file)}
        files = {"key-file": key, "socket": folder / "munge.socket"}
        files |= {f"{kind}-file": folder / f"munged.{kind}" for kind in ("pid", "log", "seed")}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_for((folder / "munge.socket").exists, "munge")
        self._start("slurmctld", "-D")
        self._daemons = {node: self.start_node(node) for node in NODES}
        wait_for(lambda: self.ask("sinfo", "-ho", "%T") == "idle", "idle nodes")

    def start_node(self, node: str) -> subprocess.Popen[bytes]:
        """Start the daemon of a node, and return it."""
        return self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node and all that it started, as when its power fails."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        mine = f"SLURMD_NODENAME={node}"
        tasks = [pid for pid in self._pids() if mine in _environment(pid)]
        # A step's own process is a parent of its tasks, and nothing in it names the node.
        steps = {parent for pid in tasks if "slurmstepd" in _name(parent := _parent(pid))}
        for pid in [*steps, *tasks]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask(self, *command: str) -> str:
        """Return what a command of Slurm prints, nothing if it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def end(self) -> None:
        """Kill all that is left."""
        while pids := self._pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait()

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [_program(name) or name, *options]
            self._started.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            )
        return self._started[-1]

    def _pids(self) -> list[int]:
        """Return the processes that know this cluster, but this one."""
        mine = f"SLURM_CONF={self._file}"
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and mine in _environment(pid)]


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster that ends with the block, and leaves nothing."""
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        cluster = Cluster(folder)
        try:
            yield cluster
        except BaseException:
            for log in sorted(folder.glob("slurm*.log")):
                print(f"{log.name}:\n{log.read_text()[-4000:]}")
            raise
        finally:
            cluster.end()


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Return when the condition holds."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} in {_PATIENCE_S} s"
        time.sleep(0.1)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _environment(pid: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""
