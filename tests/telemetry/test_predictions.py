"""What a run's metrics say of predictions, against what each layer reported (2 gloo ranks)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
from tests.ranks import run_ranks
from tests.trainer.dataset import build, overrides

LAYERS = 3


def _steps(rank: int, arguments: list[str]) -> list[tuple[dict[str, Any], list[Any]]]:
    """Metrics of two steps, and the reports of this rank's layers in them."""
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.loop import Training
    from megatron_ext.trainer.model.build import moe_layers

    parallel_state.destroy_model_parallel()
    training = Training(load_config(arguments))
    found = []
    for _ in range(2):
        reports: list[Any] = []
        for layer in moe_layers(training.chunks):
            if hasattr(layer, "observers"):
                layer.observers.append(reports.append)
        metrics = training.train_step()
        for layer in moe_layers(training.chunks):
            if hasattr(layer, "observers"):
                layer.observers.pop()
        found.append((metrics, reports))
    training.close()
    return found


def of_run(folder: Path, strategy: str) -> list[list[tuple[dict[str, Any], list[Any]]]]:
    settings = [f"balance.strategy={strategy}", f"model.num_layers={LAYERS}"]
    (folder / "text").mkdir()
    arguments = [*overrides(build(folder / "text"), folder / "run"), *settings]
    return run_ranks(_steps, 2, arguments)


def test_accuracy_of_each_layer_and_bytes_ahead_and_in_time(tmp_path: Path) -> None:
    """Numbers are means over both ranks' predicted forwards; the first layer is never predicted."""
    by_rank = of_run(tmp_path, "libra")
    for step in range(2):
        metrics = by_rank[0][step][0]
        reports = [report for of_rank in by_rank for report in of_rank[step][1]]
        known = [report for report in reports if report.prediction is not None]
        assert {report.layer_number for report in known} == {2, 3}
        for layer in (2, 3):
            rates = [one.prediction.choice_accuracy for one in known if one.layer_number == layer]
            mean = sum(rates) / len(rates)
            assert metrics[f"choice_accuracy_layer_{layer}"] == pytest.approx(mean)
        assert "choice_accuracy_layer_1" not in metrics
        # An expert has two weights of 16 x 32 elements in float32.
        used, added, wasted = (
            [int(getattr(one.prediction, f"{what}_replicas")) for one in known]
            for what in ("hit", "topped_up", "wasted")
        )
        sent = [sum(pair) for pair in zip(used, wasted, strict=True)]
        expert_bytes = 2 * 16 * 32 * 4
        assert metrics["sent_ahead_bytes"] == pytest.approx(expert_bytes * sum(sent) / len(known))
        assert metrics["topped_up_bytes"] == pytest.approx(expert_bytes * sum(added) / len(known))
        assert metrics["topped_up_replicas"] == pytest.approx(sum(added) / len(known))
        assert [sum(pair) for pair in zip(used, added, strict=True)] == [
            one.num_replicas for one in known
        ]
        assert sum(sent) > 0


def test_nothing_is_said_where_nothing_is_predicted(tmp_path: Path) -> None:
    for of_rank in of_run(tmp_path, "quota"):
        for metrics, _ in of_rank:
            assert not [name for name in metrics if "accuracy" in name or "ahead" in name]
