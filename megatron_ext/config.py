"""Settings of a run: structured-config dataclasses, the only place with defaults.

Recipes (YAML) hold only differences from here; C++ has no defaults; no environment variable changes results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class BalanceConfig:
    """What the balancer may do. Must be equal on all ranks of an EP group (compared once at start)."""

    strategy: str = "quota"
    """Name of the balancer: a file of `megatron_ext.balance.strategies`. `none` leaves Megatron's own layer in place."""

    slots: int = 2
    """Replicas a rank can hold at a time (S). Costs S x (weights + gradients) of one expert per rank, whatever the
    number of layers. 2 is the paper's setting for 64 ranks (UltraEP, Table 3)."""

    tolerance: float = 0.01
    """Imbalance that is good enough, as a fraction of the mean rank load: the planner stops spending replicas there."""

    min_quota: int = 1
    """Fewest assignments a replica must take over to be worth its transfer."""

    transport: str = "auto"
    """How weights and gradients reach a peer's slot. `auto` picks by device and logs what it picked."""

    max_in_flight: int | str = "auto"
    """Microbatches of one layer between forward and backward at a time. `auto` is what the pipeline schedule needs."""

    nvlink_domain: int | str = "auto"
    """Ranks per NVLink domain; replicas stay in the home rank's domain. `auto` is the whole EP group."""

    check_plans: bool = False
    """Compare plan digests over the EP group in every microbatch (slow; finds ranks that plan differently)."""

    def __post_init__(self) -> None:
        """Check each field on its own; what depends on the model is checked where the model is known."""
        if self.slots < 0:
            raise ValueError(f"balance.slots ({self.slots}) must be >= 0")
        if not 0.0 <= self.tolerance:
            raise ValueError(f"balance.tolerance ({self.tolerance}) must be >= 0")
        if self.min_quota < 1:
            raise ValueError(f"balance.min_quota ({self.min_quota}) must be >= 1")
        for name in ("max_in_flight", "nvlink_domain"):
            value = getattr(self, name)
            if value != "auto" and not (isinstance(value, int) and value >= 1):
                raise ValueError(f"balance.{name} ({value!r}) must be 'auto' or an integer >= 1")
