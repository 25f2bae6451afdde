"""What methods add to a layer (no processes), and what the plan says instead of an exchange.

Layer 2: two and four gloo ranks. Sizes are compared with those that Megatron's dispatcher counts.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.mcore.parity import balanced_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks

from megatron.core.transformer.moe.token_dispatcher import (  # isort: skip
    MoEAlltoAllTokenDispatcher,
)
from megatron_ext.balance import strategies  # isort: skip
from megatron_ext.mcore import dispatcher, spec  # isort: skip
from megatron_ext.mcore.moe_layer import BalancedMoELayer  # isort: skip

SIZES = ("input_splits", "output_splits", "num_global_tokens_per_local_expert")
"""Sizes that Megatron's `preprocess` leaves, with tensor parallelism of 1."""


def test_methods_add_to_the_layer_what_settings_ask_for() -> None:
    from megatron_ext.methods.libra.local_first import LocalFirstMoELayer
    from megatron_ext.methods.libra.lookahead import LookaheadMoELayer

    assert spec.balanced_layer_class(BalanceConfig()) is BalancedMoELayer
    assert spec.balanced_layer_class(BalanceConfig(strategy="libra")) is LookaheadMoELayer
    assert spec.balanced_layer_class(BalanceConfig(local_first=True)) is LocalFirstMoELayer
    both = spec.balanced_layer_class(BalanceConfig(strategy="libra", local_first=True))
    assert both.__bases__ == (LookaheadMoELayer, LocalFirstMoELayer)


def test_without_methods_nothing_is_added() -> None:
    with mock.patch.object(strategies, "table_of_methods", return_value={}):
        assert spec.balanced_layer_class(BalanceConfig(local_first=True)) is BalancedMoELayer


def _counted_and_planned(
    rank: int, case: dict[str, Any], balance: BalanceConfig
) -> list[tuple[bool, bool]]:
    """Whether each pass had gradients, and whether it had sizes from the plan."""
    passes = []
    ours = dispatcher.PlannedDispatcher.preprocess

    def both(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        with mock.patch.object(
            MoEAlltoAllTokenDispatcher,
            "preprocess",
            autospec=True,
            side_effect=MoEAlltoAllTokenDispatcher.preprocess,
        ) as counting:
            found = ours(self, routing_map)
        is_planned = not counting.called
        passes.append((torch.is_grad_enabled(), is_planned))
        if is_planned:
            sizes = {name: getattr(self, name) for name in SIZES}
            rest = self.num_out_tokens, self.cuda_sync_point
            assert torch.equal(found, MoEAlltoAllTokenDispatcher.preprocess(self, routing_map))
            for name, value in sizes.items():
                assert torch.equal(value, getattr(self, name)), name
            assert rest == (self.num_out_tokens, self.cuda_sync_point)
        return found

    with mock.patch.object(dispatcher.PlannedDispatcher, "preprocess", both):
        balanced_gpt(case, balance).forward_backward()
    return passes


EXACT = BalanceConfig(tolerance=0.0)
PLANNED = [(True, True)] * 2
COUNTED = [(True, False)] * 2
PADDED = dict(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)


@pytest.mark.parametrize(
    ("world_size", "case", "balance", "passes"),
    [
        (2, dict(ep=2), EXACT, PLANNED),
        (4, dict(ep=4, experts=4, shared_ffn=8), EXACT, PLANNED),
        # Ranks that do not all reach each other gather the seals by a collective.
        (2, dict(ep=2), BalanceConfig(tolerance=0.0, transport="collective"), PLANNED),
        (4, dict(ep=4, experts=8), BalanceConfig(tolerance=0.0, nvlink_domain=2), PLANNED),
        (2, dict(ep=2, moe_expert_capacity_factor=1.0), EXACT, PLANNED),
        (2, dict(ep=2, **PADDED), EXACT, COUNTED),
        (2, dict(tp=2, etp=2), EXACT, COUNTED),
        # The first pass is planned. The router may choose otherwise in the second.
        (2, dict(ep=2, recompute="full"), EXACT, [(False, True)] * 2 + COUNTED),
    ],
    ids=[
        *("2 ranks", "an expert a rank", "collective", "domains", "dropped", "padded"),
        *("shards", "recomputed"),
    ],
)
def test_the_plan_says_what_megatron_would_count(
    world_size: int, case: dict[str, Any], balance: BalanceConfig, passes: list[tuple[bool, bool]]
) -> None:
    assert run_ranks(_counted_and_planned, world_size, case, balance) == [passes] * world_size
