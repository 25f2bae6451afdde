"""Where a run's steps are shown, besides its own files: each a small class, and a line here.

    sink.py         what a sink is
    wandb.py        Weights & Biases
    tensorboard.py  TensorBoard
    otel.py         OpenTelemetry
    panels.py       which metrics are drawn together, in both
    pictures.py     heat maps of loads, for both
    dashboards.py   what W&B shows of a project: workspace and report

They are fed with the lines of `metrics.jsonl` and `layers.jsonl`, so they say what these say.
"""

from megatron_ext.trainer.sinks.otel import OpenTelemetrySink
from megatron_ext.trainer.sinks.sink import Sink
from megatron_ext.trainer.sinks.tensorboard import TensorBoardSink
from megatron_ext.trainer.sinks.wandb import WandbSink

SINKS: dict[str, type[Sink]] = {
    "W&B": WandbSink,
    "TensorBoard": TensorBoardSink,
    "OpenTelemetry": OpenTelemetrySink,
}
"""By the name in messages."""
