"""Counts the forwards of a step that Megatron replays as one CUDA graph (`full_iteration`).

A replay runs kernels and no Python. So what the capture has counted is taken out, and counted again
after each replay: its tensors then have the replay's values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron_ext.balance import reruns
from megatron_ext.balance.layer_report import LayerReport


@runtime_checkable
class CountsReplays(reruns.HoldsCounts, Protocol):
    """An object that counts the forwards of replays, too."""

    def counted_since(self, mark: Any) -> Any:
        """Return what was counted since a mark. The object is then taken back to the mark."""

    def count_again(self, counted: Any) -> None:
        """Count it once more, with the values that its tensors have now, and only now."""


Counted = list[tuple["weakref.ref[CountsReplays]", Any]]
"""What objects have counted in a capture."""


@contextmanager
def capture() -> Iterator[Counted]:
    """Capture a step in the block; the result is for `count_again`, once the block is over."""
    holders = [holder for holder in reruns.holders() if isinstance(holder, CountsReplays)]
    before = [(holder, holder.mark()) for holder in holders]
    counted: Counted = []
    reruns.is_capturing = True
    try:
        yield counted
    finally:
        reruns.is_capturing = False
        for holder, mark in before:
            since = holder.counted_since(mark)
            holder.take_back(mark)
            counted.append((weakref.ref(holder), since))


def count_again(counted: Counted) -> None:
    """Count the forwards of a captured step once more: after each replay."""
    for reference, since in counted:
        if (holder := reference()) is not None:
            holder.count_again(since)


def with_own_values(reports: Sequence[LayerReport]) -> list[LayerReport]:
    """Return reports without a prediction in memory of their own, by an operation for each field.

    The next replay writes into the tensors that the captured forwards have reported.
    """
    names = "load", "rank_loads_after", "experts_in_slots"
    columns = [copies([getattr(report, name) for report in reports]) for name in names]
    rows = iter(copies([one.rows_over for one in reports if one.rows_over is not None]))
    return [
        replace(
            report,
            **dict(zip(names, own, strict=True)),
            rows_over=None if report.rows_over is None else next(rows),
        )
        for report, *own in zip(reports, *columns, strict=True)
    ]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one dtype, in one operation."""
    if not tensors:
        return []
    sizes = [each.numel() for each in tensors]
    parts = torch.cat([each.flatten() for each in tensors]).split(sizes)
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
