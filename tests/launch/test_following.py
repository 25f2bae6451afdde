"""What `submit` asks Slurm, with stand-ins for Slurm's commands. Layer 1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ext.cli import slurm
from megatron_ext.files.opening import MOST_BYTES

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
NO_ANSWER = "echo 'Unable to contact slurm controller' >&2; exit 1"
UNSAVED = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands of Slurm, the only ones of this process."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slurm, "_POLL_S", 0.0)
    return tmp_path


def answer(folder: Path, command: str, *answers: str) -> None:
    """Let a command do this: one each time, in the end the last."""
    cases = [f"{number}) {each} ;;" for number, each in enumerate(answers[:-1])]
    lines = [
        "#!/bin/sh",
        f"asked={folder}/{command}.asked",
        "times=0",
        "! [ -e $asked ] || read times <$asked",
        "echo $((times + 1)) >$asked",
        "case $times in",
        *cases,
        f"*) {answers[-1]} ;;",
        "esac",
    ]
    (folder / command).write_text("\n".join(lines) + "\n")
    (folder / command).chmod(0o755)


def test_a_job_is_followed_though_slurm_does_not_answer(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said once for each time in a row, and the log is read all the while."""
    log = cluster / "log"
    answer(cluster, "squeue", "echo 7", *[f"echo step >>{log}; {NO_ANSWER}"] * 2, "echo 7", ":")
    answer(cluster, "scontrol", NO_ANSWER, "echo JobId=7 JobState=COMPLETED")
    assert slurm.follow("7", {"": log})
    again = "Unable to contact slurm controller; job 7 goes on, and Slurm is asked again"
    assert capsys.readouterr().out.splitlines() == [
        again,
        "step",
        "step",
        again,
        "job 7: COMPLETED",
    ]


def test_what_a_log_says_does_not_command_a_terminal_or_end_the_following(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters are written out; of a line without end no more is read."""
    good, endless = cluster / "good", cluster / "endless"
    good.write_bytes(b"\x1b[2Jone\n\ntwo\ntorn")
    endless.write_bytes(b"first\n")
    os.truncate(endless, MOST_BYTES + 100)
    answer(cluster, "squeue", "echo 7", ":")
    answer(cluster, "scontrol", "echo JobId=7 JobState=COMPLETED")
    assert slurm.follow("7", {"e | ": endless, "g | ": good})
    assert capsys.readouterr().out.splitlines() == [
        "e | first",
        f"{endless}: a line of more than 67,108,864 bytes; this log is followed no more",
        r"g | \x1b[2Jone",
        "g | ",
        "g | two",
        "job 7: COMPLETED",
    ]


@pytest.mark.parametrize(
    ("accounting", "status", "said"),
    [
        ("echo '7_0|COMPLETED'; echo '7_1|COMPLETED'", True, "COMPLETED"),
        ("echo '7_0|COMPLETED'; echo '7_1|CANCELLED by 0'", False, "CANCELLED, COMPLETED"),
        (UNSAVED, False, "its end is not known, for Slurm has forgotten the job: see its log"),
    ],
)
def test_of_a_job_that_slurm_has_forgotten_its_accounts_say_the_end(
    cluster: Path,
    capsys: pytest.CaptureFixture[str],
    accounting: str,
    status: bool,
    said: str,
) -> None:
    answer(cluster, "squeue", FORGOTTEN)
    answer(cluster, "scontrol", FORGOTTEN)
    answer(cluster, "sacct", accounting)
    assert slurm.follow("7", {}) is status
    assert capsys.readouterr().out == f"job 7: {said}\n"


def test_an_arrays_task_that_slurm_forgets_before_others_end_has_its_end(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(cluster, "squeue", "echo 7_1", "echo 7_1", ":")
    failed, waits = "echo JobId=8 JobState=FAILED", "echo JobId=7 JobState=PENDING"
    answer(cluster, "scontrol", f"{failed}; {waits}", "echo JobId=7 JobState=COMPLETED")
    assert not slurm.follow("7", {f"{name} | ": cluster / name for name in ("none", "quota")})
    assert capsys.readouterr().out == "job 7: COMPLETED, FAILED\n"


def test_a_job_that_is_queued_inside_another_gets_nothing_of_it(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm takes such variables for options of the new job's steps."""
    given = {"SLURM_CPU_BIND": "map_cpu:0", "SRUN_CPUS_PER_TASK": "1", "SLURM_CONF": "a", "B": "b"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    answer(cluster, "sbatch", 'echo "$SLURM_CPU_BIND $SRUN_CPUS_PER_TASK $SLURM_CONF $B"')
    assert slurm.queue("#!/bin/sh\n") == "a b"


def test_a_hidden_partition_is_known(cluster: Path) -> None:
    answer(cluster, "sinfo", 'echo main; case "$*" in *--all*) echo hidden ;; esac')
    slurm.check_partitions("main,hidden")
    with pytest.raises(ValueError, match=r"--partition \(hiden\): .*hidden, main; did you mean"):
        slurm.check_partitions("hiden")
