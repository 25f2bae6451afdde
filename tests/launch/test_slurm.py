"""Trainings as jobs of a real Slurm, which loses one of its nodes. Layer 2."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_ext.trainer.logs.run_log import read_metrics
from tests.launch.cluster import NODES, Cluster, running_cluster, why_not
from tests.processes import running
from tests.steps import repeatable_steps
from tests.trainer.dataset import build, overrides

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("text"))


def words(command: str, data: Path, run_dir: Path, *more: str) -> list[str]:
    recipe = ["--config-dir", f"{ROOT}/recipes", "--config-name", "quickstart"]
    tiny = overrides(data, run_dir)
    return [sys.executable, "-m", "megatron_ext", command, *recipe, *tiny, *more]


def environment(cluster: Cluster) -> dict[str, str]:
    # A job runs with the Python that queued it, whatever was chosen for other uses of the scripts.
    return {"SLURM_CONF": cluster.environment["SLURM_CONF"], "VENV": "/nowhere"}


@pytest.fixture(autouse=True)
def _empty_queue(cluster: Cluster) -> Iterator[None]:
    """A test that fails leaves no job that others would wait for."""
    yield
    while jobs := cluster.ask("squeue", "-ho", "%A"):
        cluster.ask("scancel", *jobs.split())
        time.sleep(0.1)


def restarts(cluster: Cluster) -> int:
    """Return how often job 1 was started again; -1 while it does not run."""
    shown = cluster.ask("scontrol", "show", "job", "1", "--oneliner")
    fields = dict(field.split("=", 1) for field in shown.split() if "=" in field)
    return int(fields["Restarts"]) if fields.get("JobState") == "RUNNING" else -1


def end_soon(cluster: Cluster) -> None:
    """Give job 1 half a minute to a minute and a half more, by a limit in whole minutes."""
    *hours, minutes, seconds = map(int, cluster.ask("squeue", "-ho", "%M", "-j", "1").split(":"))
    limit = 60 * sum(hours) + minutes + (seconds + 30) // 60 + 1
    cluster.ask("scontrol", "update", "JobId=1", f"TimeLimit={limit}")


def test_a_job_survives_its_limit_and_a_lost_node(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """It is told of its time limit, then loses a node, and learns what it would have learned."""
    run_dir, whole = tmp_path / "a run", tmp_path / "whole"
    settings = ["steps=1000", "optimizer.decay=constant", "checkpoint.every=5"]
    on_both = ["--nodes", "2", "--cpu-ranks", "1", "--logs", str(tmp_path / "a folder")]

    def steps() -> int:
        return len(read_metrics(run_dir))

    limit = ["--time", "60", "--notice", "10"]
    job = words("submit", data, run_dir, *settings, *on_both, *limit)
    with running(job, tmp_path / "output", **environment(cluster)) as follower:
        follower.wait_for(steps, "first steps")
        # Slurm gives the notice. Half a minute is more than it is early.
        end_soon(cluster)
        follower.wait_for(lambda: restarts(cluster) >= 1, "second attempt")
        cluster.ask("scontrol", "update", "JobId=1", "TimeLimit=UNLIMITED")
        follower.wait_for_output("stopped by SIGUSR1 after step")
        follower.wait_for_output("job 1 asks to be queued again: it had notice")
        saved = steps()
        follower.wait_for(lambda: steps() > saved + 10, "steps after the notice")
        before = restarts(cluster)
        cluster.kill_node(NODES[1])
        follower.wait_for(lambda: restarts(cluster) != before, "notice of the loss")
        cluster.start_node(NODES[1])
        follower.wait_for(lambda: restarts(cluster) > before, "attempt after the loss")
        lost = steps()
        follower.wait_for(lambda: steps() > lost, "steps after the loss")
        cluster.ask("scontrol", "update", "JobId=1", "Requeue=0")
        cluster.ask("scancel", "--batch", "--signal=USR1", "1")
        assert follower.status() == 1
        assert follower.output().splitlines()[-1] == "job 1: FAILED"
    last = steps()
    array = words("submit", data, tmp_path, *settings, f"steps={last}", *on_both)
    array += [f"run_dir={whole}", "--task-per-rank", "--variants", "quota"]
    with running(array, tmp_path / "output", **environment(cluster)) as follower:
        assert follower.status() == 0, follower.output()
        assert f"quota | step {last}/{last}" in follower.output()
    assert last > saved
    assert repeatable_steps(run_dir) == repeatable_steps(whole)


def test_ways_to_balance_are_an_array(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    settings = ["steps=2", "optimizer.warmup_steps=1"]
    job = [word for word in words("submit", data, tmp_path / "run") if "steps=" not in word]
    job += [*settings, "--cpu-ranks", "2", "--logs", str(tmp_path), "--variants"]
    with running(
        [*job, "none,quota,ideal"], tmp_path / "output", **environment(cluster)
    ) as follower:
        assert follower.status() == 0, follower.output()
    for name in ("none", "quota", "ideal"):
        assert f"{name} | step 2/2" in follower.output()
        assert len(read_metrics(tmp_path / "run" / name)) == 2


def test_wrong_input_is_one_line_before_a_job(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    job = words("submit", data, tmp_path, "--cpu-ranks", "2", "--partition", "mian")
    with running(job, tmp_path / "output", **environment(cluster)) as command:
        assert command.status() == 2
    assert command.output() == (
        "megatron-ext submit: error: --partition (mian): the cluster has main; did you mean main?\n"
    )


def test_a_sweep_is_an_array_and_a_page(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "sweep"
    values = ["balance.slots=1,2", "steps=2", "optimizer.warmup_steps=1"]
    slurm = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=main"]
    swept = [word for word in words("train", data, run_dir) if "steps=" not in word]
    with running(
        [*swept, "--multirun", *values, *slurm], tmp_path / "output", **environment(cluster)
    ) as command:
        assert command.status() == 0, command.output()
    runs = {path.name: len(read_metrics(path)) for path in run_dir.glob("balance.*")}
    assert runs == {"balance.slots=1": 2, "balance.slots=2": 2}
    page = (run_dir / "report.html").read_text()
    assert all(name in page for name in ("slots 1", "slots 2", "balance.slots"))
    assert "ArrayTaskId=1" in cluster.ask("scontrol", "show", "job", "--oneliner")
