"""Whole steps as CUDA graphs of Megatron's (`cuda_graph_impl=full_iteration`).

Megatron captures the forwards and backwards of all microbatches and the reduction of gradients in
one graph, and replays it in place of later steps. Plans are made, followed and sealed on the
device, so each replay has plans of its own. Behind it the host does what it would have done within:

- the forwards are counted again, with the loads and plans of the replay (`replays.py`);
- failed waits and plans that differ are counted over all ranks, and end the step before an
  optimizer's (`failures.py`). The host waits there for the replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.balance import replays
from megatron_ext.mcore import failures

_captured: dict[str, replays.Counted] = {}
"""What a graph's capture has counted, by the stage that Megatron replays it in."""


def run_with_host(run: Callable[..., Any], wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Call Megatron's `FullCudaGraphWrapper`, by `run`; do the host's part behind a replay."""
    stage = "validation" if kwargs.get("forward_only") else "training"
    if wrapper.cuda_graph[stage] is not None:
        result = run(wrapper, *args, **kwargs)
    else:
        _captured.pop(stage, None)  # Of a graph that Megatron has dropped.
        if wrapper.curr_iter(stage) != wrapper.cuda_graph_warmup_steps:
            return run(wrapper, *args, **kwargs)
        # The call that captures a graph replays it, too.
        with replays.capture() as _captured[stage]:
            result = run(wrapper, *args, **kwargs)
    # What was captured before this hook was there is not counted.
    replays.count_again(_captured.get(stage, []))
    model = kwargs["model"]
    failures.count_and_look(model if isinstance(model, list) else [model])
    return result
