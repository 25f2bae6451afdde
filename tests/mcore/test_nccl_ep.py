"""Tokens travel over NCCL EP to physical experts, and balanced training stays the same.

Layer 2, over a stand-in for Transformer Engine's part (`nccl_ep_on_cpu.py`). Compared bit by bit
with balanced layers whose tokens travel by the all-to-all dispatcher: K = 2, so that a token's sums
have two terms, and their order does not matter. Without copies: `tests/te/test_nccl_ep.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.mcore.test_partial_graphs import Case, train_with_and_without
from tests.ranks import run_ranks

from megatron.core import parallel_state  # isort: skip
from megatron.core.transformer.moe import token_dispatcher  # isort: skip

pytestmark = pytest.mark.skipif(
    not hasattr(token_dispatcher, "_NCCLEPManager"),
    reason="this version of Megatron-Core has no NCCL EP",
)

EXACT = BalanceConfig(tolerance=0.0)
BF16: dict[str, Any] = dict(dtype=torch.bfloat16, moe_router_dtype="fp32")
NCCL_EP: dict[str, Any] = dict(
    dispatcher="flex", moe_flex_dispatcher_backend="ncclep", moe_expert_rank_capacity_factor=2.0
)


def train(gpt: TinyGPT) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of three steps of two microbatches."""
    losses = [gpt.train_step(step, num_microbatches=2) for step in range(3)]
    return losses, gpt.parameters()


def differs_from_alltoall(settings: dict[str, Any], **over_nccl_ep: Any) -> tuple[list[str], int]:
    """Names of what differs between the dispatchers, and replicas."""
    from tests.nccl_ep_on_cpu import nccl_ep_on_cpu

    losses, expected = train(balanced_gpt(settings, EXACT))
    with nccl_ep_on_cpu() as nccl_ep:
        gpt = balanced_gpt(settings | NCCL_EP | over_nccl_ep, EXACT)
        found_losses, found = train(gpt)
        layers = balanced_layers(gpt)
        assert nccl_ep.num_dispatches >= 6 * len(layers)
        (set_up,) = nccl_ep.set_ups
        assert set_up["num_experts"] == layers[0].layout.num_physical
        parallel_state.destroy_model_parallel()
        assert not nccl_ep._BOOTSTRAPPED
    differ = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    if losses != found_losses:
        differ.append("losses")
    return differ, sum(layer.num_replicas for layer in layers)


def _training(rank: int, settings: dict[str, Any]) -> tuple[list[str], int]:
    return differs_from_alltoall(settings)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, dict(ep=2)),
    "4 ranks": (4, dict(ep=4, experts=8, shared_ffn=16)),
    "tensor parallel": (4, dict(ep=4, tp=2, experts=8)),
    "data parallel": (4, dict(ep=2, distributed_optimizer=True, overlap_grad_reduce=True)),
    "layer recomputed": (2, dict(ep=2, recompute="selective")),
    "overlapped": (2, dict(ep=2, overlap_moe_expert_parallel_comm=True)),
    "all recomputed": (2, dict(ep=2, recompute="full", grouped_mm=True)),
}


@pytest.mark.option("nccl_ep")
@pytest.mark.parametrize(("world_size", "settings"), CASES.values(), ids=CASES.keys())
def test_training_is_the_same_as_with_alltoall(world_size: int, settings: dict[str, Any]) -> None:
    for differ, replicas in run_ranks(_training, world_size, settings | BF16):
        assert differ == []
        assert replicas > 0


def _with_and_without_graphs(rank: int) -> tuple[int, int]:
    from tests.nccl_ep_on_cpu import nccl_ep_on_cpu

    with nccl_ep_on_cpu():
        return train_with_and_without(rank, Case(NCCL_EP | BF16))


@pytest.mark.option("nccl_ep")
def test_training_with_partial_graphs_is_the_same() -> None:
    for replicas, operations in run_ranks(_with_and_without_graphs, 2):
        assert min(replicas, operations) > 0


def _with_room_for_even_loads(rank: int) -> int:
    from tests.nccl_ep_on_cpu import nccl_ep_on_cpu

    settings = dict(ep=2, micro_batch_size=4) | BF16 | NCCL_EP
    settings |= dict(moe_expert_rank_capacity_factor=1.0)
    with nccl_ep_on_cpu(), pytest.raises(AssertionError, match="no room"):
        build_gpt(**settings).forward_backward()
    with nccl_ep_on_cpu():
        gpt = balanced_gpt(settings, EXACT)
        gpt.forward_backward()
    return sum(layer.num_replicas for layer in balanced_layers(gpt))


def test_balanced_ranks_need_room_for_even_loads_only() -> None:
    assert min(run_ranks(_with_room_for_even_loads, 2)) > 0


def _clashing(rank: int, first_is_balanced: bool) -> None:
    from tests.nccl_ep_on_cpu import nccl_ep_on_cpu

    settings = dict(ep=2) | BF16 | NCCL_EP
    with nccl_ep_on_cpu() as nccl_ep:
        balanced = balanced_gpt(settings, EXACT)
        plain = build_gpt(**settings)
        first, second = (balanced, plain) if first_is_balanced else (plain, balanced)
        first.forward_backward()
        for _ in range(2):
            with pytest.raises(ValueError, match=r"NCCL EP is set up for \d experts .* layer has"):
                second.forward_backward()
        first.forward_backward()
        assert len(nccl_ep.set_ups) == 1


@pytest.mark.parametrize("first_is_balanced", [True, False])
def test_layers_of_other_numbers_of_experts_are_refused(first_is_balanced: bool) -> None:
    run_ranks(_clashing, 2, first_is_balanced)


def _set_up_before(rank: int) -> None:
    from tests.nccl_ep_on_cpu import nccl_ep_on_cpu

    settings = dict(ep=2) | BF16 | NCCL_EP
    with nccl_ep_on_cpu() as nccl_ep:
        build_gpt(**settings).forward_backward()
        with pytest.raises(ValueError, match="set up for an unknown number of experts"):
            balanced_gpt(settings, EXACT).forward_backward()
        nccl_ep.ep_finalize()
        balanced_gpt(settings, EXACT).forward_backward()
        assert [each["num_experts"] for each in nccl_ep.set_ups] == [4, 8]


def test_a_set_up_from_before_balancing_is_refused() -> None:
    run_ranks(_set_up_before, 2)
