"""`launch/slurm.sbatch` and `launch/train.sh` among stand-ins for what they call. Layer 1."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USUAL = {
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >requeue; fi',
    "hostname": "echo 127.0.0.2 10.0.1.1",
    "srun": 'printf "%s\\n" "$MASTER_ADDR" "$@" >given',
    "nvidia-smi": "exit 1",
}
"""What the programs of a Slurm do; `srun` writes down what it is given.

All addresses are this machine's, where a port that nobody has refuses at once.
"""


def run_script(
    folder: Path, name: str, *words: str, programs: dict[str, str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of `launch/` where programs do this, and know its process id as SCRIPT.

    An environment of its own.
    """
    for program, body in programs.items():
        (folder / program).write_text(f"#!/bin/sh\n{body}\n")
        (folder / program).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", 'SCRIPT=$$ exec bash "$@"', "sh", str(ROOT / "launch" / name), *words],
        cwd=folder,
        env={"PATH": path, "VENV": str(folder / "none"), **environment},
        text=True,
        capture_output=True,
        timeout=60,
    )


def job(
    folder: Path, *, settings: dict[str, str] | None = None, **programs: str
) -> subprocess.CompletedProcess[str]:
    """Run the job's script."""
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_SUBMIT_DIR": str(ROOT), **(settings or {})}
    return run_script(folder, "slurm.sbatch", programs=USUAL | programs, **slurm)


@pytest.mark.parametrize(
    ("nodes", "found", "given", "expected"),
    [
        ("localhost", "10.0.0.1", "", "localhost"),
        ("localhost", "127.0.1.1", "", "127.0.0.2"),
        ("localhost", "::1", "", "127.0.0.2"),
        ("127.0.0.1", "127.0.0.1", "", "127.0.0.1"),
        ("localhost", "127.0.1.1", "127.0.0.3", "127.0.0.3"),
    ],
)
def test_machines_do_not_meet_at_a_name_that_is_loopback(
    nodes: str, found: str, given: str, expected: str, tmp_path: Path
) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for a machine's own name."""
    programs = {"scontrol": f"echo {nodes}", "getent": f"echo {found} STREAM {nodes}"}
    job(tmp_path, settings={"MASTER_ADDR": given}, **programs)
    address, *flags = (tmp_path / "given").read_text().splitlines()
    assert address == expected
    # At a site where jobs get no environment; and nobody holds machines for one that failed.
    assert flags[:2] == ["--export=ALL", "--wait=300"]


TAKES_THE_NOTICE = """
case "$*" in *train.sh*)
    trap 'exit {status}' USR1
    kill -USR1 "$SCRIPT"
    while :; do sleep 0.05; done ;;
esac
"""
ENDS_IN_THE_MOMENT_OF_THE_NOTICE = """
case "$*" in *train.sh*)
    trap '' USR1
    sleep 0.05
    kill -STOP "$SCRIPT"
    (sleep 0.05; kill -USR1 "$SCRIPT"; kill -CONT "$SCRIPT") >/dev/null 2>&1 &
    exit {status} ;;
esac
"""
"""The script waits, and learns of both at once, as on a busy machine."""


@pytest.mark.parametrize("task", [TAKES_THE_NOTICE, ENDS_IN_THE_MOMENT_OF_THE_NOTICE])
@pytest.mark.parametrize(("status", "again"), [(138, True), (1, False), (0, False)])
def test_a_job_that_failed_after_its_notice_does_not_begin_again(
    task: str, status: int, again: bool, tmp_path: Path
) -> None:
    done = job(tmp_path, srun=task.format(status=status))
    assert done.returncode == status
    assert (tmp_path / "requeue").exists() == again
    assert done.stdout == "job 7 asks to be queued again: it had notice of its time limit\n" * again
    assert done.stderr == ""


@pytest.mark.parametrize("is_its_limit", [False, True])
def test_a_job_that_slurm_ends_begins_again_at_its_limit_only(
    is_its_limit: bool, tmp_path: Path
) -> None:
    """Slurm tells the script and its tasks, and starts nothing more for a job that is cancelled."""
    notice = 'trap "" USR1; kill -USR1 "$SCRIPT";' * is_its_limit
    ends = f'{notice} kill -TERM "$SCRIPT"; sleep 0.1; exit 143'
    done = job(tmp_path, srun=f'case "$*" in *train.sh*) {ends} ;; *) exit 1 ;; esac')
    assert done.returncode == 143
    assert (tmp_path / "requeue").exists() == is_its_limit
    assert done.stderr == ""


def test_a_notice_before_the_step_is_not_lost(tmp_path: Path) -> None:
    noticing = f'kill -USR1 "$SCRIPT"; {USUAL["scontrol"]}'
    done = job(tmp_path, scontrol=noticing, srun='case "$*" in *train.sh*) exec sleep 60 ;; esac')
    assert done.returncode == 138
    assert (tmp_path / "requeue").exists()


def test_a_rank_that_slurm_starts_knows_its_number(tmp_path: Path) -> None:
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    tasks |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    programs = {"nvidia-smi": "exit 1", "python": "exec env"}
    done = run_script(tmp_path, "train.sh", programs=programs, **tasks)
    environment = dict(line.split("=", 1) for line in done.stdout.splitlines())
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert expected.items() <= environment.items(), done.stderr


@pytest.mark.parametrize(
    ("says", "threads", "queues"),
    [("9.0", "4", "1"), ("10.3", "4", "32"), ("No devices were found", None, None)],
)
def test_ranks_on_gpus_have_an_environment(
    says: str, threads: str | None, queues: str | None, tmp_path: Path
) -> None:
    programs = {"nvidia-smi": f"echo '{says}'", "python": "exec env"}
    done = run_script(tmp_path, "train.sh", programs=programs)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    names = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")
    assert tuple(map(found.get, names)) == (threads, queues), done.stderr


@pytest.mark.parametrize(
    ("word", "status", "said"),
    [
        ("--dry-run", 0, "-m megatron_ext train --dry-run\n"),
        ("--print", 0, "-m megatron_ext train --print\n"),
        ("--multirun", 2, "error: --multirun makes runs of one machine each"),
        ("-m", 2, "error: -m makes runs of one machine each"),
    ],
)
def test_words_that_start_no_ranks_on_several_machines(
    word: str, status: int, said: str, tmp_path: Path
) -> None:
    programs = {"nvidia-smi": "exit 1", "python": 'echo "$@"'}
    done = run_script(tmp_path, "train.sh", word, programs=programs, NNODES="2")
    assert done.returncode == status
    assert (done.stdout + done.stderr).startswith(said)
