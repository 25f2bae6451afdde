"""What a balancer is; the registry in `__init__.py` lists them.

Legend: R ranks of the EP group, E logical experts, S slots per rank, B loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ext.config import BalanceConfig, check_plan_settings

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_ext.balance.costs import LayerCosts
    from megatron_ext.balance.layout import ExpertLayout
    from megatron_ext.balance.placement import Placement
    from megatron_ext.balance.plan import BalancePlan

_DEFAULTS = BalanceConfig()


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What planners are asked for, beside the layout; each takes what it knows.

    The fields of `BalanceConfig`, with its defaults, the costs of the layer, and what was placed.
    """

    tolerance: float = _DEFAULTS.tolerance
    min_quota: int = _DEFAULTS.min_quota
    interval: int = _DEFAULTS.interval
    alpha: float = _DEFAULTS.alpha
    locality_share: float = _DEFAULTS.locality_share
    min_tokens_per_gemm: int = _DEFAULTS.min_tokens_per_gemm
    costs: LayerCosts | None = None
    """Given where the plan is to be the fastest one instead of one within `tolerance`."""
    placement: Placement | None = None
    """The replicas of strategies that place none themselves; of others, the most slots a layer may
    use."""

    def __post_init__(self) -> None:
        """Check every number."""
        check_plan_settings(self)

    @classmethod
    def of(
        cls, balance: BalanceConfig, costs: LayerCosts | None, placement: Placement | None
    ) -> PlanSettings:
        """Take a run's settings."""
        names = set(cls.__dataclass_fields__) - {"costs", "placement"}
        settings = {name: getattr(balance, name) for name in names}
        return cls(**settings, costs=costs, placement=placement)

    def to_json(self) -> dict[str, Any]:
        """Return the settings; of a placement, the replicas of each layer."""
        told = dataclasses.asdict(dataclasses.replace(self, placement=None))
        if self.placement is not None:
            told["placement"] = self.placement.num_replicas()
        return told


class Solver(Protocol):
    """A pure function from load to plan: equal input gives bit-equal output on every rank."""

    def __call__(self, load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
        """Plan an int64 load, [R, E] or [B, R, E], that was checked; see `solve_plan`."""


class Placer(Protocol):
    """A pure function from past loads to the replicas of the loads to come."""

    def __call__(self, expert_load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> Tensor:
        """Place replicas by assignments of each expert, int64 [E]: slots as in a plan, [R, S]."""


class PredictedPlacer(Protocol):
    """A pure function from a predicted load to the replicas of that load."""

    def __call__(self, predicted: Tensor, layout: ExpertLayout, settings: PlanSettings) -> Tensor:
        """Place replicas by an int64 load [R, E]: slots as in a plan, int32 [R, S], on the CPU."""


class Filler(Protocol):
    """A pure function from a load, and replicas placed before it was known, to a plan."""

    def __call__(
        self, load: Tensor, slots: Tensor, layout: ExpertLayout, settings: PlanSettings
    ) -> BalancePlan:
        """Plan an int64 load, [R, E] or [B, R, E], with the replicas placed, int32 [R, S].

        Only a planner that places by prediction may add others.
        """


@dataclass(frozen=True)
class Solves:
    """Plans every load by itself, when it is known exactly."""

    solve: Solver


@dataclass(frozen=True)
class FromHistory:
    """Places replicas by the loads of the past, and shares every load among them."""

    place: Placer
    fill: Filler


@dataclass(frozen=True)
class FromPrediction:
    """Places replicas by a prediction of one load, and shares that load when it is known."""

    place: PredictedPlacer
    fill: Filler


@dataclass(frozen=True)
class FromPlacement:
    """Shares every load among the replicas of a `Placement`, placed before the run."""

    fill: Filler


@dataclass(frozen=True, kw_only=True)
class StaysMegatron:
    """Leaves a model Megatron's own layer."""

    offline: Solves | None = None
    """The plans that show what this amounts to; None if there is nothing to plan."""

    needs_semantics: bool = False
    """Whether a run's samples or tokens are to go to ranks by a file of semantics."""


@dataclass(frozen=True)
class ForcesEven:
    """Changes the router's choices to even ones."""


Planner = Solves | FromHistory | FromPrediction | FromPlacement
"""How a strategy comes to its plans. None of the functions remembers anything: the past is kept by
`LayerPlanner`."""


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A balancer; one constant per file of this folder, or of `methods/`."""

    name: str
    """The name in configs and on the command line."""

    summary: str
    """What it is, in one line."""

    kind: Planner | StaysMegatron | ForcesEven
    """How it balances a model."""

    num_slots: Callable[[int, int], int] = lambda asked, mains_per_rank: asked
    """Slots per rank that it plans for, given those asked for and the mains per rank."""

    package: str | None = None
    """What it imports beside the dependencies; the extra of its own name installs it."""

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
