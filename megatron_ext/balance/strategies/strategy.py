"""Defines the interface of a balancer; the registry in `__init__.py` lists all balancers.

Legend: R ranks of the EP group, E logical experts, S slots per rank, B loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from megatron_ext.config import BalanceConfig, Section, field_problems

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.balance.costs import LayerCosts
    from megatron_ext.balance.layout import ExpertLayout
    from megatron_ext.balance.placement import Placement
    from megatron_ext.balance.plan import BalancePlan

_DEFAULTS = BalanceConfig()

SomeSection = TypeVar("SomeSection", bound=Section)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of a plan beside the layout; a planner ignores settings that it does not use.

    Its fields are some of `BalanceConfig`, with the same defaults; strategies' own settings; the
    costs of the layer; and replicas placed before the run.
    """

    tolerance: float = _DEFAULTS.tolerance
    min_quota: int = _DEFAULTS.min_quota
    sections: tuple[Section, ...] = ()
    """Strategies' own settings; a missing section has its defaults."""
    costs: LayerCosts | None = None
    """If given, the plan is to be the fastest, instead of one within `tolerance`."""
    placement: Placement | None = None
    """Replicas for strategies that place none themselves; for others, it limits a layer's slots."""

    def __post_init__(self) -> None:
        """Check every number.

        Raises:
            ValueError: With all problems.
        """
        problems = field_problems(BalanceConfig, self, ("tolerance", "min_quota"))
        for section in self.sections:
            problems += (
                section.problems()
                if isinstance(section, Section)
                else [f"sections ({section!r}) must be sections, as LlepSettings(alpha=1.5)"]
            )
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def of(
        cls, balance: BalanceConfig, costs: LayerCosts | None, placement: Placement | None
    ) -> PlanSettings:
        """Take a run's settings."""
        return cls(
            tolerance=balance.tolerance,
            min_quota=balance.min_quota,
            sections=tuple(balance.sections()),
            costs=costs,
            placement=placement,
        )

    def section(self, kind: type[SomeSection]) -> SomeSection:
        """Return the section of that class."""
        found = (section for section in self.sections if isinstance(section, kind))
        return next(found, None) or kind()


Solver: TypeAlias = "Callable[[Tensor, ExpertLayout, PlanSettings], BalancePlan]"
"""Plans an int64 load, [R, E] or [B, R, E], that was checked; see `solve`. This function and those
below are pure: equal input gives bit-equal output on every rank."""

Placer: TypeAlias = "Callable[[Tensor, ExpertLayout, PlanSettings], Tensor]"
"""Places replicas, an `experts_in_slots` int32 [R, S], before the load to be planned is known."""

Sharer: TypeAlias = "Callable[[Tensor, Tensor, ExpertLayout, PlanSettings], BalancePlan]"
"""Plans an int64 load, [R, E] or [B, R, E], with replicas that were placed before the load was
known, int32 [R, S]. Only a planner that places by prediction may add others."""


@dataclass(frozen=True)
class Solves:
    """Plans every load by itself, when it is known exactly."""

    solve: Solver


@dataclass(frozen=True)
class FromHistory:
    """Places replicas by the loads of the past, and shares every load among them."""

    place: Placer
    """Gets the assignments of each expert, int64 [E]."""
    share: Sharer


@dataclass(frozen=True)
class FromPrediction:
    """Places replicas by a prediction of one load, and shares that load when it is known."""

    place: Placer
    """Gets an int64 load [R, E]; the replicas are on the CPU."""
    share: Sharer


@dataclass(frozen=True)
class FromPlacement:
    """Shares every load among the replicas of a `Placement`, placed before the run."""

    share: Sharer


@dataclass(frozen=True, kw_only=True)
class StaysMegatron:
    """Leaves a model Megatron's own layer."""

    offline: Solves | None = None
    """Plans that stand for it where strategies are compared; None if there is nothing to plan."""
    needs: tuple[str, ...] = ()
    """Settings of a training run, one of which has to name the file that the strategy follows."""


@dataclass(frozen=True)
class ForcesEven:
    """Replaces the router's choices by even routing."""


Planner = Solves | FromHistory | FromPrediction | FromPlacement
"""How a strategy comes to its plans. The functions are pure: `LayerPlanner` keeps the history."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A balancer: a constant of a file of this folder, or of `methods/`."""

    name: str
    """The name in configs and on the command line."""
    summary: str
    """What it is, in one line."""
    kind: Planner | StaysMegatron | ForcesEven
    """How it balances a model."""
    num_slots: Callable[[int, int], int] = lambda asked, mains_per_rank: asked
    """Slots per rank that it plans for, given those asked for and the mains per rank."""
    reaches: Callable[[float], float] | None = None
    """The tolerance that its plans reach wherever a legal plan can, given that asked for; None if
    it promises none."""
    plans_on_device: bool = False
    """Whether the plan of a load on a GPU is made there, without the host."""
    package: str | None = None
    """A package that the strategy imports; the extra of the strategy's name installs it."""

    @property
    def planner(self) -> Planner | None:
        """How it plans, offline too; None if there is nothing to plan."""
        if isinstance(self.kind, StaysMegatron):
            return self.kind.offline
        return None if isinstance(self.kind, ForcesEven) else self.kind

    @property
    def predicts(self) -> bool:
        """Whether it places replicas by a prediction of the load to come."""
        return isinstance(self.kind, FromPrediction)
