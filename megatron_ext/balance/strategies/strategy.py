"""What a balancer is; the registry in `__init__.py` lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.balance.layout import ExpertLayout
    from megatron_ext.balance.plan import BalancePlan


class Planner(Protocol):
    """A pure function from load to plan: equal input gives bit-equal output on every rank."""

    def __call__(
        self, load: Tensor, layout: ExpertLayout, *, tolerance: float, min_quota: int
    ) -> BalancePlan:
        """Plan an int64 load, [R, E] or [B, R, E], that `solve_plan` has checked; see there."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A balancer of the field; one constant per file of this folder."""

    name: str
    """The name in configs and on the command line."""

    kind: Literal["absent", "planner", "force_even"]
    """How it enters a model: not at all, by planning, or by forcing even routing."""

    solve: Planner | None
    """Its planner; None if it makes no plans."""

    num_slots: Callable[[int, int], int] = lambda asked, mains_per_rank: asked
    """Slots per rank that it plans for, given those asked for and the mains per rank."""
