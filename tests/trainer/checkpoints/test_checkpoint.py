"""Checkpoints that were damaged, cannot be written, or are written beside the training.

Runs are compared exactly with one that was never disturbed. Ranks are kept processes (layer 2);
what is killed is a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoints_tools import prepare_relayout, read_contents, verify
from checkpoints_tools.folder import find_damage
from megatron_ext.config import ConfigError
from megatron_ext.files.routes import read_routes
from megatron_ext.trainer.checkpoints.choice import find_checkpoint
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.data import open_data
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.model import build
from megatron_ext.trainer.ranks.launch import NO_RESTART
from megatron_ext.trainer.validate import validate
from tests.cli.command import run as run_command
from tests.processes import left_in_shared_memory, unused_shared_files
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides
from tests.trainer.test_run import _losses, _train

NEWEST, OLDER = "step_00000006", "step_00000004"


class Said(logging.Handler):
    """Keeps what this project's loggers say, from warnings on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _train_and_listen(rank: int, arguments: list[str]) -> tuple[list[str], int]:
    """Train; return the warnings and errors of this rank, and its exit status."""
    said, package = Said(), logging.getLogger("megatron_ext")
    package.addHandler(said)
    try:
        _train(rank, arguments)
    except SystemExit as stop:
        return said.lines, int(stop.code)
    finally:
        package.removeHandler(said)
    return said.lines, 0


# What happens to a file of the newest checkpoint, and what is said of it.


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip(file: Path) -> None:
    """Flip a bit every 2 kB, all over the file."""
    content = bytearray(file.read_bytes())
    for place in range(1000, len(content), 2000):
        content[place] ^= 1
    file.write_bytes(content)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _uncover(checksums: Path) -> None:
    """Take a shard's checksum away."""
    content = json.loads(checksums.read_text())
    del content["files"]["__1_0.distcp"]
    checksums.write_text(json.dumps(content))


def _reach_out(checksums: Path) -> None:
    content = checksums.read_text()
    checksums.write_text(content.replace("__1_0.distcp", "../../config.yaml"))


NO_CHECKSUM = "is not covered: checksums.json has no checksum of it"

DAMAGES = {
    "a cut shard": ("__1_0.distcp", _cut, r"__1_0\.distcp has \d+ bytes, not \d+"),
    "a lost shard": ("__1_0.distcp", Path.unlink, r"__1_0\.distcp is missing"),
    "a lost table": (".metadata", Path.unlink, r"\.metadata is missing"),
    "an empty table": (".metadata", _empty, r"\.metadata is empty"),
    "a lost kind": ("metadata.json", Path.unlink, r"metadata\.json is missing"),
    "a lost common state": ("common.pt", Path.unlink, r"common\.pt is missing"),
    "an empty run.json": ("run.json", _empty, r"run\.json is empty"),
    "a torn run.json": ("run.json", _cut, r"run\.json has \d+ bytes, not \d+"),
    "a lost run.json": ("run.json", Path.unlink, r"run\.json is missing"),
    "torn checksums": ("checksums.json", _cut, r"checksums\.json is no readable JSON: .*"),
    "no checksum of a shard": ("checksums.json", _uncover, rf"__1_0\.distcp {NO_CHECKSUM}"),
    "a foreign file": ("more.pt", lambda file: file.write_text("x"), rf"more\.pt {NO_CHECKSUM}"),
    "lost checksums": ("checksums.json", Path.unlink, r"checksums\.json is missing"),
    "a checksum of another folder's file": (
        "checksums.json",
        _reach_out,
        r"checksums\.json names a file outside of its folder: '\.\./\.\./config\.yaml'",
    ),
    "brackets in checksums": (
        "checksums.json",
        lambda file: file.write_text("[" * 100_000),
        r"checksums\.json is no readable JSON: .*",
    ),
    "empty checksums": ("checksums.json", _empty, r"checksums\.json is empty"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_before_ranks_start(
    damage: str, data: Path, stopped_run: Callable[[], Path]
) -> None:
    name, harm, problem = DAMAGES[damage]
    run_dir = stopped_run()
    newest = run_dir / "checkpoints" / NEWEST
    harm(newest / name)
    assert re.fullmatch(problem, find_damage(newest)[0]) or not (newest / "run.json").exists()
    settings = overrides(data, run_dir)
    validate(load_config(settings), num_ranks=2)  # There is an older one.
    refusal = rf"{newest} is damaged: {problem}; .*checkpoint\.fallback=true"
    with pytest.raises(ConfigError, match=refusal):
        validate(load_config([*settings, "checkpoint.fallback=false"]), num_ranks=2)
    harm(run_dir / "checkpoints" / OLDER / name)
    with pytest.raises(ConfigError, match=f"none .*{run_dir} .*{newest}: {problem};"):
        validate(load_config(settings), num_ranks=2)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_damage_without_checksums(name: str, stopped_run: Callable[[], Path]) -> None:
    """As Megatron-LM saves: by the table of contents."""
    folder = stopped_run() / "checkpoints" / NEWEST
    for ours in ("checksums.json", "run.json"):
        (folder / ours).unlink()
    assert find_damage(folder) == []
    _cut(folder / name)
    (problem,) = find_damage(folder)
    assert problem.startswith(name)


@pytest.mark.parametrize(
    ("name", "harm", "problem"),
    [
        ("__1_0.distcp", _cut, r"__1_0\.distcp has \d+ bytes, not \d+"),
        ("__0_0.distcp", _flip, r"__0_0\.distcp was changed: its checksum is another"),
        ("run.json", _empty, r"run\.json is empty"),
    ],
)
def test_a_run_continues_from_the_newest_whole_checkpoint(
    name: str,
    harm: Callable[[Path], None],
    problem: str,
    data: Path,
    saved_run: Path,
    stopped_run: Callable[[], Path],
) -> None:
    run_dir = stopped_run()
    folders = run_dir / "checkpoints"
    harm(folders / NEWEST / name)
    # The next one before the damaged one's step, or behind it.
    saved = 5 if name == "run.json" else 7
    saving = [f"checkpoint.every={saved}", "checkpoint.keep=3"]
    settings = [*overrides(data, run_dir), *saving, "steps=8"]
    ((lines, status), others) = run_ranks(_train_and_listen, 2, settings)
    assert (status, others) == (0, ([], 0))
    (line,) = lines
    assert re.fullmatch(
        f"warning: checkpoint {folders / NEWEST} is damaged: {problem}; continuing from "
        f"{folders / OLDER}",
        line,
    )
    assert _losses(run_dir) == _losses(saved_run)
    # The damaged one would be in the way when the run continues once more; and it takes no place
    # of the three that are kept.
    kept = [OLDER, f"step_{saved:08d}", "step_00000008"]
    assert sorted(path.name for path in folders.iterdir()) == kept


@pytest.mark.parametrize("where", ["", "checkpoints", f"checkpoints/{OLDER}"])
def test_a_run_that_is_loaded_means_its_newest(
    where: str, data: Path, stopped_run: Callable[[], Path], tmp_path: Path
) -> None:
    run_dir = stopped_run()
    load = f"checkpoint.load={run_dir / where}"
    found = find_checkpoint(load_config([*overrides(data, tmp_path / "run"), load]), {})
    assert found == run_dir / "checkpoints" / (OLDER if OLDER in where else NEWEST)


@pytest.mark.slow
def test_flipped_bits_are_refused_in_one_line(data: Path, stopped_run: Callable[[], Path]) -> None:
    """By the real command: only the ranks compare contents."""
    run_dir = stopped_run()
    newest = run_dir / "checkpoints" / NEWEST
    _flip(newest / "__0_0.distcp")
    command = [sys.executable, "-m", "megatron_ext.train", *overrides(data, run_dir)]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [*command, "checkpoint.fallback=false"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "checksum" in line]
    assert line.startswith(f"error: checkpoint {newest} is damaged: __0_0.distcp was changed")


def test_verify_says_which_files_were_changed(
    stopped_run: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stopped_run()
    newest = run_dir / "checkpoints" / NEWEST
    status, said, _ = run_command(capsys, "checkpoint", "verify", run_dir)
    assert status == 0
    assert said.startswith(f"{newest}: whole and unchanged (")
    for name in ("__0_0.distcp", "common.pt"):
        _flip(newest / name)
    status, said, _ = run_command(capsys, "checkpoint", "verify", run_dir)
    assert status == 1
    assert said.splitlines() == [
        f"{newest}: {name} was changed: its checksum is another"
        for name in ("__0_0.distcp", "common.pt")
    ]
    (newest / "__0_0.distcp").unlink()
    status, said, _ = run_command(capsys, "checkpoint", "verify", newest)
    assert (status, said) == (1, f"{newest}: __0_0.distcp is missing\n")
    older = run_dir / "checkpoints" / OLDER
    _uncover(older / "checksums.json")
    shard = older / "__1_0.distcp"
    good = shard.read_bytes()
    _flip(shard)
    status, said, _ = run_command(capsys, "checkpoint", "verify", older)
    assert (status, said) == (1, f"{older}: __1_0.distcp {NO_CHECKSUM}\n")
    shard.write_bytes(good)
    for ours in ("checksums.json", "run.json"):
        (older / ours).unlink()
    status, said, _ = run_command(capsys, "checkpoint", "verify", older)
    assert (status, said.partition(":")[2].partition(":")[0]) == (
        0,
        " of another program, without checksums",
    )


# Checkpoints that cannot be written.


def _train_without_room(rank: int, where: str, arguments: list[str]) -> tuple[list[str], int]:
    """Train; rank 1 cannot write its shard, or rank 0 not the table of contents."""
    from torch.distributed.checkpoint import FileSystemWriter

    from megatron_ext.trainer.checkpoints import writer

    places = {
        "shard": (1, writer, "_write_file"),
        "table": (0, FileSystemWriter, "finish"),
    }
    at_rank, owner, name = places[where]
    write = getattr(owner, name)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_without_room(*args: object) -> object:
        # Only around the writing: shared memory would not grow either. Of two files that are
        # written at once, the first to end fails.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, usual[1]))
        try:
            return write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)

    if rank == at_rank:
        setattr(owner, name, write_without_room)
    try:
        return _train_and_listen(rank, arguments)
    finally:
        setattr(owner, name, write)


@pytest.mark.parametrize(
    ("where", "settings", "file"),
    [
        ("shard", [], r"/__1_\d\.distcp"),
        ("table", [], ""),
        ("shard", ["checkpoint.asynchronous=true"], r"/__1_\d\.distcp"),
    ],
)
def test_training_goes_on_without_a_checkpoint_that_cannot_be_written(
    where: str, settings: list[str], file: str, data: Path, saved_run: Path, tmp_path: Path
) -> None:
    arguments = [*overrides(data, tmp_path), "checkpoint.every=4", *settings]
    ((lines, status), others) = run_ranks(_train_without_room, 2, where, arguments)
    assert (status, others) == (0, ([], 0))
    folder = tmp_path / "checkpoints"
    assert len(lines) == 2
    for step, line in zip((4, 8), lines, strict=True):
        assert re.fullmatch(
            f"warning: the checkpoint of step {step} was not saved: "
            rf"{folder}/\.step_0000000{step}\.unfinished{file}: File too large; "
            "training goes on without it",
            line,
        )
    assert list(folder.iterdir()) == []
    assert _losses(tmp_path) == _losses(saved_run)


def test_a_required_checkpoint_ends_the_run(data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), "checkpoint.every=4", "checkpoint.required=true"]
    ((lines, status), others) = run_ranks(_train_without_room, 2, "shard", arguments)
    assert (status, others) == (NO_RESTART, ([], NO_RESTART))
    (line,) = lines
    assert line.startswith("error: the checkpoint of step 4 was not saved: ")
    assert len(read_metrics(tmp_path)) == 4


def test_a_folder_that_cannot_be_made(data: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("precious")
    arguments = [*overrides(data, tmp_path), "checkpoint.every=4"]
    ((lines, status), others) = run_ranks(_train_and_listen, 2, arguments)
    assert (status, others) == (0, ([], 0))
    assert lines == [
        f"warning: the checkpoint of step {step} was not saved: "
        f"{tmp_path}/checkpoints/.step_0000000{step}.unfinished: Not a directory; "
        "training goes on without it"
        for step in (4, 8)
    ]


@pytest.mark.slow
def test_a_full_disk(data: Path, saved_run: Path, tmp_path: Path) -> None:
    """By the real command, on a disk with room for one checkpoint, and then on a read-only one."""
    mount = f"mount -t tmpfs -o size=1m,mode=755 tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    command = [sys.executable, "-m", "megatron_ext.train", *overrides(data, tmp_path)]
    saving = "checkpoint.every=4 checkpoint.keep=1"
    script = f"{mount} && {' '.join(command)} {saving} && ls -A {tmp_path}/checkpoints"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: the check")]
    assert re.fullmatch(
        f"warning: the checkpoint of step 8 was not saved: {tmp_path}/checkpoints has [\\d,]+ "
        r"bytes free, the checkpoint needs [\d,]+; training goes on without it",
        line,
    )
    assert done.stdout.split() == ["step_00000004"]


# Saving beside the training.


def _train_while_writing(rank: int, arguments: list[str]) -> list[int]:
    """Train; each file is written only after the next step, which the writer waits for.

    Returns:
        The steps that had been done when a file was written.
    """
    from megatron_ext.trainer.checkpoints import writer
    from megatron_ext.trainer.loop import Training

    done: list[int] = []
    stepped = threading.Condition()
    train_step, write_file = Training.train_step, writer._write_file

    def step(training: Training) -> dict[str, float]:
        metrics = train_step(training)
        with stepped:
            done.append(training.step)
            stepped.notify_all()
        return metrics

    def write(bucket: tuple[str, ...]) -> object:
        saved = int(re.findall(r"step_(\d+)", bucket[0])[-1])
        with stepped:
            assert stepped.wait_for(lambda: done[-1] > saved or saved == 8, timeout=60)
            written_after.append(done[-1])
        return write_file(bucket)

    written_after: list[int] = []
    Training.train_step, writer._write_file = step, write
    try:
        _train(rank, arguments)
    finally:
        Training.train_step, writer._write_file = train_step, write_file
    return written_after


def test_training_goes_on_while_a_checkpoint_is_written(
    data: Path, saved_run: Path, tmp_path: Path
) -> None:
    saving = ["checkpoint.every=2", "checkpoint.keep=3", "checkpoint.asynchronous=true"]
    arguments = [*overrides(data, tmp_path), *saving]
    for written_after in run_ranks(_train_while_writing, 2, arguments):
        # Two files a rank with Megatron-Core 0.16, one with 0.19.
        assert sorted(set(written_after)) == [3, 5, 7, 8]
    assert _losses(tmp_path) == _losses(saved_run)
    for step in (4, 6, 8):
        here, there = (run / "checkpoints" / f"step_0000000{step}" for run in (tmp_path, saved_run))
        assert verify(here).problems == []
        _assert_equal_tensors(here, there)
    # And a run continues from one exactly.
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000008")
    run_ranks(_train, 2, arguments)
    assert _losses(tmp_path) == _losses(saved_run)


def _train_saving_first(rank: int, arguments: list[str]) -> None:
    """Train, and save a checkpoint before the first step."""
    from megatron_ext.trainer.loop import Training

    train_step = Training.train_step

    def step(training: Training) -> dict[str, float]:
        if training.step == 0:
            training.checkpoints.save(0, 0, 0)
        return train_step(training)

    Training.train_step = step
    try:
        _train(rank, arguments)
    finally:
        Training.train_step = train_step


@pytest.mark.parametrize(
    ("distributed", "precision"), [("true", "fp32"), ("false", "fp32"), ("false", "bf16")]
)
def test_a_checkpoint_before_the_first_step(
    distributed: str, precision: str, data: Path, tmp_path: Path
) -> None:
    undisturbed, saving, later = (tmp_path / name for name in ("undisturbed", "saving", "later"))
    settings = [
        "steps=3",
        "checkpoint.every=2",
        "checkpoint.keep=3",
        f"model.precision={precision}",
    ]
    settings.append(f"parallel.distributed_optimizer={distributed}")
    run_ranks(_train, 2, [*overrides(data, undisturbed), *settings])
    run_ranks(_train_saving_first, 2, [*overrides(data, saving), *settings])
    assert _losses(saving) == _losses(undisturbed)
    first = Path("checkpoints") / "step_00000000"
    assert verify(saving / first).problems == []
    shutil.copytree(saving / first, later / first)
    run_ranks(_train, 2, [*overrides(data, later), *settings])
    assert _losses(later) == _losses(undisturbed)
    from_step_2 = [*overrides(data, tmp_path / "last"), *settings]
    load = f"checkpoint.load={later / 'checkpoints' / 'step_00000002'}"
    run_ranks(_train, 2, [*from_step_2, load])
    assert read_metrics(tmp_path / "last")[-1]["loss"] == _losses(undisturbed)[-1]


def test_a_run_with_another_batch_goes_on_in_the_data(data: Path, tmp_path: Path) -> None:
    settings = [
        *overrides(data, tmp_path),
        "parallel.ep_size=1",
        "checkpoint.every=1",
        "logging.trace_steps=1",
        "logging.route_samples=4",
    ]
    run_ranks(_train, 1, [*settings, "steps=2"])  # Two batches of 8 samples.
    config = load_config([*settings, "steps=3", "data.global_batch_size=4"])
    run_ranks(_train, 1, [*settings, "steps=3", "data.global_batch_size=4"])
    windows = build.dataset(config, open_data(config), "train").windows(range(16, 20))
    read = read_routes(tmp_path / "routes").token[-4 * 16 :]
    assert read.tolist() == windows[:, :-1].flatten().tolist()
    assert [line["tokens"] for line in read_metrics(tmp_path)] == [8 * 16, 16 * 16, 20 * 16]
    with pytest.raises(ConfigError, match=r"data\.micro_batch_size \(8\) must divide 20, the sam"):
        validate(load_config([*settings, "data.micro_batch_size=8"]), num_ranks=1)
    longer = ["steps=4", "data.global_batch_size=4", "data.sequence_length=32"]
    run_ranks(_train, 1, [*settings, *longer, "logging.trace_steps=0", "logging.route_samples=0"])
    assert read_metrics(tmp_path)[-1]["tokens"] == 20 * 16 + 4 * 32


def test_other_samples_and_another_model_are_said(data: Path, tmp_path: Path) -> None:
    settings = [*overrides(data, tmp_path), "parallel.ep_size=1", "checkpoint.every=1"]
    run_ranks(_train, 1, [*settings, "steps=1"])
    same = [*settings, "steps=2", "data.global_batch_size=4"]
    assert run_ranks(_train_and_listen, 1, same) == [([], 0)]
    other = ["seed=5", "data.micro_batch_size=1", "+data.weights.letters=1"]
    other += ["+megatron.moe_router_topk_scaling_factor=2.5"]
    ((said, status),) = run_ranks(_train_and_listen, 1, [*settings, "steps=3", *other])
    assert status == 0
    assert said[0].startswith(
        "warning: seed, data.micro_batch_size or data.mix_by, data.path, data.weights or "
        "data.validation_fraction, megatron.moe_router_topk_scaling_factor: other than until"
    )
    assert len(said) == 1


def test_data_of_another_vocabulary_are_refused(data: Path, tmp_path: Path) -> None:
    """The embedding would be cut, or filled up with zeros."""
    settings = [*overrides(data, tmp_path / "run"), "parallel.ep_size=1", "checkpoint.every=1"]
    run_ranks(_train, 1, [*settings, "steps=1"])
    shutil.copytree(data, tmp_path / "other")
    config = load_config([*settings, f"data.path={tmp_path / 'other'}"])
    manifest = tmp_path / "other" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"vocab_size": 384}))  # 257 are filled up to as many.
    validate(config, num_ranks=1)
    manifest.write_text(json.dumps(content | {"vocab_size": 385}))
    with pytest.raises(ConfigError, match=r"model\.vocab_size \(385\) must be 257, as in the"):
        validate(config, num_ranks=1)


def test_weights_that_the_model_lacks_are_refused(data: Path, tmp_path: Path) -> None:
    settings = [*overrides(data, tmp_path), "parallel.ep_size=1", "checkpoint.every=1"]
    run_ranks(_train, 1, [*settings, "steps=1", "+megatron.qk_layernorm=true"])
    ((said, status),) = run_ranks(_train_and_listen, 1, settings)
    assert status == NO_RESTART
    assert re.fullmatch(
        r"error: checkpoint .*: it has .*layernorm.*, which this run has not", said[0]
    )
    ((said, status),) = run_ranks(_train_and_listen, 1, [*settings, "+megatron.mtp_num_layers=1"])
    assert status == NO_RESTART
    assert re.fullmatch(r"error: checkpoint .*: it has no mtp\..*, which this run has", said[0])


def test_a_checkpoint_names_the_groups_among_which_routers_choose(
    data: Path, tmp_path: Path
) -> None:
    settings = [*overrides(data, tmp_path), "steps=1", "checkpoint.every=1", "parallel.ep_size=1"]
    groups = ["+megatron.moe_router_num_groups=2", "+megatron.moe_router_group_topk=1"]
    run_ranks(_train, 1, [*settings, *groups])
    with pytest.raises(ValueError, match="layer 1: its router chooses among 2 groups"):
        prepare_relayout(tmp_path, {1: np.array([0, 2, 1, 3])}, tmp_path / "parted")


def _assert_equal_tensors(first: Path, second: Path) -> None:
    tensors = [entry for entry in read_contents(first).entries if entry.shape is not None]
    assert len(tensors) > 20
    states = [
        {entry.key: torch.full(entry.shape, torch.nan) for entry in tensors} for _ in range(2)
    ]
    for state, folder in zip(states, (first, second), strict=True):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(states[0][entry.key], states[1][entry.key]) for entry in tensors)


ALONE = ["parallel.ep_size=1", "data.global_batch_size=2", "steps=6", "checkpoint.every=2"]

_RANK = """
import os, sys, threading
from megatron_ext.cpu_platform import enable_cpu_platform
enable_cpu_platform()
import torch.distributed as dist
from megatron_ext.trainer.checkpoints import writer
from megatron_ext.trainer.loop import Training
from megatron_ext.trainer.compose import load_config
store, stop_at, *arguments = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
write_file = writer._write_file
def write(bucket):
    if stop_at == "writing" and "step_00000004" in bucket[0]:
        os.write(1, b"stopped\\n")  # In one piece: two threads write.
        threading.Event().wait()
    return write_file(bucket)
writer._write_file = write
train_step = Training.train_step
def step(training):
    if stop_at == "saved" and training.step == 4:
        print("stopped", flush=True)
        threading.Event().wait()
    return train_step(training)
Training.train_step = step
Training(load_config(arguments)).run()
"""
"""One rank that stops after a save, or in one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_at", "settings", "kept"),
    [
        ("saved", [], ["step_00000002", "step_00000004"]),
        ("writing", ["checkpoint.asynchronous=true"], ["step_00000002"]),
    ],
)
def test_nothing_outlives_a_killed_rank(
    stop_at: str, settings: list[str], kept: list[str], data: Path, tmp_path: Path
) -> None:
    """Megatron's save starts a process for results that nobody ends, and processes that write."""
    run_dir = tmp_path / "run"
    arguments = [*overrides(data, run_dir), *ALONE, *settings]
    before = unused_shared_files()
    command = [sys.executable, "-c", _RANK, str(tmp_path / "store"), stop_at, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        assert rank.stderr is not None
        line = rank.stdout.readline()
        helpers = psutil.Process(rank.pid).children(recursive=True) if line else []
        rank.send_signal(signal.SIGKILL)
        assert line == "stopped\n", rank.stderr.read()
    _, alive = psutil.wait_procs(helpers, timeout=5)
    for helper in alive:
        helper.kill()
    assert alive == []
    assert left_in_shared_memory(before, patience_s=5) == []
    folders = run_dir / "checkpoints"
    assert sorted(path.name for path in folders.glob("step_*")) == kept
    # What it left is no checkpoint, and is gone after the next save.
    run_ranks(_train, 1, arguments)
    assert sorted(path.name for path in folders.iterdir()) == ["step_00000004", "step_00000006"]
    assert len(_losses(run_dir)) == 6
