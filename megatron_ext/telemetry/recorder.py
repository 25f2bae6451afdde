"""Collects how unequal the ranks' loads were in a step's MoE layers, before and after balancing.

Balanced and even layers report to their `observers`. Megatron's own layers report nothing: a hook
counts their router's choices, and the counts of all ranks are gathered once at the end of the step.
Forwards without gradients are not counted (evaluation, the first pass of recompute). Counting does
not wait for the device.

Legend: C counted forwards of a step (layers x microbatches on this rank), R ranks of the EP group,
    E logical experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.balance.metrics import home_imbalances, imbalances
from megatron_ext.balance.reroute import as_map
from megatron_ext.telemetry.trace import LayerLoad


class PredictedLoads(NamedTuple):
    """Sums of the fields of `PredictionReport` over this step's predicted forwards."""

    forwards: float = 0
    load_accuracy: float = 0
    choice_accuracy: float = 0
    hit_replicas: float = 0
    topped_up_replicas: float = 0
    wasted_replicas: float = 0
    sent_ahead_bytes: float = 0
    topped_up_bytes: float = 0

    @classmethod
    def of(cls, reports: Sequence[Any]) -> PredictedLoads:
        """Sum the fields of these reports."""
        return cls(
            len(reports), *(sum(getattr(one, name) for one in reports) for name in cls._fields[1:])
        )

    @classmethod
    def total(cls, parts: Iterable[PredictedLoads]) -> PredictedLoads:
        """Add up several such sums."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))


@dataclass(frozen=True)
class StepLoads:
    """Sums over a step's counted forwards on this rank; divide by `forwards` for means."""

    forwards: int
    imbalance_before: float
    imbalance_after: float
    replicas: int
    loads: list[LayerLoad]
    """The loads of the counted forwards; those of a layer in the order of its microbatches."""
    predicted_by_layer: dict[int, PredictedLoads]
    """Sums for each layer that was predicted, by its number."""

    @property
    def predicted(self) -> PredictedLoads:
        """The sums over all predicted layers."""
        return PredictedLoads.total(self.predicted_by_layer.values())


class LoadRecorder:
    """Watches MoE layers from its construction until `close()`.

    Args:
        layers: The MoE layers of this rank: balanced, even or Megatron's own.
        ep_group: The ranks that share the experts.
    """

    def __init__(self, layers: Iterable[Any], ep_group: dist.ProcessGroup) -> None:
        self._ep_group = ep_group
        self._reports: list[Any] = []
        self._counts: list[LayerLoad] = []
        self._hooks = []
        for layer in layers:
            if hasattr(layer, "observers"):
                layer.observers.append(self._reports.append)
            else:
                self._hooks.append(
                    layer.router.register_forward_hook(partial(self._count, layer.layer_number))
                )

    def take_step(self) -> StepLoads:
        """Return the sums since the last call. All ranks of the EP group call it together."""
        before: list[float] = []
        after: list[float] = []
        replicas, counted = 0, []
        if self._reports:
            loads, rank_loads_after, slots = _on_host(
                [report.load for report in self._reports],
                [report.rank_loads_after for report in self._reports],
                [report.slots for report in self._reports],
            )
            before += home_imbalances(loads).tolist()
            after += imbalances(torch.stack(rank_loads_after)).tolist()
            replicas = sum(int((of_forward >= 0).sum()) for of_forward in slots)
            counted += [
                LayerLoad(
                    report.layer_number,
                    load,
                    report.prediction.load if report.prediction is not None else None,
                )
                for report, load in zip(self._reports, loads, strict=True)
            ]
        predictions: dict[int, list[Any]] = {}
        for report in self._reports:
            if report.prediction is not None:
                predictions.setdefault(report.layer_number, []).append(report.prediction)
        predicted = {layer: PredictedLoads.of(of_layer) for layer, of_layer in predictions.items()}
        if self._counts:
            mine = torch.cat([one.load for one in self._counts])
            everyone = [torch.empty_like(mine) for _ in range(self._ep_group.size())]
            dist.all_gather(everyone, mine, group=self._ep_group)
            sizes = [len(one.load) for one in self._counts]
            (gathered,) = _on_host([torch.stack(everyone)])
            loads = list(gathered[0].split(sizes, dim=1))  # Of each forward, [R, E].
            plain = home_imbalances(loads).tolist()
            before += plain
            after += plain
            layers = (one.layer_number for one in self._counts)
            counted += [LayerLoad(layer, load) for layer, load in zip(layers, loads, strict=True)]
        self._reports.clear()
        self._counts.clear()
        return StepLoads(len(before), sum(before), sum(after), replicas, counted, predicted)

    def close(self) -> None:
        """Stop counting routers."""
        for hook in self._hooks:
            hook.remove()

    def _count(
        self, layer_number: int, router: Any, inputs: Any, outputs: tuple[Tensor, Tensor]
    ) -> None:
        if torch.is_grad_enabled() and router.training:
            _, choices = outputs
            chosen = as_map(choices, router.config.num_moe_experts)
            self._counts.append(LayerLoad(layer_number, chosen.sum(0)))


def _on_host(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Integer tensors on the host, as int64: one copy, for which the host waits once."""
    tensors = [tensor for each in lists for tensor in each]
    copy = torch.cat([tensor.flatten() for tensor in tensors]).long().cpu()
    parts = copy.split([tensor.numel() for tensor in tensors])
    on_host = iter([part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])
    return [[next(on_host) for _ in each] for each in lists]
