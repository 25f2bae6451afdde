"""The costs that the fastest plan is chosen by, measured on the ranks of the EP group.

`balance.objective=time` weighs the transfer of weights against the computation of assignments. Both
are measured with the layer's own means: its transport pushes replicas into its slots, and its mains
run forward on as many assignments as a microbatch brings them on average. A round takes as long as
its slowest rank, for ranks wait for each other in a layer; the median of a few rounds counts.

When: in the first forward, between the load and its plan, where all ranks of the EP group are
together and know the size of a microbatch. Layers that share slots share what was measured.

Side effects: a push overwrites the slots, and no forward takes these replicas for its own. No
shared random generator moves.

Backward is not measured, as it is not in `LayerCosts`. Backward pushes once more and pulls
gradients, and computes twice what the forward computes. So with gradients as large as weights both
sides are three times as much in all, and the choice is the same. With weights in bfloat16, whose
gradients are twice as large, pulling is undercounted; but it runs beside other work.

Legend: R ranks of the EP group, E logical experts, M mains per rank, S slots per rank.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.balance.forward import NO_SLOTS
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.main_weights import MainWeights
from megatron_ext.balance.slots import SlotBuffers
from megatron_ext.config import COST_UNITS
from megatron_ext.mcore.experts import ExpertWeights
from megatron_ext.transport import Transfers

logger = logging.getLogger(__name__)

_ROUNDS = 9
_WARMUP = 2
"""Rounds at the beginning that do not count: they allocate memory and load code."""
_ENOUGH_S = 0.4
"""After so many seconds no further round begins; at least two run, and at least one counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostMeter:
    """Measures the costs of one layer; a method has the name of the setting that it measures.

    All ranks that plan alike call the same methods in the same order, and get the same values.
    """

    buffers: SlotBuffers
    """The layer's slots, with the transport that moves replicas."""
    mains: MainWeights
    """This rank's main weights."""
    expert_weights: ExpertWeights
    """Computes the mains."""
    width: int
    """Elements of an expert's input."""
    probs_dtype: torch.dtype
    """Dtype of the router's probabilities."""
    load: Tensor
    """Load of the microbatch that is to be planned: int64 [R, E], equal on all ranks."""
    group: ProcessGroup
    """The ranks that plan alike."""

    @property
    def assignments_per_expert(self) -> int:
        """Mean assignments of an expert, one at least."""
        return max(1, round(int(self.load.sum()) / self.buffers.layout.num_experts))

    def link_bandwidth(self) -> float:
        """Return the bytes per second that a rank sends while all ranks send as much."""
        experts_in_slots = neighbor_experts(self.buffers.layout)
        sent_bytes = int((experts_in_slots[0] >= 0).sum()) * self.buffers.weight_bytes
        replicas = Transfers(
            experts_in_slots.to(self._example.device), self.buffers.layout.mains_per_rank
        )

        def push() -> None:
            # Without an owner: no forward may take these replicas for its own.
            self.buffers.push(replicas, self.mains, "measuring balance.link_bandwidth").wait()

        return sent_bytes / self._median_s(push)

    def assignment_time(self) -> float:
        """Return the seconds of computing an assignment, as part of an even microbatch."""
        example, per_expert = self._example, self.assignments_per_expert
        counts = torch.full((self.buffers.layout.mains_per_rank,), per_expert)
        # Not zeros: a GPU multiplies them with less power, and so faster.
        tokens = torch.randn(
            int(counts.sum()),
            self.width,
            generator=torch.Generator(example.device).manual_seed(0),
            dtype=example.dtype,
            device=example.device,
        )
        probs = tokens.new_ones(len(tokens), dtype=self.probs_dtype)
        run = partial(self.expert_weights.run, NO_SLOTS, tokens, counts, probs)
        return self._median_s(run) / len(tokens)

    @property
    def _example(self) -> Tensor:
        return self.mains.parameters()[0]

    def _median_s(self, work: Callable[[], object]) -> float:
        """Median seconds of a round on its slowest rank, over the rounds that count."""
        times: list[float] = []
        # All ranks have the same times, so they end together.
        while len(times) < 2 or (len(times) < _ROUNDS and sum(times) < _ENOUGH_S):
            times.append(slowest_s(work, self.group, self._example.device))
        return statistics.median(times[min(_WARMUP, len(times) - 1) :])


_MEASURED: WeakKeyDictionary[SlotBuffers, dict[str, float]] = WeakKeyDictionary()
"""Measured costs of the layers that share slots, by setting."""


@torch.no_grad()
def measure_costs(names: Sequence[str], meter: CostMeter, where: str) -> dict[str, float]:
    """Measure costs that are not given, unless a layer with the same slots has done so.

    All ranks that plan alike call; the first of them logs what was measured.

    Returns:
        The costs by name, in the units of `COST_UNITS`, equal on all ranks that plan alike.

    Raises:
        RuntimeError: A measurement failed; the message names the settings to give instead.
    """
    known = _MEASURED.setdefault(meter.buffers, {})
    for name in (each for each in names if each not in known):
        try:
            # Rounded as in the log, so that another run can be given exactly this cost.
            cost = float(f"{getattr(meter, name)():.4g}")
        except Exception as error:
            settings = " and ".join(f"balance.{each} ({COST_UNITS[each]})" for each in names)
            raise RuntimeError(
                f"{where}: balance.{name} could not be measured: {error}. Give numbers instead of "
                f"'auto' for {settings}"
            ) from error
        known[name] = cost
        if meter.group.rank() == 0:
            logger.info(
                "balance.%s=auto: measured %.4g %s (%d ranks, experts of %d bytes, with %d "
                "assignments each)",
                name,
                cost,
                COST_UNITS[name],
                meter.group.size(),
                meter.buffers.weight_bytes,
                meter.assignments_per_expert,
            )
    return {name: known[name] for name in names}


def neighbor_experts(layout: ExpertLayout) -> Tensor:
    """Return slots in which each rank holds experts of the rank before it in its NVLink domain.

    Every rank sends to one other rank and receives from one other rank, so all links are equally
    busy.

    >>> layout = ExpertLayout(num_experts=8, ep_size=4, slots=3, nvlink_domain=2)
    >>> neighbor_experts(layout).tolist()
    [[2, 3, -1], [0, 1, -1], [6, 7, -1], [4, 5, -1]]

    Returns:
        Logical expert in each slot, as many as fit, or -1: int32 [R, S], on the CPU.
    """
    ranks = torch.arange(layout.ep_size)
    first_of_domain = ranks - ranks % layout.nvlink_domain
    before = first_of_domain + (ranks - 1) % layout.nvlink_domain
    experts_in_slots = torch.full((layout.ep_size, layout.slots), -1, dtype=torch.int32)
    num_filled = min(layout.slots, layout.mains_per_rank)
    experts = before[:, None] * layout.mains_per_rank + torch.arange(num_filled)
    experts_in_slots[:, :num_filled] = experts.to(torch.int32)
    return experts_in_slots


_CPU = torch.device("cpu")


def slowest_s(
    work: Callable[[], object], group: ProcessGroup | None = None, device: torch.device = _CPU
) -> float:
    """Return the seconds of `work`, which all ranks begin together, on the slowest of them.

    All ranks of the group, by default of the world, call, and get the same value bit by bit. The
    work is done on the device, where it counts until it is done.
    """
    dist.barrier(group)
    _wait_for(device)
    started = perf_counter()
    work()
    _wait_for(device)
    elapsed_s = torch.tensor(perf_counter() - started, dtype=torch.float64, device=device)
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX, group=group)
    return float(elapsed_s)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
