"""Stage 2: defines a plan, and computes each source rank's share of it.

Strategies (`strategies/`) make a plan from the load of `load.py`; reroute, slot buffers and
backward use it. Planning is integer arithmetic on equal input: every rank solves alone and gets the
same bits. Legend: R ranks of the EP group, E logical experts, S slots per rank, B independent
loads. All counts are int64.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.load import load_of
from megatron_ext.ops import load_library


@dataclass(frozen=True, eq=False)
class BalancePlan:
    """Where the replicas of one microbatch in one layer are, and how much every instance computes.

    Made by a strategy; lives from a layer's forward to the end of its backward. A batch of plans
    (from `solve.py`) has a leading [B] in both tensors.
    """

    layout: ExpertLayout
    """The numbers of ranks, experts and slots."""
    quota: Tensor
    """Assignments of expert e computed on rank t, mains included: int64 [E, R]."""
    experts_in_slots: Tensor
    """Logical expert in each slot of each rank, or -1: int32 [R, S]."""

    @property
    def slots(self) -> Tensor:
        """`experts_in_slots`, as files of plans call it."""
        return self.experts_in_slots

    def rank_loads(self) -> Tensor:
        """Assignments each rank computes: int64 [R]."""
        return self.quota.sum(-2)

    def num_replicas(self) -> int:
        """Slots in use (over all plans of a batch)."""
        return int((self.experts_in_slots >= 0).sum())

    def physical_index(self) -> Tensor:
        """Physical id of expert e's instance on rank t, or -1 where it has none: int64 [E, R].

        >>> from megatron_ext.balance.solve import solve
        >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
        >>> solve(load, ep_size=2, slots=1).physical_index().tolist()
        [[0, 5], [1, -1], [-1, 3], [-1, 4]]
        """
        layout, device = self.layout, self.quota.device
        experts, ranks = layout.num_experts, layout.ep_size
        # Row E takes what empty slots write, so that no entry needs a test.
        replicas = torch.where(self.experts_in_slots < 0, experts, self.experts_in_slots.long())
        index = torch.full((*self.quota.shape[:-2], experts + 1, ranks), -1, device=device)
        first = torch.arange(ranks, device=device) * layout.physical_per_rank
        for held, start in (
            (torch.arange(experts, device=device).view(ranks, -1), 0),
            (replicas, layout.mains_per_rank),
        ):
            ids = first[:, None] + start + torch.arange(held.shape[-1], device=device)
            shape = (*index.shape[:-2], *ids.T.shape)
            index.scatter_(-2, held.mT.expand(shape), ids.T.expand(shape))
        return index[..., :-1, :]

    def digest(self) -> int:
        """Hash of quota and slots below 2**63, equal for equal plans on every machine."""
        state = hashlib.blake2b(digest_size=8)
        for tensor in (self.quota, self.experts_in_slots):
            state.update(tensor.cpu().contiguous().numpy().tobytes())
        return int.from_bytes(state.digest(), "little") >> 1

    def unbatch(self) -> list[BalancePlan]:
        """The plans of a batch, one by one."""
        return [
            BalancePlan(self.layout, quota, held)
            for quota, held in zip(self.quota, self.experts_in_slots, strict=True)
        ]


def with_spare_slots(plan: BalancePlan, num_slots: int) -> BalancePlan:
    """Return the plan with so many empty slots added to every rank.

    >>> from megatron_ext.balance.solve import solve
    >>> plan = solve(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), ep_size=2, slots=1)
    >>> with_spare_slots(plan, 1).experts_in_slots.tolist()
    [[-1, -1], [0, -1]]
    """
    if num_slots == 0:
        return plan
    layout = dataclasses.replace(plan.layout, slots=plan.layout.slots + num_slots)
    return BalancePlan(layout, plan.quota, F.pad(plan.experts_in_slots, (0, num_slots), value=-1))


@dataclass(frozen=True, eq=False)
class Shares:
    """One rank's part of a plan: the instances of its assignments, and arriving assignments."""

    split: Tensor
    """Assignments of this rank that the instance of expert e on rank t takes: int64 [E, R]."""
    physical_index: Tensor
    """`plan.physical_index()`: int64 [E, R]."""
    lines: Tensor | None = None
    """Split and index in the form of the GPU's kernels; if None, reroute makes the lines."""
    arriving: Tensor | None = None
    """Assignments of each source rank that this rank's mains, then its slots, take: int64
    [R, M + S]. None where the plan does not determine them: with expert tensor parallelism, and in
    a recomputed forward."""
    arrivals: Tensor | None = None
    """Sums of `arriving`, int64 [R + (M + S)]: assignments that come from each rank, and that each
    of this rank's mains, then slots, takes."""

    def fit(self, num_choices: Tensor) -> Shares:
        """Change the shares to what the rank's tokens chose, when the plan is for another load.

        A recomputed router may choose otherwise for a token that was near a tie. If an expert has
        fewer choices, its last instances get fewer; if an expert has more choices, its main gets
        the rest. Other ranks need not know. The sums over the ranks become `num_choices`, int64
        [E].

        >>> shares = Shares(torch.tensor([[2, 3], [1, 4]]), torch.tensor([[0, 3], [1, 2]]))
        >>> shares.fit(torch.tensor([4, 7])).split.tolist()
        [[2, 2], [1, 6]]
        """
        num_ranks = self.split.shape[1]
        ends = self.split.cumsum(1).clamp(max=num_choices[:, None])
        fitted = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        at_home = fitted.view(num_ranks, -1, num_ranks).diagonal(dim1=0, dim2=2)
        at_home += (num_choices - ends[:, -1]).view(num_ranks, -1).T
        return Shares(fitted, self.physical_index)

    def of_shard(self, rank: int, counts: Tensor) -> Shares:
        """Return a rank's part of the shares of its expert-TP group.

        Each of the T ranks gets a part of every instance's share, in proportion to the rank's own
        assignments, and rounded so that all sums stay exact. So the T exchanges, in which the
        tokens of a group travel, are balanced, too. Arguments are those of `share_plan`.
        """
        experts, ranks = self.split.shape
        num_shards = len(counts) // ranks
        if num_shards == 1:
            return self
        ep_rank, shard = divmod(rank, num_shards)
        of_group = counts.view(ranks, num_shards, experts, 1)[ep_rank]
        # The instances lie on a line. A rank in turn takes its share of each piece of what is left.
        rest = of_group.sum(0)
        line = self.split.cumsum(1)
        for mine in of_group[: shard + 1]:
            after = rest - mine
            shorter = line * after // rest.clamp(min=1)
            taken, line, rest = line - shorter, shorter, after
        return Shares(taken.diff(dim=1, prepend=torch.zeros_like(rest)), self.physical_index)


def share_plan(rank: int, counts: Tensor, plan: BalancePlan) -> Shares:
    """Return one rank's share of every quota: own tokens first, exact rows and columns.

    Per expert, an EP rank that holds an instance first uses the instance for its own assignments.
    The remaining assignments lie on a line, in rank order of the sources. The remaining quotas lie
    on a second line of the same length, the home rank's first. A source's share of an instance is
    the overlap of their pieces. Unlike the paper's rounded proportional shares, sums of rows and of
    columns are exact (docs/decisions/001). The ranks of an expert-TP group share the EP rank's.

    The rank is one of the R * T that plan alike. Each of these has a row of counts, int64
    [R * T, E], those of a group side by side; the plan is for their load.

    >>> from megatron_ext.balance.solve import solve
    >>> counts = torch.tensor([[4, 1, 0, 0], [2, 0, 1, 0], [4, 1, 0, 1], [0, 1, 1, 0]])
    >>> plan = solve(load_of(counts, ep_size=2), ep_size=2, slots=1)
    >>> [share_plan(rank, counts, plan).split[0].tolist() for rank in range(4)]
    [[4, 0], [1, 1], [0, 4], [0, 0]]

    Source: UltraEP, Algorithm 1 (SolveReroute); differs from it in how residuals meet.
    """
    load = load_of(counts, plan.layout.ep_size)
    load_library()
    shares = torch.ops.megatron_ext.share_plan(
        load, plan.quota, plan.experts_in_slots, rank * len(load) // len(counts)
    )
    return Shares(*shares).of_shard(rank, counts)


def check_load(load: Tensor, layout: ExpertLayout) -> None:
    """Check that a load from a caller can be planned; solvers trust the load."""
    ranks, experts = layout.ep_size, layout.num_experts
    if load.dtype != torch.int64:
        raise TypeError(f"load must be int64, got {load.dtype}")
    if load.dim() not in (2, 3) or load.shape[-2:] != (ranks, experts):
        raise ValueError(
            f"load must be [R, E] = [{ranks}, {experts}] or a batch of that, "
            f"got shape {tuple(load.shape)}"
        )
    # Of a load on a GPU the values are trusted: to look at them, the host would have to wait.
    if load.numel() > 0 and not load.is_cuda:
        check_counts(load)


def check_counts(load: Tensor) -> None:
    """Check that the entries of loads, int64 [..., R, E] and not empty, are counts.

    Raises:
        ValueError: One is negative, or so large that sums would not fit int64.
    """
    least, most = (int(value) for value in torch.aminmax(load))
    limit = (2**63 - 1) // (load.shape[-2] * load.shape[-1])
    if least < 0:
        raise ValueError(f"load has a negative entry ({least}); assignments are counts >= 0")
    if most > limit:
        raise ValueError(
            f"load has an entry of {most}; for sums to fit int64 at most {limit} "
            f"((2**63 - 1) / (R * E)) is allowed"
        )
