"""Even routing forced: the upper bound that no balancing of the router's own choices can beat.

It changes which expert a token goes to, so a model trained with it is another model. Other
strategies are measured against it. Legend: N local tokens, E logical experts, K choices per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.strategies.strategy import ForcesEven, Strategy


def force_even(
    probs_NE: Tensor, routing_map_NE: Tensor, first_expert: int = 0
) -> tuple[Tensor, Tensor]:
    """Deal the assignments out to the experts in turn; each keeps its own probability.

    The i-th assignment of the rank (by token, then by expert) goes to expert (first + i) mod E;
    with K choices for every token that is (first + n * K + k) mod E. All experts get the same
    number, give or take one. The same holds for all ranks together, if each rank's first expert
    comes after the last expert of the rank before.

    Probabilities, float [N, E], are differentiable. Each token keeps its number of choices and the
    multiset of its probabilities.

    >>> probs, routing = force_even(torch.tensor([[0.9, 0.1], [0.8, 0.2]]),
    ...                             torch.tensor([[True, False], [True, False]]))
    >>> probs[routing].tolist() == probs.max(1).values.tolist(), routing.tolist()
    (True, [[True, False], [False, True]])
    """
    num_experts = routing_map_NE.shape[1]
    choices = routing_map_NE.long()
    per_token = choices.sum(1, keepdim=True)
    before = per_token.cumsum(0) - per_token
    # Routed entries come first and the others behind them, so a row's targets are a permutation:
    # nothing collides.
    place = torch.where(
        routing_map_NE, choices.cumsum(1) - 1, per_token + (1 - choices).cumsum(1) - 1
    )
    target_NE = (first_expert + before + place) % num_experts
    return (
        torch.zeros_like(probs_NE).scatter(1, target_NE, probs_NE),
        torch.zeros_like(routing_map_NE).scatter(1, target_NE, routing_map_NE),
    )


IDEAL = Strategy(
    name="ideal",
    summary="even routing forced: the upper bound, changes the model",
    kind=ForcesEven(),
)
