"""Collects the loads of a step's MoE layers, and what balancing them cost.

Balanced and even layers report to their `observers`. Megatron's own layers report nothing: a hook
counts their router's choices, and the ranks exchange these counts once, at the end of the step.
Forwards without gradients are not counted (evaluation, the first pass of recompute). The host waits
for the device once, at the end of the step, to copy all counts.

Legend: R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

import math
import resource
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.balance.layer_report import LayerReport, number_of
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.reroute import as_map
from megatron_ext.balance.reruns import can_take_back
from megatron_ext.balance.stage_times import STAGES, TIMES
from megatron_ext.telemetry.heartbeat import called_in_forward

PREDICTED = (
    *("load_accuracy", "choice_accuracy", "hit_replicas", "topped_up_replicas"),
    *("wasted_replicas", "sent_ahead_bytes", "topped_up_bytes"),
)
"""Numbers of a `PredictionReport`, of which a step's metrics are the means."""


class Computed(NamedTuple):
    """The load of one microbatch in one layer, and the ranks that computed it; on the host."""

    layer_number: int
    """1-based, as in Megatron."""
    load: Tensor
    """Assignments from source rank to logical expert, int64 [R, E]."""
    rank_loads_after: Tensor
    """Assignments that each rank computes, int64 [R]."""
    experts_in_slots: Tensor
    """Logical expert in each slot of each rank, or -1, int64 [R, S]."""
    layout: ExpertLayout | None = None
    """The layer's mains and slots; None without a plan."""
    predicted: Tensor | None = None
    """The layer before's prediction of the load, int64 [R, E]; None without a prediction."""
    pushed_bytes: int = 0
    """Weights that moved to replicas, of all ranks."""
    pulled_bytes: int = 0
    """Gradients that moved back to mains, of all ranks."""
    rows_over: int | None = None
    """Rows of all ranks beyond the rank capacity factor; None without this limit."""


@dataclass(frozen=True)
class StepLoads:
    """The counted forwards of a step on this rank."""

    computed: list[Computed]
    """The forwards; those of a layer are in the order of the microbatches."""
    predicted_by_layer: dict[int, dict[str, float]]
    """Sums of `PREDICTED` over a layer's predicted forwards, and how many `forwards` these are, by
    the layer's number."""
    own: dict[str, float]
    """This rank's own numbers, by the names `OWN`; NaN for no number."""


OWN = (
    "max_cum_overload",
    "max_cum_overload_routed",
    *(f"{stage}_ms" for stage in STAGES),
    "memory_bytes",
)
"""Numbers that a rank has for itself; a step's metric is the largest number of all ranks."""


class LoadRecorder:
    """Watches MoE layers of this rank, of any kind, from its construction until `close()`.

    Only Megatron's own layers need the EP group; without one it is that of the layer.
    """

    def __init__(self, layers: Iterable[Any], ep_group: dist.ProcessGroup | None) -> None:
        self._ep_group = ep_group
        self._shard_group: dist.ProcessGroup | None = None
        self._reports: list[LayerReport] = []
        self._counts: list[tuple[int, Tensor]] = []  # Layers and their choices of experts, [E].
        self._held = _Held()
        self._of_step: tuple[list[Any], ...] = (self._reports, self._counts, self._held.events)
        self._hooks: list[Any] = []
        self._observed: list[tuple[list[Any], Any]] = []
        for layer in layers:
            self.watch(layer)
        TIMES.readers += 1
        can_take_back(self)

    def mark(self) -> list[int]:
        """See `HoldsCounts`. Times of stages stay, because a step that runs twice takes them."""
        return [len(each) for each in self._of_step]

    def take_back(self, mark: list[int]) -> None:
        """See `HoldsCounts`."""
        for each, size in zip(self._of_step, mark, strict=True):
            del each[size:]

    def counted_since(self, mark: list[int]) -> tuple[list[int], list[list[Any]]]:
        """See `CountsReplays`."""
        return mark, [each[size:] for each, size in zip(self._of_step, mark, strict=True)]

    def count_again(self, counted: tuple[list[int], list[list[Any]]]) -> None:
        """See `CountsReplays`. Stages have no times in a replay."""
        from megatron_ext.balance.replays import copies, with_own_values

        (first_report, first_count, _), (reports, counts, events) = counted
        later = {
            "report": len(self._reports) - first_report,
            "count": len(self._counts) - first_count,
        }
        self._reports += with_own_values(reports)
        chosen = copies([chosen for _, chosen in counts])
        self._counts += zip([layer for layer, _ in counts], chosen, strict=True)
        self._held.events += [(sign, (kind, index + later[kind])) for sign, (kind, index) in events]

    def watch(self, layer: Any) -> None:
        """Count the training forwards of one more layer."""
        if hasattr(layer, "observers"):
            observer = partial(self._observe, layer)
            layer.observers.append(observer)
            self._observed.append((layer.observers, observer))
        else:
            self._ep_group = self._ep_group or layer.ep_group
            self._shard_group = layer.token_dispatcher.tp_group
            self._hooks.append(layer.router.register_forward_hook(partial(self._count, layer)))
        ended = partial(self._held.forward_ended, layer)
        self._hooks.append(called_in_forward(layer).register_forward_hook(ended))

    def take_step(self) -> StepLoads:
        """Return the forwards since the last call; all ranks of the EP group call together."""
        computed: list[Computed] = []
        if self._reports:
            arrays = _on_host(
                [report.load for report in self._reports],
                [report.rank_loads_after for report in self._reports],
                [report.experts_in_slots for report in self._reports],
                # Nothing stands for no limit.
                [
                    report.load.new_empty(0) if report.rows_over is None else report.rows_over
                    for report in self._reports
                ],
            )
            computed += map(_computed, self._reports, *arrays)
        predicted: dict[int, dict[str, float]] = {}
        for report in self._reports:
            if report.prediction is not None:
                sums = predicted.setdefault(report.layer_number, defaultdict(float))
                sums["forwards"] += 1
                for name in PREDICTED:
                    sums[name] += float(getattr(report.prediction, name))
        if self._counts:
            assert self._ep_group is not None, "Megatron's own layers are counted over a group"
            mine = torch.cat([chosen for _, chosen in self._counts])
            if self._shard_group is not None and self._shard_group.size() > 1:
                # Experts compute the tokens of all ranks that hold their shards.
                dist.all_reduce(mine, group=self._shard_group)
            everyone = [torch.empty_like(mine) for _ in range(self._ep_group.size())]
            dist.all_gather(everyone, mine, group=self._ep_group)
            sizes = [len(chosen) for _, chosen in self._counts]
            (gathered,) = _on_host([torch.stack(everyone)])
            loads = gathered[0].split(sizes, dim=1)  # Of each forward, [R, E].
            computed += [
                Computed(layer, load, home_loads(load), load.new_empty(len(load), 0))
                for (layer, _), load in zip(self._counts, loads, strict=True)
            ]
        own = self._own(computed)
        self._reports.clear()
        self._counts.clear()
        return StepLoads(computed, predicted, own)

    def close(self) -> None:
        """Stop watching, and end the times of stages."""
        for hook in self._hooks:
            hook.remove()
        for observers, observer in self._observed:
            observers.remove(observer)
        TIMES.readers -= 1

    def _observe(self, layer: Any, report: LayerReport) -> None:
        self._held.forward_counted(layer, ("report", len(self._reports)))
        self._reports.append(report)

    def _count(self, layer: Any, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled() and router.training:
            _, choices = outputs
            chosen = as_map(choices, layer.config.num_moe_experts)
            self._held.forward_counted(layer, ("count", len(self._counts)))
            self._counts.append((number_of(layer), chosen.sum(0)))

    def _own(self, computed: Sequence[Computed]) -> dict[str, float]:
        """Return the numbers `OWN` of this step, and begin the next step."""
        first = {"report": 0, "count": len(self._reports)}
        routed, held = self._held.take(computed, first)
        times = TIMES.take()
        stages = [times.get(stage, math.nan) for stage in STAGES]
        if torch.cuda.is_available():
            memory = float(torch.cuda.max_memory_allocated())
        else:  # Of the machine instead.
            memory = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return dict(zip(OWN, (held, routed, *stages, memory), strict=True))


class _Held:
    """The order in which a rank begins and ends to hold the assignments of forwards.

    A rank holds a forward's assignments until autograd has the gradient of the layer's output. The
    name of a forward is its position among the reports, or among the counts.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, tuple[str, int]]] = []
        self._last: dict[Any, tuple[str, int]] = {}
        self._graph_task_id = torch._C._current_graph_task_id

    def forward_counted(self, layer: Any, name: tuple[str, int]) -> None:
        self.events.append((1, name))
        if self._graph_task_id() != -1:  # Recomputed, so its backward comes next.
            self.events.append((-1, name))
        else:
            self._last[layer] = name

    def forward_ended(self, layer: Any, module: Any, inputs: Any, outputs: Any) -> None:
        name = self._last.pop(layer, None)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if name is not None and output.requires_grad:
            events = self.events
            output.register_hook(lambda grad: events.append((-1, name)))

    def take(self, computed: Sequence[Computed], first: dict[str, int]) -> tuple[float, float]:
        """Return the most that a rank held at a time over the mean of all ranks.

        The first result is for experts that stay at home, the second for the ranks that computed.
        `computed` has the reports' forwards, then the counts'; each kind begins at its `first`.
        """
        events, self.events[:] = list(self.events), []
        if not events:
            return math.nan, math.nan
        signs = torch.tensor([sign for sign, _ in events])[:, None]
        places = torch.tensor([first[kind] + index for _, (kind, index) in events])
        homes = torch.stack([home_loads(one.load) for one in computed])
        after = torch.stack([one.rank_loads_after for one in computed])
        routed, held = ((signs * each[places]).cumsum(0) for each in (homes, after))
        return tuple(  # type: ignore[return-value]
            float(each.max()) / max(float(held.double().mean(1).max()), 1)
            for each in (routed, held)
        )


def _computed(
    report: LayerReport,
    load: Tensor,
    rank_loads_after: Tensor,
    experts_in_slots: Tensor,
    rows_over: Tensor,
) -> Computed:
    replicas = int((experts_in_slots >= 0).sum())
    pushed = report.weight_bytes * replicas * report.moves.pushes
    if report.prediction is not None:
        pushed += report.weight_bytes * int(report.prediction.wasted_replicas)
    return Computed(
        report.layer_number,
        load,
        rank_loads_after,
        experts_in_slots,
        layout=report.layout,
        predicted=report.prediction.load if report.prediction is not None else None,
        pushed_bytes=pushed,
        pulled_bytes=report.grad_bytes * replicas,
        rows_over=int(rows_over.sum()) if rows_over.numel() else None,
    )


def _on_host(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Copy integer tensors to the host as int64, in one copy for which the host waits once."""
    tensors = [tensor for each in lists for tensor in each]
    copy = torch.cat([tensor.flatten() for tensor in tensors]).long().cpu()
    parts = copy.split([tensor.numel() for tensor in tensors])
    on_host = iter([part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
    return [[next(on_host) for _ in each] for each in lists]
