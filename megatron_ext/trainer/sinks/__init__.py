"""Where a run's steps are shown, besides its own files: each a small class, and a line here.

They take the lines of `metrics.jsonl` and `layers.jsonl`, so they show the same numbers.
"""

from megatron_ext.trainer.sinks.sink import Sink
from megatron_ext.trainer.sinks.tensorboard import TensorBoardSink
from megatron_ext.trainer.sinks.wandb import WandbSink

SINKS: dict[str, type[Sink]] = {"W&B": WandbSink, "TensorBoard": TensorBoardSink}
"""By the name in messages."""
