"""Small planning instances for hypothesis: a load, a layout and settings."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.solve import PlannerInOrder
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.config import HistorySettings, LlepSettings
from megatron_ext.methods.eplb import eplb

TIME = "quota:time"
"""The planner `quota` for the objective of time."""


class Instance(NamedTuple):
    load: Tensor  # int64 [R, E]
    layout: ExpertLayout
    tolerance: float
    min_quota: int

    @property
    def settings(self) -> dict[str, float | int]:
        return {"tolerance": self.tolerance, "min_quota": self.min_quota}

    def settings_of(self, strategy: str) -> dict[str, Any]:
        """As `settings`, with what only this strategy needs."""
        small = (
            LlepSettings(alpha=1.0 + self.tolerance, min_tokens_per_gemm=3),
            HistorySettings(interval=2),
        )
        return self.settings | {"sections": small} | needs_of(strategy, self.layout)


def needs_of(strategy: str, layout: ExpertLayout) -> dict[str, Any]:
    """What a strategy cannot do without: costs, a replica as long as 2 assignments, or replicas."""
    if strategy == TIME:
        costs = LayerCosts(expert_bytes=2000, link_bandwidth=1e9, assignment_time=1e-6)
        return {"costs": costs}
    if strategy == "craft":
        return {"placement": placement_for(layout)}
    return {}


def placement_for(layout: ExpertLayout) -> Placement:
    """Replicas of layers 0 to 2, all alike: the slots filled as for loads of 1, 2, 3, ..."""
    expert_load = torch.arange(1, layout.num_experts + 1)
    placed = eplb.place(expert_load, layout, PlanSettings())
    return Placement((0, 1, 2), torch.stack([placed] * 3), torch.stack([expert_load] * 3))


def plan_for(
    load: Tensor, layout: ExpertLayout, *, strategy: str = "quota", **asked: Any
) -> BalancePlan:
    """As `solve`, for a layout as it is: `solve` lets a strategy change the number of slots."""
    return PlannerInOrder(strategy, layout, PlanSettings(**asked)).plan_in_order(load)


@st.composite
def instances(draw, max_ranks: int = 6, max_mains: int = 4) -> Instance:
    ranks = draw(st.integers(1, max_ranks))
    mains = draw(st.integers(1, max_mains))
    slots = draw(st.integers(0, 4))
    domain = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    experts = ranks * mains
    # Hot beside cold experts make ranks unequal; zeros and ties are the corners.
    scale = draw(st.lists(st.sampled_from([0, 1, 3, 50]), min_size=experts, max_size=experts))
    counts = draw(st.lists(st.integers(0, 5), min_size=ranks * experts, max_size=ranks * experts))
    load = torch.tensor(counts, dtype=torch.int64).view(ranks, experts) * torch.tensor(scale)
    layout = ExpertLayout(num_experts=experts, ep_size=ranks, slots=slots, nvlink_domain=domain)
    tolerance = draw(st.sampled_from([0.0, 0.01, 0.2, 3.0]))
    return Instance(load, layout, tolerance, draw(st.sampled_from([1, 1, 2, 7])))


def worked_example() -> Instance:
    """The example of the documentation: R = 2, E = 4, M = 2, S = 1."""
    layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    return Instance(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), layout, 0.01, 1)
