"""Stage 3: from logical to physical routing, so that every instance gets exactly its quota.

Needs this rank's row of the split and the plan's physical ids; gives the routing map that the
dispatcher sends by. Probabilities keep the router's dtype: they are moved, never computed with.
Legend: N local tokens, E logical experts, R ranks of the EP group, P physical experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import instance_order


def reroute(
    probs_NE: Tensor,
    routing_map_NE: Tensor,
    source_quota: Tensor,
    physical_index: Tensor,
    num_physical: int,
) -> tuple[Tensor, Tensor]:
    """Send the j-th local token of an expert to the first instance whose cumulative quota covers j.

    Args:
        probs_NE: Probabilities, float [N, E], 0 where not routed; differentiable.
        routing_map_NE: Logical choices, bool [N, E]. Its column sums must be the row sums of
            `source_quota`.
        source_quota: Assignments of this rank that each instance takes, int64 [E, R] (`split_quota`
            of this rank).
        physical_index: Physical id of expert e's instance on rank t, int64 [E, R], or -1
            (`plan.physical_index()`).
        num_physical: Physical experts (P).

    Returns:
        Probabilities [N, P] and choices, bool [N, P]. Each row keeps its number of choices. In
        backward, gradients come back over the same table of indices.

    Raises:
        RuntimeError: If the column sums are not what `source_quota` covers (on a GPU a device-side
            assertion, seen at the next synchronization).

    >>> probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> quota, physical_index = torch.tensor([[1, 1], [0, 1]]), torch.tensor([[0, 3], [-1, 2]])
    >>> probs, routing = reroute(probs, probs > 0, quota, physical_index, 4)
    >>> probs.tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]

    Source: UltraEP, section 5.2 (token assignment by cumulative quotas).
    """
    tokens, (experts, ranks) = routing_map_NE.shape[0], source_quota.shape
    order = instance_order(experts, ranks, source_quota.device)
    last = source_quota.gather(1, order).cumsum(1)
    # j per expert and token; -1 before an expert's first token, which falls on the main unrouted.
    j = routing_map_NE.T.contiguous().cumsum(1) - 1
    if tokens:
        # Asked on the device, so that the host need not wait for a GPU.
        torch._assert_async(
            (j[:, -1] + 1 == last[:, -1]).all(),
            "routing_map_NE and source_quota count different assignments: not the same microbatch",
        )
    place = torch.searchsorted(last, j, right=True)
    physical_NE = physical_index.gather(1, order).gather(1, place).T.contiguous()
    # Experts share no instance, so a row's indices differ and a plain scatter is exact. An entry
    # that is not routed writes False and 0 into an instance of its own expert, where no other entry
    # of its row writes.
    probs_NP = probs_NE.new_zeros(tokens, num_physical).scatter(1, physical_NE, probs_NE)
    routing_map_NP = routing_map_NE.new_zeros(tokens, num_physical).scatter(
        1, physical_NE, routing_map_NE
    )
    return probs_NP, routing_map_NP
