"""OpenTelemetry gets the numbers of `metrics.jsonl`, read back by the SDK's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config import LoggingConfig, TrainConfig
from megatron_ext.trainer.logs.run_log import RunLog
from megatron_ext.trainer.sinks import otel


def test_gauges_are_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    monkeypatch.setattr(otel, "_reader", lambda: reader)
    config = TrainConfig(run_dir=str(tmp_path / "run"))
    config.data.path = "somewhere"
    config.logging.otel = True
    with RunLog(config, start_step=0) as log:
        log.write({"step": 1, "loss": 2.0, "imbalance_after": 1.5, "plan_ms": 3.0})
        log.write({"step": 2, "loss": 1.0, "imbalance_after": 1.25, "plan_ms": 2.0})
        (of_run,) = reader.get_metrics_data().resource_metrics
    assert of_run.resource.attributes["run.name"] == "run"
    (scope,) = of_run.scope_metrics
    read = {
        metric.name: (metric.unit, metric.data.data_points[0].value) for metric in scope.metrics
    }
    assert read == {
        "megatron.moe_balance.imbalance_after": ("", 1.25),
        "megatron.moe_balance.plan_ms": ("ms", 2.0),
    }
    assert all(not metric.data.data_points[0].attributes for metric in scope.metrics)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problems = LoggingConfig(otel=True).problems()
    assert problems == [
        "logging.otel (True) needs the package opentelemetry-sdk: pip install 'megatron-ext[otel]'"
    ]
