"""Logs which layers are balanced and, from time to time, imbalance and replicas.

One rank of a pipeline stage logs, through `logging`. If the program has set up no logging, the
lines go to stderr, like Python's own warnings.
"""

from __future__ import annotations

import logging
import sys
import weakref
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_ext.balance import reruns
from megatron_ext.balance.layer_report import LayerReport
from megatron_ext.balance.metrics import home_imbalances, imbalances
from megatron_ext.words import counted, ranges

_logger = logging.getLogger("megatron_ext.balance")
# By default Python shows warnings only, and these lines are no warnings.
_logger.setLevel(logging.INFO)


class BalanceLines:
    """Logs the layers that are made from one spec: a line at first, then one every so often.

    The host waits for the device only when it writes a line.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._layers: WeakSet[Any] = WeakSet()
        self._has_begun = False
        self._reports: list[LayerReport] = []
        self._num_counted = 0
        self._sum = self._worst = torch.zeros(3, dtype=torch.float64)
        # By layer, rows beyond the limit of a rank, as a tensor [].
        self._rows_over: dict[int, Tensor] = {}
        reruns.can_take_back(self)

    def watch(self, layer: Any) -> None:
        """Count the microbatches that a balanced layer is trained with."""
        self._layers.add(layer)
        layer.observers.append(partial(self._observe, weakref.ref(layer)))

    def mark(self) -> tuple[Any, ...]:
        """See `HoldsCounts`. A line that a run has said stays said."""
        lists = [*self._reports], {**self._rows_over}
        return *lists, self._num_counted, self._sum, self._worst

    def take_back(self, mark: tuple[Any, ...]) -> None:
        """See `HoldsCounts`."""
        self._reports, self._rows_over, self._num_counted, self._sum, self._worst = mark

    def counted_since(self, mark: tuple[Any, ...]) -> list[LayerReport]:
        """See `CountsReplays`: nothing is counted in a capture but reports."""
        return self._reports[len(mark[0]) :]

    def count_again(self, counted: list[LayerReport]) -> None:
        """See `CountsReplays`."""
        for report in counted:
            self._add(report)
        if self._reports:  # The next replay writes into them.
            self._count()

    def _observe(self, layer: weakref.ref[Any], report: LayerReport) -> None:
        if not self._has_begun:
            self._has_begun = True
            _say(f"{self._names()}: {_what_balances(layer())}")
        self._add(report)

    def _add(self, report: LayerReport) -> None:
        self._reports.append(report)
        if reruns.is_capturing:
            return
        num_layers = len(self._training())
        if len(self._reports) >= num_layers:
            self._count()
        if self._num_counted >= self._every * num_layers:
            did = _what_was_done(self._sum / self._num_counted, self._worst)
            over = _what_was_dropped(self._rows_over)
            _say(f"{self._names()}, last {counted(self._every, 'microbatch')}: {did}{over}")
            self._num_counted = 0
            self._rows_over.clear()

    def _count(self) -> None:
        """Count the reports so far, in as many operations as one of them would take."""
        in_slots = torch.stack([one.experts_in_slots for one in self._reports])
        values = torch.stack(
            [
                home_imbalances([one.load for one in self._reports]),
                imbalances(torch.stack([one.rank_loads_after for one in self._reports])),
                (in_slots >= 0).sum((1, 2)).double(),
            ]
        )
        total, worst = values.sum(1), values.amax(1)
        is_first = self._num_counted == 0
        self._sum = total if is_first else self._sum + total
        self._worst = worst if is_first else torch.maximum(self._worst, worst)
        self._num_counted += len(self._reports)
        for one in self._reports:
            if one.rows_over is not None:
                rows = self._rows_over.get(one.layer_number, 0) + one.rows_over.sum()
                self._rows_over[one.layer_number] = rows
        self._reports.clear()

    def _training(self) -> list[Any]:
        """The layers that report: another model of the spec may be evaluated only."""
        return [layer for layer in self._layers if layer.training]

    def _names(self) -> str:
        numbers = sorted({layer.layer_number for layer in self._training()})
        return f"MoE layers {ranges(numbers)}" if len(numbers) > 1 else f"MoE layer {numbers[0]}"


def _what_balances(layer: Any) -> str:
    layout, capacity = layer.layout, layer.config.moe_expert_capacity_factor
    if layer.config.moe_pad_expert_input_to_capacity:
        return (
            "not balanced, for moe_pad_expert_input_to_capacity (True) fills all experts, so that "
            "all ranks compute equally much"
        )
    buffers = layer.balancer.buffers
    if buffers is None:
        return (
            f"not balanced, for there {'is 1 EP rank' if layout.ep_size == 1 else 'are no slots'}"
        )
    drops = f"; tokens beyond moe_expert_capacity_factor ({capacity}) are dropped before balancing"
    return (
        f"balanced over {counted(layout.ep_size, 'EP rank')} with strategy "
        f"{layer.balance.strategy}: {counted(layout.slots, 'slot')} on each, "
        f"{buffers.num_bytes / 1e6:.1f} MB for all layers, transport "
        f"{buffers.transport.name}, "
        f"{counted(layout.ep_size // layout.nvlink_domain, 'NVLink domain')}"
        f"{'' if capacity is None else drops}"
    )


def _what_was_done(mean: Tensor, worst: Tensor) -> str:
    before, after, replicas = mean.tolist()
    worst_before, worst_after, _ = worst.tolist()
    return (
        f"imbalance {before:.2f} -> {after:.2f} (worst {worst_before:.2f} -> {worst_after:.2f}), "
        f"{replicas:.1f} replicas a layer"
    )


def _what_was_dropped(rows_over: dict[int, Tensor]) -> str:
    """Say which layers had loads that no plan brought below the limit, and how far above."""
    rows = {layer: int(rows) for layer, rows in sorted(rows_over.items())}
    said = [f"{count} of layer {layer}" for layer, count in rows.items() if count]
    return (
        f"; rows dropped beyond moe_expert_rank_capacity_factor: {', '.join(said)}" if said else ""
    )


def _say(line: str) -> None:
    if _logger.hasHandlers():
        _logger.info(line)
    elif _logger.isEnabledFor(logging.INFO):
        sys.stderr.write(f"megatron_ext: {line}\n")
