"""OpenTelemetry: what balancing does as gauges `megatron.moe_balance.*`, beside Megatron's own.

They go where OpenTelemetry's own variables say, as `OTEL_EXPORTER_OTLP_ENDPOINT`; by default to a
collector on this machine. The number of the step is no label, as values change in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config import LoggingConfig, TrainConfig
from megatron_ext.telemetry.names import METRICS
from megatron_ext.trainer.sinks.sink import Sink

PREFIX = "megatron.moe_balance."

_SECTIONS = ("balance", "cost")
"""Megatron tells the others itself."""

_LAST_EXPORT_MS = 5000
"""Longest wait for a collector at the end of a run."""


class OpenTelemetrySink(Sink):
    """Sets a gauge for each metric that a step has."""

    def __init__(self, config: TrainConfig, *, start_step: int, facts: Mapping[str, Any]) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource

        about = {"service.name": "megatron_ext", "run.name": Path(config.run_dir).name}
        self._provider = MeterProvider([_reader()], Resource.create(about))
        meter = self._provider.get_meter("megatron_ext")
        self._gauges = {
            name: meter.create_gauge(PREFIX + name, metric.unit, metric.meaning)
            for name, metric in METRICS.items()
            if metric.section in _SECTIONS
        }

    @staticmethod
    def is_wanted(logging: LoggingConfig) -> bool:
        """See `Sink`."""
        return logging.otel

    def write(self, metrics: Mapping[str, Any], layers: Mapping[str, Any] | None) -> None:
        """See `Sink`."""
        for name, gauge in self._gauges.items():
            if name in metrics:
                gauge.set(metrics[name])

    def close(self, *, failed: bool) -> None:
        """See `Sink`."""
        self._provider.shutdown(_LAST_EXPORT_MS)


def _reader() -> Any:
    """What sends the gauges, every so often."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())
