"""Computes the time of a layer's forward under a plan, for the objective `time`.

A tighter plan shortens the experts' work and lengthens the transfer of weights. `LayerCosts` holds
the numbers of machine and model by which a planner weighs the two. Legend: B loads, R ranks, E
logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.plan_metrics import rank_sends
from megatron_ext.config import check_fields, limits, setting

_PICOSECONDS = 1e12
_MOST_EXPERT_S, _MOST_TOKEN_S = 1e5, 100.0
"""Most seconds of one expert's weights; of one token or assignment. No machine has larger costs;
with larger costs a layer's picoseconds would not fit int64."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs in time of one MoE layer's forward, on one machine, with one model."""

    expert_bytes: int = field(metadata=limits(least=0))
    """Bytes of one expert's weights; the home rank sends them for each replica."""
    link_bandwidth: float = field(metadata=limits(above=0))
    """Bytes per second that a rank sends to, or receives from, its peers."""
    assignment_time: float = field(metadata=limits(above=0))
    """Seconds of expert computation per assignment."""
    token_bytes: int = setting(0, least=0)
    """Bytes of one token's hidden state, sent there and back."""
    token_bandwidth: float | None = setting(None, above=0)
    """Bytes per second of tokens, if tokens and weights use different links; None: the same."""

    def __post_init__(self) -> None:
        """Check each number."""
        check_fields(self)
        for names, seconds, most in (
            ("expert_bytes / link_bandwidth", self._expert_s, _MOST_EXPERT_S),
            ("2 token_bytes / token_bandwidth", self._token_s, _MOST_TOKEN_S),
            ("assignment_time", self.assignment_time, _MOST_TOKEN_S),
        ):
            if seconds > most:
                raise ValueError(f"{names} ({seconds:g} s) must be <= {most:g} s")

    @property
    def _expert_s(self) -> float:
        """Seconds of sending one expert's weights."""
        return self.expert_bytes / self.link_bandwidth

    @property
    def _token_s(self) -> float:
        """Seconds of one token's way there and back."""
        return 2 * self.token_bytes / (self.token_bandwidth or self.link_bandwidth)

    @property
    def picoseconds(self) -> tuple[int, int, int]:
        """Return the times of an expert's weights, of a token there and back, of an assignment."""
        seconds = self._expert_s, self._token_s, self.assignment_time
        expert, token, assignment = (round(each * _PICOSECONDS) for each in seconds)
        return expert, token, assignment

    def layer_time(self, load: Tensor, plan: BalancePlan) -> Tensor:
        """Return the modelled time of the plan-dependent parts of a forward, in picoseconds.

        The time is the sum of `layer_parts`, in whole numbers, so that all ranks choose alike:
        int64 [] for a load [R, E], or [B] for a batch.

        Source: UltraEP, Eq. 1; solving and reroute cost every plan the same.
        """
        weights, tokens, experts = self.layer_parts(load, plan, rank_sends(plan))
        return weights + tokens + experts

    def layer_parts(
        self, load: Tensor, plan: BalancePlan, sends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the modelled picoseconds of weights, of tokens there and back, and of experts.

        Each part takes as long as on its slowest rank: weights on the busiest sender, tokens on the
        rank that sends or receives most, experts on the busiest rank. A token that stays on its
        rank is not sent. Loads are int64 [..., R, E], with a plan for each; the experts that each
        rank sends, int64 [..., R], are `rank_sends`, or fewer with relays.

        Source: UltraEP, Eq. 5, 4 and 3.
        """
        expert, token, assignment = self.picoseconds
        local = torch.minimum(load.mT, plan.quota)
        received = (plan.quota - local).sum(-2).amax(-1)
        sent = (load.mT - local).sum(-2).amax(-1)
        return (
            sends.amax(-1) * expert,
            torch.maximum(received, sent) * token,
            plan.rank_loads().amax(-1) * assignment,
        )

    def least_time(
        self, load: Tensor, sends: Tensor, busiest: Tensor, layout: ExpertLayout
    ) -> Tensor:
        """Return a lower bound of `layer_time` for plans with these sends and this busiest rank.

        A rank computes at most those of its own tokens that chose its mains or one of S other
        experts, and sends the others. The busiest rank receives every token that it computes beyond
        these own tokens.

        Loads are int64 [..., R, E]; the sends of the busiest sender, the assignments of the busiest
        rank and the bound are int64 [...].
        """
        expert, token, assignment = self.picoseconds
        ranks = torch.arange(layout.ep_size, device=load.device)
        is_main = ranks.repeat_interleave(layout.mains_per_rank) == ranks[:, None]
        others = load.masked_fill(is_main, 0)
        slots = min(layout.slots, layout.num_experts)
        sent = others.sum(-1) - others.topk(slots).values.sum(-1)
        local = load.sum(-1) - sent
        tokens = torch.maximum(sent.amax(-1), busiest - local.amax(-1))
        return sends * expert + tokens * token + busiest * assignment
