"""Numbers the experts of an EP group: logical and physical ids, home ranks, slots, NVLink domains.

Legend: E logical experts, R ranks of the EP group, M main experts per rank (E = R * M), S slots per
rank, P = R * (M + S) physical experts. Physical experts are numbered rank by rank, mains first,
then slots:

    R = 2, E = 4, M = 2, S = 1      rank 0 = 0:e0 1:e1 2:slot      rank 1 = 3:e2 4:e3 5:slot
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ext.config import check_fields, limits


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """Says which rank holds which expert; equal on all ranks of the EP group, for all microbatches.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> layout.physical_per_rank, layout.num_physical
    (3, 6)
    """

    num_experts: int = field(metadata=limits(least=1))
    """Logical experts (E)."""
    ep_size: int = field(metadata=limits(least=1))
    """Ranks of the EP group (R)."""
    slots: int = field(metadata=limits(least=0))
    """Replicas a rank can hold at a time (S)."""
    nvlink_domain: int = field(metadata=limits(least=1))
    """Ranks per NVLink domain; `ep_size` for one domain. Replicas stay in their home's domain."""

    def __post_init__(self) -> None:
        """Check the numbers against each other.

        Raises:
            ValueError: A rule is broken; the message names the rule, the field and the value.
        """
        check_fields(self)
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be a multiple of ep_size ({self.ep_size})"
            )
        if self.ep_size % self.nvlink_domain:
            raise ValueError(
                f"nvlink_domain ({self.nvlink_domain}) must divide ep_size ({self.ep_size})"
            )

    @property
    def mains_per_rank(self) -> int:
        """Main experts of a rank (M)."""
        return self.num_experts // self.ep_size

    @property
    def physical_per_rank(self) -> int:
        """Mains and slots of a rank (M + S)."""
        return self.mains_per_rank + self.slots

    @property
    def num_physical(self) -> int:
        """Mains and slots of all ranks (P)."""
        return self.ep_size * self.physical_per_rank

    def home_rank(self, expert: int) -> int:
        """Rank that holds the main of a logical expert."""
        return expert // self.mains_per_rank

    def domain(self, rank: int) -> int:
        """NVLink domain of a rank."""
        return rank // self.nvlink_domain
