"""What a run directory or checkpoint says is data: no command waits, writes or signals for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_ext.telemetry.heartbeat import DONE, Status, own_status, status_path
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.early import run_dir_problems
from tests.cli.command import run
from tests.run_folders import write_run

SECRET = "mine\n"


@pytest.fixture(autouse=True)
def _no_wait() -> Iterator[None]:
    """Let a test fail that waits for a pipe: it would wait for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder of this user, with a file, that a run directory leads to."""
    folder = tmp_path / "precious"
    folder.mkdir()
    (folder / "rank_00000.log").write_text(SECRET)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two ranks that is done, of which rank 0 has a log."""
    folder = write_run(tmp_path / "run", strategy="quota", steps=3)
    (folder / "status").mkdir()
    (folder / "logs").mkdir()
    (folder / "logs" / "rank_00000.log").write_text("2026-01-31T23:59:59.999Z fine\n")
    for rank in range(2):
        write_status(folder, own_status(rank=rank, num_ranks=2, limit_s=1.0), state=DONE)
    return folder


def write_status(run_dir: Path, status: Status, **changes: object) -> None:
    status = replace(status, **changes)  # type: ignore[arg-type]
    path = status_path(run_dir / "status", status.rank)
    path.write_text(json.dumps(asdict(status)))


def test_no_run_is_done_of_which_a_rank_says_nothing(run_dir, capsys):
    def verdict():
        status, out, _ = run(capsys, "doctor", "--run", run_dir)
        return status, out.splitlines()[-1]

    own = run_dir / "status" / "rank_00001.json"
    said = own.read_text()
    assert verdict() == (0, "done, at step 0")
    unknown = 1, "ended: no sign of ranks [1]: they have no status, or a damaged one"
    own.write_text(said[:-1])
    assert verdict() == unknown
    own.write_text(said.replace('"rank": 1', '"rank": 0'))  # Another rank's.
    assert verdict() == unknown
    own.unlink()
    assert verdict() == unknown
    os.mkfifo(own)
    assert verdict() == unknown


@pytest.mark.parametrize("name", ["logs", "logs/rank_00000.log"])
def test_logs_lead_nowhere(name, run_dir, precious, capsys):
    path = run_dir / name
    path.rename(run_dir / "aside")
    for make in os.mkfifo, lambda path: path.symlink_to(precious / path.name):
        make(path)
        status, out, error = run(capsys, "logs", run_dir)
        assert (status, out, error.count("\n")) == (2, "", 1)
        assert f"error: {path}: not a f" in error
        path.unlink()


def test_a_terminal_gets_no_commands(run_dir, capsys):
    said = b"2026-01-31T23:59:59.999Z \x1b]0;title\x07 \xc2\x9b31m\tred\n"
    (run_dir / "logs" / "rank_00000.log").write_bytes(said)
    _, out, _ = run(capsys, "logs", run_dir)
    assert out == "[rank 0] 2026-01-31T23:59:59.999Z \\x1b]0;title\\x07 \\x9b31m\tred\n"
    _, out, _ = run(capsys, "logs", run_dir, "--json")
    assert "\x1b" not in out


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[str]]:
    """A process that the signal for stacks would end, and that has some file open."""
    program = "import sys; kept = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, "/dev/null"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_no_process_is_signalled_that_a_status_names(run_dir, bystander, capsys):
    started = int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19])
    write_status(
        run_dir, own_status(rank=0, num_ranks=2, limit_s=1.0), pid=bystander.pid, started=started
    )
    stacks = run_dir / "status" / "rank_00000.stacks"
    for make in (
        lambda: None,
        stacks.touch,
        lambda: stacks.symlink_to("/dev/null"),  # A file that it has open.
    ):
        stacks.unlink(missing_ok=True)
        make()
        _, out, _ = run(capsys, "doctor", "--run", run_dir, "--stacks", "--json")
        row = json.loads(out)["ranks"][0]
        assert (row["process"], row["stacks"][:9]) == ("runs", "not asked")
    bystander.communicate("", timeout=60)
    assert bystander.returncode == 0 != -signal.SIGUSR2


def test_a_report_of_another_users_run_is_not_put_there(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_ext.files.opening.is_ours", lambda folder: False)
    before = sorted(run_dir.rglob("*"))
    status, out, _ = run(capsys, "report", run_dir)
    assert status == 0
    assert out.endswith("No page, as the run is another user's: --out PAGE.html writes one\n")
    assert sorted(run_dir.rglob("*")) == before
    assert run(capsys, "report", run_dir, "--out", tmp_path / "page.html")[0] == 0


@pytest.mark.parametrize("name", ["checksums.json", "metadata.json", ".metadata", "run.json"])
@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_checkpoint_of_pipes_is_not_waited_for(command, name, tmp_path, capsys):
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / ".metadata").write_bytes(b"damaged")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    status, out, error = run(capsys, "checkpoint", command, folder)
    assert status in (1, 2)
    assert (out + error).count("\n") == 1


@pytest.mark.parametrize(
    "name",
    [
        *(".lock", "metrics.jsonl", ".metrics.jsonl.partial", "config.yaml", "report.html"),
        *("logs", "status", "checkpoints", "trace", "wandb", "tensorboard"),
        *("logs/rank_00000.log", "logs/rank_00001.log"),
    ],
)
def test_no_run_begins_where_a_name_leads_elsewhere(name, precious, tmp_path):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(precious / "rank_00000.log" if "." in name else precious)
    config = load_config([f"run_dir={folder}", "data.path=nowhere"])
    (problem,) = run_dir_problems(config, begins=True)
    assert problem.startswith(f"run_dir ({folder}): {folder / name}")
    assert "a link" in problem
    assert "\n" not in problem
    assert os.listdir(precious) == ["rank_00000.log"]
    assert (precious / "rank_00000.log").read_text() == SECRET


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "layers.jsonl", "logs/rank_00000.log"])
def test_no_run_waits_for_a_pipe(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    (problem,) = run_dir_problems(
        load_config([f"run_dir={tmp_path}", "data.path=nowhere"]), begins=True
    )
    assert problem == f"run_dir ({tmp_path}): {tmp_path / name}: not a file but a pipe"
