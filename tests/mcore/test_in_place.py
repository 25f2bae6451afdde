"""Expert weights that are not where they seem are refused by name at the first forward.

Layer 2 (two gloo ranks).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import (
    STEP_TOLERANCE,
    balanced_gpt,
    balanced_layers,
    relative_distance,
)
from tests.ranks import run_ranks


def _shard(experts: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(experts)


def _free(experts: nn.Module) -> None:
    next(experts.parameters()).untyped_storage().resize_(0)


def _offload(experts: nn.Module) -> None:
    linear = experts.local_experts[0].linear_fc1
    linear.weight = nn.Parameter(linear.weight.to("meta"))


WEIGHT = r"layer 1: experts\.local_experts\.0\.linear_fc1\.weight"


def _first_forward(rank: int, displace: Callable[[nn.Module], None], reason: str) -> None:
    gpt = balanced_gpt(dict(ep=2), BalanceConfig())
    layer = balanced_layers(gpt)[0]
    displace(layer.experts)
    hidden = torch.randn(4, 1, layer.config.hidden_size)
    for call in (layer, layer.join_reduction):  # by itself, and in its transformer layer
        with pytest.raises(ValueError, match=f"{WEIGHT} {reason}"):
            call(hidden)


@pytest.mark.parametrize(
    ("displace", "reason"),
    [
        (_shard, "is a DTensor.*--use-torch-fsdp2"),
        (_free, r"has 0 of its \d+ bytes of memory"),
        (_offload, "is on meta and the layer's input on cpu"),
    ],
)
def test_weights_that_are_not_in_place_are_refused(
    displace: Callable[[nn.Module], None], reason: str
) -> None:
    run_ranks(_first_forward, 2, displace, reason)


@pytest.mark.parametrize(
    ("settings", "balance", "named"),
    [
        (dict(delay_wgrad_compute=True), {}, "delay_wgrad_compute"),
        (dict(overlap_moe_expert_parallel_comm=True), {}, "overlap_moe_expert_parallel_comm"),
        (
            dict(gradient_accumulation_fusion=True, add_bias_linear=True),
            {},
            "add_bias_linear and gradient_accumulation_fusion",
        ),
        ({}, dict(strategy="libra"), "balance.strategy=libra"),
        ({}, dict(local_first=True), "balance.local_first"),
        ({}, dict(objective="time"), "balance.objective=time"),
    ],
)
def test_what_needs_weights_at_other_times_is_refused_beside_megatron_fsdp(
    settings: dict[str, bool], balance: dict[str, Any], named: str
) -> None:
    from megatron_ext.mcore.in_place import check_beside_fsdp

    plain = dict(gradient_accumulation_fusion=False, add_bias_linear=False)
    for allowed in ({}, dict(gradient_accumulation_fusion=True), dict(add_bias_linear=True)):
        check_beside_fsdp(SimpleNamespace(**plain | allowed), BalanceConfig())
    with pytest.raises(ValueError, match=f"^{named}.* must not be set with Megatron-FSDP"):
        check_beside_fsdp(SimpleNamespace(**plain | settings), BalanceConfig(**balance))


def _in_another_precision(rank: int) -> None:
    """Trained in float32, evaluated and trained in bfloat16, and float32 again; without DDP."""
    outcomes = []
    for gpt in (build_gpt(ep=2), balanced_gpt(dict(ep=2), BalanceConfig(tolerance=0.0))):
        model, tokens = gpt.chunks[0].module, gpt.tokens(0, 0)[:, :-1]
        gpt.chunks[0].grad_accs.clear()  # With DDP's hooks.
        for parameter in model.parameters():
            del parameter.main_grad
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        found = []
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            model.to(dtype)
            with torch.no_grad():
                found.append(model(tokens, positions, None))
            model.zero_grad()
            model(tokens, positions, None).float().square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        outcomes.append(found)
    for expected, other in zip(*outcomes, strict=True):
        # In bfloat16 each replica's sum is rounded by itself.
        tolerance = 1e-2 if expected.dtype == torch.bfloat16 else STEP_TOLERANCE
        assert relative_distance(other, expected) <= tolerance
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"


def test_a_model_may_be_cast_between_its_forwards() -> None:
    run_ranks(_in_another_precision, 2)
