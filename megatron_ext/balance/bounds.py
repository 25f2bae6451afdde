"""Proven lower bounds: what no legal plan can beat, whatever its strategy."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout


def lower_bound(load: Tensor, layout: ExpertLayout) -> int:
    """Assignments that the busiest rank must have in every legal plan.

    A replica stays in its home's NVLink domain, so the ranks of a domain share the load of their
    experts among themselves: one of them has at least the domain's mean, rounded up. Without slots
    every rank keeps its own.

    Args:
        load: Assignments, int64 [R, E].
        layout: Where experts and slots are.

    >>> import torch
    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> lower_bound(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), layout)
    8
    """
    sharers = layout.nvlink_domain if layout.slots else 1
    groups = load.sum(0).view(layout.ep_size // sharers, -1).sum(1)
    return -(-int(groups.max()) // sharers)
