"""A proven lower bound of the busiest rank's load, and the target load.

Legend: R ranks, E logical experts, M mains per rank, S slots per rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.ops import load_library


def target_load(total: int, ranks: int, tolerance_ppm: int) -> int:
    """Return the busiest rank's load within the tolerance: `(1 + tolerance) * mean`, rounded down.

    The target is at least the mean rounded up, because no plan can go below that. The tolerance is
    in millionths of the mean.

    >>> target_load(16, 2, 10_000), target_load(17, 2, 0), target_load(1000, 2, 10_000)
    (8, 9, 505)
    """
    mean_rounded_up = -(-total // ranks)
    return max(mean_rounded_up, total * (1_000_000 + tolerance_ppm) // (ranks * 1_000_000))


def lower_bound(load: Tensor, layout: ExpertLayout) -> Tensor:
    """Return the least load of the busiest rank that a legal plan can have.

    It is int64 [] for a load [R, E], or [B] for a batch [B, R, E], on the CPU.

    Two arguments bound the load, for each NVLink domain and each k; the largest bound counts.
    docs/method.md has the proofs.

    - By senders: n slots outside the k busiest ranks take at most the load of these ranks' n
      hottest experts. One of the k ranks keeps at least a k-th of the rest. If k is the number of
      all ranks, the bound is the mean, rounded up; if k = 1 and there are no slots, the bound is
      the busiest rank's own load.
    - By receivers: a rank computes at most its own load and the load of the domain's S hottest
      experts.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> int(lower_bound(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), layout))
    8
    """
    load_library()
    return torch.ops.megatron_ext.lower_bound(load.cpu(), layout.slots, layout.nvlink_domain)
