"""A run's trace: every load of a step once, whole files only, nothing from beyond a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.files.loads import Loads, read_loads, write_loads
from megatron_ext.telemetry import step_files
from megatron_ext.telemetry.recorder import Computed
from megatron_ext.telemetry.step_files import StepFiles
from megatron_ext.telemetry.trace import TraceWriter
from megatron_ext.trainer.logs.run_log import read_metrics
from tests import workloads
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides
from tests.trainer.test_run import _train

LAYERS = (2, 4)
MICROBATCHES = 3


def computed(layer: int, load: torch.Tensor, predicted: torch.Tensor | None = None) -> Computed:
    no_slots = load.new_empty(len(load), 0)
    return Computed(layer, load, home_loads(load), no_slots, predicted=predicted)


def loads_of(step: int) -> list[Computed]:
    """Two layers, interleaved as a pipeline schedule would; each load is another one."""
    return [
        computed(layer, workloads.zipf(2, 4, 50, 1.0, seed=100 * step + 10 * layer + microbatch))
        for microbatch in range(MICROBATCHES)
        for layer in reversed(LAYERS)
    ]


def writer(
    run_dir: Path, start_step: int = 0, steps_per_file: int = 2, pp_rank: int = 0, pp_size: int = 1
):
    files = StepFiles(
        run_dir / "trace", steps_per_file=steps_per_file, pp_rank=pp_rank, pp_size=pp_size
    )
    return TraceWriter(files, start_step=start_step)


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "trace").iterdir())


def check(loads: Loads, steps: list[int]) -> None:
    """Every load of these steps is there, in the order of step, microbatch and layer."""
    by_layer = [sorted(loads_of(step), key=lambda one: one.layer_number) for step in steps]
    keys = [(s, m, layer) for s in steps for m in range(MICROBATCHES) for layer in LAYERS]
    assert list(zip(*(values.tolist() for values in loads.trace.values()), strict=True)) == keys
    half = MICROBATCHES
    expected = [
        step_loads[place * half + microbatch].load
        for step_loads in by_layer
        for microbatch in range(MICROBATCHES)
        for place in range(len(LAYERS))
    ]
    assert torch.equal(loads.load, torch.stack(expected))


def test_every_load_once_in_order(tmp_path):
    trace = writer(tmp_path)
    for step in range(1, 6):
        trace.write(step, loads_of(step))
    trace.close()
    assert names(tmp_path) == [f"step_0000000{step}_stage_0.npz" for step in (2, 4, 5)]
    check(read_loads(tmp_path / "trace"), [1, 2, 3, 4, 5])


def test_stages_come_together(tmp_path):
    for stage in (1, 0):
        write_stage(tmp_path, stage, steps=(1, 2))
    check(read_loads(tmp_path / "trace"), [1, 2])


def write_stage(run_dir: Path, stage: int, steps: Sequence[int]) -> None:
    trace = writer(run_dir, pp_rank=stage, pp_size=2)
    for step in steps:
        trace.write(step, [one for one in loads_of(step) if one.layer_number == LAYERS[stage]])
    trace.close()


def test_a_run_goes_on_with_fewer_stages(tmp_path):
    for stage in (0, 1):
        write_stage(tmp_path, stage, steps=(1, 2, 3, 4))
    continued = writer(tmp_path, start_step=3)
    check(read_loads(tmp_path / "trace"), [1, 2, 3])
    for step in (4, 5):
        continued.write(step, loads_of(step))
    continued.close()
    check(read_loads(tmp_path / "trace"), [1, 2, 3, 4, 5])


def test_a_stage_leaves_the_files_of_others_alone(tmp_path):
    for stage in (0, 1):
        write_stage(tmp_path, stage, steps=(1, 2))
    before = names(tmp_path)
    writer(tmp_path, pp_rank=1, pp_size=2)
    assert names(tmp_path) == before[:1]


def test_a_killed_run_leaves_whole_files_and_is_continued(tmp_path):
    killed = writer(tmp_path)
    for step in range(1, 6):
        killed.write(step, loads_of(step))
    killed._files.close()  # Step 5 is lost.
    (tmp_path / "trace" / ".step_00000006_stage_0.npz.1.partial").write_bytes(b"cut")
    check(read_loads(tmp_path / "trace"), [1, 2, 3, 4])
    continued = writer(tmp_path, start_step=3)
    assert names(tmp_path) == ["step_00000002_stage_0.npz", "step_00000003_stage_0.npz"]
    for step in (4, 5):
        continued.write(step, loads_of(step))
    continued.close()
    check(read_loads(tmp_path / "trace"), [1, 2, 3, 4, 5])


def test_memory_is_bounded(tmp_path, monkeypatch):
    one_step = sum(one.load.nbytes for one in loads_of(1))
    monkeypatch.setattr(step_files, "_MOST_BYTES", 2 * one_step)
    trace = writer(tmp_path, steps_per_file=1000)
    for step in range(1, 8):
        trace.write(step, loads_of(step))
        assert len(trace._loads) <= 2 * len(loads_of(1))
    trace.close()
    check(read_loads(tmp_path / "trace"), list(range(1, 8)))


def test_a_file_that_cannot_be_written_is_left_out(tmp_path, caplog):
    trace = writer(tmp_path, steps_per_file=1)
    trace.write(1, loads_of(1))
    trace.flush()
    (tmp_path / "trace").rename(tmp_path / "kept")
    (tmp_path / "trace").write_text("no folder")
    trace.write(2, loads_of(2))
    trace.flush()
    (tmp_path / "trace").unlink()
    (tmp_path / "kept").rename(tmp_path / "trace")
    trace.write(3, loads_of(3))
    trace.close()
    (line,) = [each.getMessage() for each in caplog.records]
    assert "step_00000002_stage_0.npz is left out: " in line
    check(read_loads(tmp_path / "trace"), [1, 3])


@pytest.mark.parametrize("cut", [0, 200], ids=["empty", "torn"])
def test_a_damaged_file_is_moved_aside(tmp_path, caplog, cut):
    trace = writer(tmp_path)
    for step in range(1, 5):
        trace.write(step, loads_of(step))
    trace.close()
    damaged = tmp_path / "trace" / "step_00000002_stage_0.npz"
    content = damaged.read_bytes()[:cut]
    damaged.write_bytes(content)
    continued = writer(tmp_path, start_step=3)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"warning: {damaged}, now step_00000002_stage_0.npz.damaged: ")
    continued.write(4, loads_of(4))
    continued.close()
    assert (tmp_path / "trace" / f"{damaged.name}.damaged").read_bytes() == content
    check(read_loads(tmp_path / "trace"), [3, 4])


def test_a_folder_of_what_does_not_belong_together(tmp_path):
    trace = {name: torch.tensor([1]) for name in ("step", "microbatch", "layer")}
    write_loads(tmp_path / "a.npz", Loads(torch.ones(1, 2, 4, dtype=torch.int64), trace))
    write_loads(tmp_path / "b.npz", Loads(torch.ones(1, 2, 4, dtype=torch.int64), trace))
    with pytest.raises(ValueError, match=r"step 1, microbatch 1, layer 1 .*more than once"):
        read_loads(tmp_path)
    write_loads(
        tmp_path / "b.npz", Loads(torch.ones(1, 2, 2, dtype=torch.int64), trace), overwrite=True
    )
    with pytest.raises(ValueError, match=r"b\.npz: load is \[1, 2, 2\], but \[1, 2, 4\]"):
        read_loads(tmp_path)
    write_loads(tmp_path / "b.npz", Loads(torch.ones(1, 2, 4, dtype=torch.int64)), overwrite=True)
    with pytest.raises(ValueError, match=r"b\.npz has no step, microbatch, layer"):
        read_loads(tmp_path)


@pytest.mark.parametrize("strategy", ["none", "quota"])
def test_a_run_records_what_its_metrics_say(data: Path, tmp_path: Path, strategy: str) -> None:
    settings = ["steps=3", f"balance.strategy={strategy}", "logging.trace_steps=2"]
    settings += ["eval_every=1", "eval_steps=1", "parallel.recompute=full"]
    run_ranks(_train, 2, [*overrides(data, tmp_path), *settings])
    loads = read_loads(tmp_path / "trace")
    metrics = read_metrics(tmp_path)
    assert sorted(set(loads.trace["layer"].tolist())) == [1, 2]
    for line in metrics:
        of_step = loads.load[loads.trace["step"] == line["step"]]
        before = [imbalance(home_loads(load)) for load in of_step]
        assert sum(before) / len(before) == pytest.approx(line["imbalance_before"], rel=1e-12)
    tokens = 8 * 16  # of a step, over the two ranks
    assert loads.load.sum() == len(metrics) * 2 * 2 * tokens  # layers, choices


def test_predictions_are_written_beside_the_loads(tmp_path):
    """The first layer of each microbatch has none; also when a file is cut at a checkpoint."""
    trace = writer(tmp_path)
    for step in (1, 2):
        loads = loads_of(step)
        trace.write(
            step,
            [
                one if one.layer_number == LAYERS[0] else one._replace(predicted=3 * one.load)
                for one in loads
            ],
        )
    trace.close()
    writer(tmp_path, start_step=1).close()
    read = read_loads(tmp_path / "trace")
    check(read, [1])
    for index, layer in enumerate(read.layers()):
        predicted = read.prediction(index)
        if layer == LAYERS[0]:
            assert predicted is None
        else:
            assert torch.equal(predicted, 3 * read.load[index])
