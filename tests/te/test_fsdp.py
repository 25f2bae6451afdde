"""Experts of which Megatron-FSDP keeps shards, and which it gathers for their layer, balanced.

Layer 2: EP ranks x ranks of data parallelism. Compared with Megatron's own layers under Megatron-
FSDP, whose memory is freed behind each layer: replicas that were copied too late would not be
equal. gloo cannot scale in a reduction, so gradients are scaled before it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.config import BalanceConfig
from tests import gpt
from tests.gpt import TinyGPT
from tests.mcore import inside
from tests.mcore.covering import of_this_version
from tests.mcore.parity import (
    Difference,
    balanced_gpt,
    balanced_layers,
    relative_distance,
    step_difference,
)
from tests.mcore.test_failures import EXPECTED, LateTransport
from tests.ranks import run_ranks
from tests.te.quantized import EXPERTS, GRADIENTS_OF_BFLOAT16, in_format
from tests.te.test_experts import EXACT, GATED, HAS_BLOCKS, STEP_TOLERANCE, TE
from tests.te_quantized_on_cpu import GPU, answer_like

from megatron_ext.mcore.between_steps import check_agreement, reset_after_abort  # isort: skip

SHARDS: dict[str, Any] = dict(
    use_megatron_fsdp=True,
    data_parallel_sharding_strategy="optim_grads_params",
    gradient_reduce_div_fusion=False,
    bucket_size=None,
)
OVERLAPPED = dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
SHARDED = OVERLAPPED | dict(ddp=SHARDS, gradient_accumulation_fusion=False)
FUSED = SHARDED | dict(gradient_accumulation_fusion=True)


class _Here(str):
    """The CPU, which calls itself a GPU by its number."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


def _at_once(collective: Any) -> Any:
    return lambda *args, **kwargs: collective(*args, **kwargs | {"async_op": False})


def _wrapped(config: Any, modules: list[torch.nn.Module], ddp: Any) -> list[Any]:
    """Wrap a model as Megatron's programs do with `--use-megatron-fsdp`."""
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    chunks = [FullyShardedDataParallel(config, ddp, module) for module in modules]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = chunks[0].no_sync
    return chunks


def _shards(model: TinyGPT) -> dict[str, Tensor]:
    for chunk in model.chunks:
        chunk.module._replace_param_with_distributed_if_needed()
    return {name: value.to_local().detach().clone() for name, value in model.named_parameters()}


def _gradients(model: TinyGPT) -> dict[str, Tensor]:
    named = [(name, value.grad) for name, value in model.named_parameters()]
    return {name: grad.to_local().clone() for name, grad in named if grad is not None}


@contextmanager
def sharding(**groups: int) -> Iterator[None]:
    """Let models be wrapped in Megatron-FSDP; `parameters` and `gradients` are a rank's shards.

    `groups` are sizes of process groups.
    """
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    names, start = gpt._global_names, gpt._start_parallelism
    done = nullcontext(SimpleNamespace(wait=lambda: None))
    with (
        # At once: what is still gathered when a test ends would be written where a model was.
        mock.patch.object(buffers, "_coalescing_manager", return_value=done),
        mock.patch.object(dist, "all_gather_into_tensor", _at_once(dist.all_gather_into_tensor)),
        mock.patch.object(gpt, "_start_parallelism", partial(start, **groups)),
        mock.patch.object(gpt, "wrap_in_ddp", _wrapped),
        mock.patch.object(gpt, "_global_names", lambda m: names(getattr(m, "module", m))),
        mock.patch.object(TinyGPT, "parameters", _shards),
        mock.patch.object(TinyGPT, "gradients", _gradients),
        mock.patch.object(torch.cuda, "current_device", return_value=_Here("cpu")),
        # Without it, Megatron refuses the op fuser for gated experts.
        mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"),
    ):
        yield


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "sequential": (4, dict(ep=2) | SHARDED),
    "grouped": (4, TE | GATED | SHARDED),
    "grouped, fused": (4, TE | GATED | FUSED),
}
"""With each version of Megatron-Core."""
CASES |= of_this_version(
    {
        "sequential, fused": (4, dict(ep=2) | FUSED),
        "one data-parallel rank": (2, dict(ep=2) | SHARDED),
        "biases": (4, dict(ep=2, add_bias_linear=True) | SHARDED),
        "recomputed": (4, TE | GATED | FUSED | dict(recompute="selective")),
    }
)
if HAS_BLOCKS:
    # Before, Megatron-FSDP gathers nothing for them, and frozen parameters end it.
    ACTS = dict(recompute_granularity="selective", recompute_modules=["layernorm", "moe_act"])
    CASES["activations recomputed"] = 4, TE | GATED | FUSED | ACTS
    CASES["a frozen linear"] = 4, TE | GATED | FUSED | dict(frozen=r"\.experts\..*fc1")
    IN_BLOCKS = TE | GATED | dict(moe_mlp_glu_interleave_size=4)
    CASES["op fuser"] = 4, IN_BLOCKS | FUSED | dict(use_transformer_engine_op_fuser=True)


def _steps(rank: int, settings: dict[str, Any]) -> Difference:
    with sharding():
        return _difference(settings)


def _difference(settings: dict[str, Any]) -> Difference:
    # In a third step, layers get memory again that they had before.
    return step_difference(settings, num_steps=3, num_microbatches=3, balance=EXACT)


@pytest.mark.option("megatron_fsdp")
@pytest.mark.parametrize(("world_size", "settings"), CASES.values(), ids=CASES.keys())
def test_training_equals_unbalanced_megatron(world_size: int, settings: dict[str, Any]) -> None:
    found = run_ranks(_steps, world_size, settings, timeout_s=300)
    for difference in found:
        assert difference.worst <= STEP_TOLERANCE, difference
    assert all(difference.replicas > 0 for difference in found), "nothing was tested"


IN_16_BITS = dict(
    megatron_fsdp_main_params_dtype=torch.float32,
    megatron_fsdp_main_grads_dtype=torch.bfloat16,
    megatron_fsdp_grad_comm_dtype=torch.bfloat16,
)
# Without what is gathered ahead, so that a push would read memory that is not there yet.
NATIVE = dict(
    fp8_param_gather=True, keep_fp8_transpose_cache=False, suggested_communication_unit_size=1
)
BFLOAT16 = dict(dtype=torch.bfloat16)
FIRST_STEPS: dict[str, dict[str, Any]] = {
    "gradients in 16 bits": TE | GATED | SHARDED | BFLOAT16 | dict(ddp=SHARDS | IN_16_BITS),
    "fused, sent in 16 bits": (
        TE
        | GATED
        | FUSED
        | BFLOAT16
        | dict(ddp=SHARDS | IN_16_BITS | dict(megatron_fsdp_main_grads_dtype=torch.float32))
    ),
    "mxfp8": EXPERTS | in_format("mxfp8") | FUSED | BFLOAT16,
    "parameters in mxfp8": (
        EXPERTS | in_format("mxfp8", native=True) | FUSED | BFLOAT16 | dict(ddp=SHARDS | NATIVE)
    ),
}


def _first_step(rank: int, settings: dict[str, Any]) -> tuple[bool, float]:
    """Whether logits are equal, and how far apart the gradients of experts are."""
    if recipe := settings.get("fp8_recipe"):
        answer_like(GPU[recipe])
    with sharding():
        stock, balanced = gpt.build_gpt(**settings), balanced_gpt(settings, EXACT)
        expected, found = (each.forward_backward(num_microbatches=3) for each in (stock, balanced))
        apart = {
            name: relative_distance(balanced.gradients()[name], grad)
            for name, grad in stock.gradients().items()
            if ".experts." in name and grad.numel()
        }
    assert sum(layer.num_replicas for layer in balanced_layers(balanced)) > 0
    assert apart, "experts have gradients"
    pairs = zip(expected, found, strict=True)
    return all(torch.equal(one["logits"], other["logits"]) for one, other in pairs), max(
        apart.values()
    )


ONLY_NEW = pytest.mark.skipif(
    not HAS_BLOCKS, reason="Megatron-FSDP of 0.16.1 has no such settings, or ends itself with them"
)


@ONLY_NEW
@pytest.mark.parametrize("settings", FIRST_STEPS.values(), ids=FIRST_STEPS.keys())
def test_a_first_step_in_16_bits_equals_unbalanced_megatron(settings: dict[str, Any]) -> None:
    for are_equal, apart in run_ranks(_first_step, 4, settings, timeout_s=300):
        assert are_equal
        assert apart <= GRADIENTS_OF_BFLOAT16


def _hybrid_steps(rank: int, settings: dict[str, Any]) -> Difference:
    with sharding(num_distributed_optimizer_instances=2):
        return _difference(settings)


@ONLY_NEW
def test_training_with_shards_of_shards_equals_unbalanced_megatron() -> None:
    outer = dict(num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim")
    settings = TE | GATED | FUSED | dict(ddp=SHARDS | outer)
    found = run_ranks(_hybrid_steps, 8, settings, timeout_s=300)
    assert all(difference.worst <= STEP_TOLERANCE for difference in found), found
    assert all(difference.replicas > 0 for difference in found), "nothing was tested"


def _fail_late(rank: int) -> None:
    made: list[LateTransport] = []

    def make(name: str, ep_group: Any, *_: Any) -> LateTransport:
        made.append(LateTransport(ep_group))
        return made[-1]

    with sharding(), mock.patch(inside.MAKE_TRANSPORT, make):
        balance = BalanceConfig(slots=1, tolerance=0.0, transport="collective")
        model = balanced_gpt(dict(ep=2, topk=1, experts=8) | SHARDED, balance)
        model.train_step(0, num_microbatches=2)
        before = model.parameters()
        made[0].fails_next = rank == 3
        model.forward_backward(1, num_microbatches=2)
        with pytest.raises(RuntimeError, match=EXPECTED):
            model.optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.parameters().items())
        with pytest.raises(RuntimeError, match=EXPECTED):
            check_agreement(model.chunks)
        dist.barrier()

        reset_after_abort(model.chunks)
        model.train_step(1, num_microbatches=2)
        assert not all(torch.equal(value, before[n]) for n, value in model.parameters().items())


def test_a_failed_wait_changes_no_weight_on_any_rank() -> None:
    run_ranks(_fail_late, 4)


def _refused(rank: int) -> None:
    with sharding():
        balance = BalanceConfig(local_first=True)
        with pytest.raises(ValueError, match=r"balance\.local_first must not be set with Megat"):
            balanced_gpt(dict(ep=2) | SHARDED, balance).forward_backward()
        biased = dict(ep=2, add_bias_linear=True)
        with pytest.raises(ValueError, match="add_bias_linear and gradient_accumulation_fusion"):
            balanced_gpt(biased | FUSED, EXACT).forward_backward()
        balanced_gpt(biased | SHARDED, EXACT).forward_backward()


def test_what_needs_weights_at_other_times_is_refused() -> None:
    run_ranks(_refused, 2)
