"""What a run's trace keeps in memory: predictions count as the loads do."""

import torch

from megatron_ext.files.loads import read_loads
from megatron_ext.telemetry import step_files
from tests import workloads
from tests.telemetry.test_trace import computed, writer


def test_predictions_are_bounded_with_the_loads(tmp_path, monkeypatch):
    """Room for two loads: with a prediction each, one load more than one is above it."""
    load = workloads.zipf(2, 4, 50, 1.0, seed=0)
    monkeypatch.setattr(step_files, "_MOST_BYTES", 2 * load.nbytes)
    trace = writer(tmp_path, steps_per_file=1000)
    kept = []
    for step in range(1, 6):
        trace.write(step, [computed(1, load, predicted=load)])
        kept.append(len(trace._loads))
    trace.close()
    assert kept == [1, 0, 1, 0, 1]
    read = read_loads(tmp_path / "trace")
    assert read.trace["step"].tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(read.predicted, read.load)
