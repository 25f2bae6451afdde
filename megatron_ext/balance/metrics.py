"""Computes imbalance from loads.

Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def imbalance(rank_loads: Tensor) -> float:
    """Return the busiest rank's assignments / mean, of rank loads int64 [R]: 1.0 is perfect.

    It is 1.0 without assignments, too.

    >>> imbalance(torch.tensor([13, 3])), imbalance(torch.tensor([0, 0]))
    (1.625, 1.0)
    """
    return float(imbalances(rank_loads))


def imbalances(rank_loads: Tensor) -> Tensor:
    """Return the imbalance, float64 [...], of rank loads, int64 [..., R].

    >>> imbalances(torch.tensor([[13, 3], [8, 8]])).tolist()
    [1.625, 1.0]
    """
    total = rank_loads.sum(-1)
    busiest = rank_loads.amax(-1).double() * rank_loads.shape[-1]
    return torch.where(total > 0, busiest / total.clamp(min=1), 1.0)


def home_loads(load: Tensor) -> Tensor:
    """Return the assignments of each rank without balancing, int64 [..., R]; load [..., R, E].

    >>> home_loads(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])).tolist()
    [13, 3]
    """
    return load.sum(-2).unflatten(-1, (load.shape[-2], -1)).sum(-1)


def home_imbalances(loads: Sequence[Tensor]) -> Tensor:
    """Return the imbalances without balancing, float64 [len(loads)], of layers' loads [R, E].

    Layers may differ in E. A few operations compute all loads of one E together.

    >>> wide, narrow = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), torch.tensor([[1, 1], [1, 1]])
    >>> home_imbalances([wide, narrow, wide]).tolist()
    [1.625, 1.625, 1.0]
    """
    alike: dict[int, list[Tensor]] = {}
    for load in loads:
        alike.setdefault(load.shape[-1], []).append(load)
    return torch.cat([imbalances(home_loads(torch.stack(each))) for each in alike.values()])
