"""Tells how good the prediction of a load was: for planners that place replicas before the load.

Legend: R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.balance.plan import BalancePlan


@dataclass(frozen=True, eq=False)
class PredictionReport:
    """How good the prediction of one load was.

    Fields are tensors on the layer's device. Properties are computed from them and wait for the
    device, so they are better read after the step.
    """

    load: Tensor
    """Predicted assignments from source rank r to logical expert e, int64 [R, E]."""
    exact_load: Tensor
    """The assignments that came, int64 [R, E]."""
    num_choices: Tensor
    """This rank's assignments, int64 []."""
    num_right_choices: Tensor
    """This rank's assignments that were predicted for the same token and expert, int64 []."""
    hit_replicas: Tensor
    """Replicas sent ahead and used, int64 []; see `replica_use`."""
    topped_up_replicas: Tensor
    """Replicas used, and moved when the load was known, int64 []."""
    wasted_replicas: Tensor
    """Replicas sent ahead and not used, int64 []."""
    expert_bytes: int
    """Bytes of one expert's weights, over all shards."""

    @property
    def load_accuracy(self) -> float:
        """`load_accuracy` of the prediction."""
        return load_accuracy(self.load, self.exact_load)

    @property
    def choice_accuracy(self) -> float:
        """Part of this rank's assignments that were predicted; 1 if there are none."""
        return float(self.num_right_choices) / float(self.num_choices) if self.num_choices else 1.0

    @property
    def sent_ahead_bytes(self) -> int:
        """Bytes of replicas sent ahead: off the critical path, beside the layer before."""
        return self.expert_bytes * int(self.hit_replicas + self.wasted_replicas)

    @property
    def topped_up_bytes(self) -> int:
        """Bytes of replicas topped up: on the critical path, behind the plan."""
        return self.expert_bytes * int(self.topped_up_replicas)


def load_accuracy(predicted: Tensor, load: Tensor) -> float:
    """Return the part of the predicted assignments that fit the experts' exact loads.

    Both loads are int64 [R, E]. An expert's predicted assignments count up to the expert's exact
    load, from any token. The result is 1 without predictions.

    >>> load_accuracy(torch.tensor([[3, 1], [0, 0]]), torch.tensor([[1, 0], [1, 2]]))
    0.75
    """
    fits = torch.minimum(predicted.sum(0), load.sum(0)).sum()
    return float(fits) / float(predicted.sum()) if predicted.any() else 1.0


def replica_use(placed: Tensor, plan: BalancePlan) -> dict[str, Tensor]:
    """Count the replicas, placed before the load was known, that the load's plan uses.

    `placed` is the logical expert in each slot, or -1: int32 [..., R, S]. A placed replica that the
    plan uses stays in its slot. Counts are int64 [...]: `hit_replicas` were placed and are used,
    `topped_up_replicas` used and not placed, `wasted_replicas` placed and not used.

    >>> from megatron_ext.balance.layout import ExpertLayout
    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=2, nvlink_domain=2)
    >>> used = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
    >>> plan = BalancePlan(layout, torch.zeros(4, 2, dtype=torch.int64), used)
    >>> use = replica_use(torch.tensor([[2, 3], [-1, 0]], dtype=torch.int32), plan)
    >>> {name: int(count) for name, count in use.items()}
    {'hit_replicas': 1, 'topped_up_replicas': 2, 'wasted_replicas': 2}
    """
    was_placed, is_used = placed >= 0, plan.experts_in_slots >= 0
    is_hit = was_placed & (placed == plan.experts_in_slots)
    return {
        "hit_replicas": is_hit.sum((-2, -1)),
        "topped_up_replicas": (is_used & ~is_hit).sum((-2, -1)),
        "wasted_replicas": (was_placed & ~is_hit).sum((-2, -1)),
    }
