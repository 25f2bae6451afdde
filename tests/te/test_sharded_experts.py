"""Experts whose weights are sharded by generalized tensor parallelism (GTP), balanced.

Layer 2: 2 EP ranks x 2 ranks of a GTP group, which have batches and plans of their own. Compared
with Megatron's own layers with the same shards. gloo has no coalesced collectives, so each is done
when it is issued, at its earliest: a gather into memory that is still read would show. Megatron has
two buffers for the layers in turn, and each is used more than once.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests import gpt
from tests.mcore.parity import Difference, balanced_gpt, balanced_layers, step_difference
from tests.ranks import run_ranks
from tests.te.test_experts import EXACT, GATED, HAS_BLOCKS, STEP_TOLERANCE, TE
from tests.te.test_overlap import FUSED

pytestmark = pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron-Core 0.16.1 has no such shards")

SHARDED: dict[str, Any] = (
    TE
    | GATED
    | dict(bias_activation_fusion=False, expert_tensor_parallel_num_weight_shards=2, num_layers=5)
)
IN_BACKWARD = dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)


@contextmanager
def _one_by_one(**_: Any) -> Iterator[Any]:
    yield types.SimpleNamespace(wait=lambda: None)


def _classified(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Build a model, and give its weights their chains, as Megatron's programs do."""
    from megatron.core.tensor_parallel.gtp_api import classify_gtp_remat_chains

    model = build(*args, **kwargs)
    classify_gtp_remat_chains(model.chunks)
    return model


@contextmanager
def sharding() -> Iterator[None]:
    """Let models have shards, over groups of 2 ranks."""
    from tests.mcore import parity

    start, build = gpt._start_parallelism, gpt.build_gpt
    with (
        mock.patch.object(gpt, "_start_parallelism", partial(start, expert_gtp_remat_size=2)),
        mock.patch.object(parity, "build_gpt", partial(_classified, build)),
        mock.patch.object(torch.distributed, "_coalescing_manager", _one_by_one),
    ):
        yield


def _steps(rank: int, settings: dict[str, Any]) -> Difference:
    with sharding():
        return step_difference(SHARDED | settings, num_microbatches=3, balance=EXACT)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fused": (4, FUSED),
    "not fused": (4, dict(shared_ffn=16)),
    "reduced in backward": (4, FUSED | IN_BACKWARD),
    "norms recomputed": (
        4,
        FUSED | dict(recompute_granularity="selective", recompute_modules=["layernorm", "moe_act"]),
    ),
    "a frozen linear": (4, FUSED | dict(frozen=r"\.experts\..*fc1")),
    "one expert a rank": (4, FUSED | dict(experts=2, topk=1)),
    "stages": (8, FUSED | dict(num_layers=8, pp=2)),
}


@pytest.mark.option("expert_shards")
@pytest.mark.parametrize(("world_size", "settings"), CASES.values(), ids=CASES.keys())
def test_training_equals_unbalanced_megatron(world_size: int, settings: dict[str, Any]) -> None:
    found = run_ranks(_steps, world_size, settings, timeout_s=300)
    for difference in found:
        assert difference.worst <= STEP_TOLERANCE, difference
    assert all(difference.replicas > 0 for difference in found), "nothing was tested"


def _unlike_plans(rank: int) -> list[bytes]:
    from tests.mcore import parity

    with sharding():
        model = parity.build_gpt(
            **SHARDED | FUSED | dict(experts=8),
            spec_transform=partial(parity.balanced, balance=EXACT),
        )
        plans: list[bytes] = []
        for layer in balanced_layers(model):
            layer.observers.append(
                lambda report: plans.append(report.experts_in_slots.numpy().tobytes())
            )
        model.forward_backward(num_microbatches=4)
        return plans


def test_ranks_of_a_gtp_group_have_plans_of_their_own() -> None:
    first, second, third, fourth = run_ranks(_unlike_plans, 4)
    assert first == second
    assert third == fourth
    assert first != third


def _refused(rank: int) -> None:
    with sharding():
        with pytest.raises(ValueError, match="must be 1 with SequentialMLP"):
            balanced_gpt(SHARDED | dict(moe_grouped_gemm=False), BalanceConfig())
        unclassified = gpt.build_gpt(
            **SHARDED, spec_transform=partial(_balanced, balance=BalanceConfig())
        )
        with pytest.raises(ValueError, match="call Megatron's classify_gtp_remat_chains"):
            unclassified.forward_backward()


def _balanced(spec: Any, balance: BalanceConfig) -> Any:
    from tests.mcore.parity import balanced

    return balanced(spec, balance)


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(_refused, 4)
