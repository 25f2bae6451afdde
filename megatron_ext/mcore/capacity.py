"""Rows of a rank's buffer for arriving tokens, where Megatron limits them, and rows of plans.

With `moe_expert_rank_capacity_factor`, the buffer has a fixed size, which the host knows without
the device. HybridEP drops what does not fit. A plan says before the dispatch how many rows each
rank needs: one for each assignment and, in FP8 and FP4, the padding of each physical expert.

Legend: R ranks of the EP group, E logical experts, M mains and S slots per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_ext.balance.bounds import target_load
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.config import BalanceConfig

FIELD = "moe_expert_rank_capacity_factor"


@dataclass(frozen=True, kw_only=True)
class RankCapacity:
    """The limit of a layer's rows on a rank."""

    factor: float
    """Rows / choices of a rank's own tokens, before they are rounded up."""
    align: int
    """The number of rows is a multiple of this."""
    pad: int
    """The rows of a physical expert are padded to a multiple of this."""
    num_empty: int = 1
    """Rows at the end that are never used: HybridEP's last one, and none of NCCL EP."""

    @classmethod
    def of(cls, config: Any, factor: float) -> RankCapacity:
        """Return the limit of Megatron's `config` with this factor."""
        # Imported here, because Megatron-Core before 0.19 has neither limit nor function.
        from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

        align = max(get_align_size_for_quantization(config), 1)
        # Since Megatron-Core 0.20, rows for the op fuser in bf16 are padded, too.
        pads = config.fp8 or config.fp4 or getattr(config, "moe_use_grouped_tensor", False)
        return cls(
            factor=factor,
            align=align,
            pad=align if pads else 1,
            num_empty=int(config.moe_flex_dispatcher_backend == "hybridep"),
        )

    def rows(self, choices: int) -> int:
        """Return the rows of a buffer; `choices` are those of a rank's own tokens (N * K).

        >>> RankCapacity(factor=1.05, align=256, pad=1).rows(8192)
        8704
        """
        rows = int(choices * self.factor)
        return rows + -rows % self.align

    def rows_over(self, quota: Tensor, choices: int) -> Tensor:
        """Return the rows beyond the limit on each rank, int64 [R], of a plan's quota [E, R].

        These are what HybridEP drops: assignments and, in FP8 and FP4, padding.

        >>> import torch
        >>> capacity = RankCapacity(factor=1.0, align=4, pad=1)
        >>> capacity.rows_over(torch.tensor([[5, 3], [5, 0]]), 8).tolist()
        [3, 0]
        """
        rows = ((quota + self.pad - 1) // self.pad * self.pad).sum(0)
        return (rows - self.rows(choices) + self.num_empty).clamp(min=0)

    def least_factor(
        self, choices: int, layout: ExpertLayout, tolerance: float, *, num_shards: int = 1
    ) -> float:
        """Return the least factor, in thousandths, with which no plan within a tolerance drops.

        It is at least 1 + tolerance, so that it holds for many tokens as well. `num_shards` ranks
        share an expert, and each of them gets the tokens of all.

        >>> layout = ExpertLayout(num_experts=256, ep_size=64, slots=2, nvlink_domain=64)
        >>> RankCapacity(factor=1.5, align=256, pad=1).least_factor(32768, layout, 0.01)
        1.01
        >>> RankCapacity(factor=1.5, align=256, pad=256).least_factor(32768, layout, 0.01)
        1.055
        """
        total, ranks = choices * num_shards * layout.ep_size, layout.ep_size
        most = target_load(total, ranks, round(tolerance * 1e6))
        most += layout.physical_per_rank * (self.pad - 1)
        # Padded experts have whole multiples together.
        rows = most - most % self.pad + self.num_empty
        rows += -rows % self.align
        # The least number that is rounded up to these rows, and Megatron rounds the product down.
        needed = rows - self.align + 1
        thousandths = math.ceil(1000 * needed / choices)
        thousandths += int(choices * (thousandths / 1000)) < needed
        return max(thousandths / 1000, round(1 + tolerance, 3))


def promised_tolerance(balance: BalanceConfig) -> float | None:
    """Return the tolerance that plans reach wherever a legal plan can; None without a promise."""
    reaches = get_strategy(balance.strategy).reaches
    return None if reaches is None or balance.plans_for_time else reaches(balance.tolerance)


def too_small(factor: float, least: float, why: str) -> str:
    """Return the problem with a factor, and the way out."""
    return (
        f"{FIELD} ({factor}) must be >= {least} with {why}, or tokens are dropped although plans "
        f"are as even as they should be (set --{FIELD.replace('_', '-')} {least}, or a smaller "
        "balance.tolerance)"
    )


def require_room(
    config: Any, balance: BalanceConfig, layout: ExpertLayout, choices: int, num_shards: int
) -> None:
    """Check that plans as even as the strategy promises leave nothing out; see `least_factor`.

    Raises:
        ValueError: The factor is too small.
    """
    capacity = RankCapacity.of(config, getattr(config, FIELD))
    tolerance = promised_tolerance(balance)
    if tolerance is None or layout.slots == 0:
        return
    least = capacity.least_factor(choices, layout, tolerance, num_shards=num_shards)
    if capacity.factor < least:
        padding = f", padded to {capacity.pad} rows" if capacity.pad > 1 else ""
        why = (
            f"{choices} choices of a rank, balance.tolerance={balance.tolerance} and "
            f"{layout.physical_per_rank} experts and slots on a rank{padding}"
        )
        raise ValueError(too_small(capacity.factor, least, why))
