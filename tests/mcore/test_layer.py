"""The balanced layer in the corners: odd loads and sizes, evaluation, aborts, wrong settings.

Layer 2 (2 to 4 gloo ranks). Outputs, input gradients and weight gradients of single layers are
compared with Megatron's own layer in float64; counts and bytes are compared exactly.
"""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import (
    SEQUENCE,
    TinyGPT,
    TransformerConfig,
    build_gpt,
)  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron_ext.mcore import limits  # isort: skip
from megatron_ext.mcore.limits import validate_for_balancing  # isort: skip
from megatron_ext.mcore.spec import balance_spec, name_stages  # isort: skip
from megatron_ext.mcore.stages import NamedMoELayer  # isort: skip

HIDDEN = 16
TOLERANCE = 1e-12
EXACT = BalanceConfig(tolerance=0.0)


def layer_outcome(gpt: TinyGPT, hidden: torch.Tensor, upstream: torch.Tensor) -> dict[str, Any]:
    """Forward and backward of the first MoE layer alone."""
    gpt.chunks[0].zero_grad_buffer()
    layer = gpt.chunks[0].module.decoder.layers[0].mlp
    hidden = hidden.clone().requires_grad_()
    output, _ = layer(hidden)
    output.backward(upstream)
    gradients = {
        f"grad {name}": value for name, value in gpt.gradients().items() if "layers.0.mlp" in name
    }
    return {"output": output.detach(), "input grad": hidden.grad, **gradients}


def assert_close(expected: dict[str, Any], found: dict[str, Any], tolerance: float) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        distance, scale = float((found[name] - value).norm()), float(value.norm())
        assert distance <= tolerance * scale, f"{name}: {distance} of {scale}"


def plain_route(layer: Any, hidden: torch.Tensor, *_: Any) -> Any:
    """Top-k routing without Megatron's router, which takes no rank without tokens."""
    logits = hidden.flatten(0, 1) @ layer.router.weight.T
    chosen = logits.topk(layer.config.moe_router_topk).indices
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return logits.softmax(1) * routing_map, routing_map


def _odd_sizes(rank: int, sizes: list[int], one_expert: bool, case: dict[str, Any]) -> int:
    plain = build_gpt(**case, dtype=torch.float64)
    gpt = balanced_gpt(case, EXACT, dtype=torch.float64)
    for model in (plain, gpt):
        layer = model.chunks[0].module.decoder.layers[0].mlp
        layer.route = partial(plain_route, layer)
        if one_expert:
            layer.router.weight.data[0] = 10.0
    generator = torch.Generator().manual_seed(rank)
    shape = (sizes[rank], 1, HIDDEN)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Positive inputs and a large row of weights: the router chooses expert 0 for every token.
    hidden = hidden.abs() if one_expert else hidden
    upstream = torch.randn(shape, generator=generator, dtype=torch.float64)
    for _ in range(3):
        expected = layer_outcome(plain, hidden, upstream)
        assert_close(expected, layer_outcome(gpt, hidden, upstream), TOLERANCE)
    return sum(layer.num_replicas for layer in balanced_layers(gpt))


@pytest.mark.parametrize(
    ("sizes", "one_expert", "case"),
    [
        ([0, 40], False, dict(ep=2)),
        ([40, 0], True, dict(ep=2, topk=1)),
        ([33, 5], False, dict(ep=2, recompute="selective")),
        ([24, 24], True, dict(ep=2, topk=1)),
        ([7, 50, 0, 21], True, dict(ep=4, topk=1, experts=8)),
    ],
)
def test_odd_token_counts(sizes: list[int], one_expert: bool, case: dict[str, Any]) -> None:
    replicas = run_ranks(_odd_sizes, len(sizes), sizes, one_expert, case)
    assert len(set(replicas)) == 1
    assert replicas[0] > 0


def _no_tokens_at_all(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2), EXACT, dtype=torch.float64)
    layer = gpt.chunks[0].module.decoder.layers[0].mlp
    layer.route = partial(plain_route, layer)
    empty = torch.zeros(0, 1, HIDDEN, dtype=torch.float64)
    outcome = layer_outcome(gpt, empty, empty)
    assert outcome["output"].shape == empty.shape
    assert all(not value.any() for value in outcome.values())


def test_no_tokens_on_any_rank() -> None:
    run_ranks(_no_tokens_at_all, 2)


def _abort_in_different_places(rank: int) -> None:
    """Rank 0 has started to push when it fails, rank 1 has neither sealed its plan nor offered its
    slots."""
    from megatron_ext import reset_after_abort

    case = dict(ep=2)
    clean, aborted = balanced_gpt(case, EXACT), balanced_gpt(case, EXACT)
    assert clean.train_step(0) == aborted.train_step(0)
    place = (
        mock.patch(inside.REROUTE, side_effect=ArithmeticError)
        if rank == 0
        else mock.patch(inside.SHARE, side_effect=ArithmeticError)
    )
    failures = []
    for _ in range(3):
        with place:
            try:
                aborted.forward_backward()
            except ArithmeticError as error:
                failures.append(error)  # and with it the graph: its plans stay in flight
        reset_after_abort(aborted.chunks)
    assert len(failures) == 3
    for step in range(1, 3):
        assert clean.train_step(step) == aborted.train_step(step)
    for name, value in clean.parameters().items():
        assert torch.equal(aborted.parameters()[name], value)


def test_ranks_that_failed_in_different_places_go_on_after_a_reset() -> None:
    run_ranks(_abort_in_different_places, 2)


def _reset(rank: int) -> None:
    """What waits for the device comes when no device waits for a peer any more: in any transport,
    for a stream that one transport's reset waits for, and at all, for the seals."""
    from megatron_ext import reset_after_abort

    chunks = []
    for ffn in (32, 64):
        gpt = balanced_gpt(dict(ep=2, ffn=ffn), EXACT)
        gpt.train_step(0)
        chunks += gpt.chunks
    done = mock.Mock()
    with (
        mock.patch(inside.CANCEL_WAITS, done.cancel),
        mock.patch(inside.RESET_SLOTS, done.reset),
        mock.patch(inside.FORGET_SEALS, done.forget),
    ):
        reset_after_abort(chunks)
    call = mock.call
    assert done.mock_calls == [call.cancel()] * 2 + [call.reset()] * 2 + [call.forget()]


def test_no_device_waits_for_a_peer_when_a_reset_waits_for_it() -> None:
    run_ranks(_reset, 2)


def _no_slots(rank: int, ep: int, slots: int) -> None:
    case = dict(ep=ep, num_layers=2)
    plain = build_gpt(**case)
    gpt = balanced_gpt(case, BalanceConfig(slots=slots, tolerance=0.0))
    for step in range(3):
        assert plain.train_step(step) == gpt.train_step(step)
    expected, found = plain.parameters(), gpt.parameters()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("world_size", "ep", "slots"), [(2, 2, 0), (1, 1, 2), (2, 1, 2)])
def test_nothing_to_replicate_is_bit_equal(world_size: int, ep: int, slots: int) -> None:
    run_ranks(_no_slots, world_size, ep, slots)


def _evaluate_in_between(rank: int) -> None:
    case = dict(ep=2)
    quiet, busy = balanced_gpt(case, EXACT), balanced_gpt(case, EXACT)
    for step in range(4):
        loss = quiet.train_step(step)
        before = [layer.num_replicas for layer in balanced_layers(busy)]
        with torch.no_grad():
            busy.forward_backward(100 + step, forward_only=True)
        assert [layer.num_replicas for layer in balanced_layers(busy)] == before, (
            "evaluation was counted"
        )
        assert busy.train_step(step) == loss
    for layer in balanced_layers(busy):
        assert inside.in_flight(layer) == 0


def test_evaluation_in_the_middle_of_training_changes_nothing() -> None:
    run_ranks(_evaluate_in_between, 2)


def _evaluate_between_forward_and_backward(rank: int) -> None:
    case = dict(ep=2)
    plain, gpt = (
        build_gpt(**case, dtype=torch.float64),
        balanced_gpt(case, EXACT, dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(rank)
    hidden, other, upstream = torch.randn(
        3, 32, 1, HIDDEN, generator=generator, dtype=torch.float64
    )
    expected = layer_outcome(plain, hidden, upstream)

    gpt.chunks[0].zero_grad_buffer()
    layer = gpt.chunks[0].module.decoder.layers[0].mlp
    hidden = hidden.clone().requires_grad_()
    output, _ = layer(hidden)
    with torch.no_grad():
        layer(other)
    for slot_weights in inside.slot_weights(layer):
        slot_weights.fill_(float("nan"))
    output.backward(upstream)
    gradients = {f"grad {n}": g for n, g in gpt.gradients().items() if "layers.0.mlp" in n}
    assert_close(
        expected, {"output": output.detach(), "input grad": hidden.grad, **gradients}, TOLERANCE
    )


def test_backward_reads_nothing_that_was_left_in_the_slots() -> None:
    run_ranks(_evaluate_between_forward_and_backward, 2)


def _offload(rank: int) -> None:
    case = dict(ep=2)
    plain = build_gpt(**case, dtype=torch.float64)
    gpt = balanced_gpt(case, EXACT, dtype=torch.float64)
    generator = torch.Generator().manual_seed(rank)
    hidden, upstream = torch.randn(2, 32, 1, HIDDEN, generator=generator, dtype=torch.float64)
    expected = layer_outcome(plain, hidden, upstream)
    (layer, *_) = balanced_layers(gpt)
    layer_outcome(gpt, hidden, upstream)
    slots = {weights.untyped_storage().data_ptr() for weights in inside.slot_weights(layer)}
    moved = []

    def to_host(saved: torch.Tensor) -> torch.Tensor:
        moved.append(saved.untyped_storage().data_ptr())
        return saved.clone()

    with torch.autograd.graph.saved_tensors_hooks(to_host, torch.clone):
        assert_close(expected, layer_outcome(gpt, hidden, upstream), TOLERANCE)
    mains = {weight.untyped_storage().data_ptr() for weight in layer.experts.parameters()}
    assert mains & set(moved), "the experts' saved tensors were not moved"
    assert not slots & set(moved)
    assert layer.num_replicas > 0


def test_offload_of_saved_tensors_leaves_the_slots_where_they_are() -> None:
    run_ranks(_offload, 2)


def _abort_a_step(rank: int, dispatcher: str, local_first: bool) -> None:
    case = dict(ep=2, dispatcher=dispatcher)
    balance = BalanceConfig(tolerance=0.0, local_first=local_first)
    clean, aborted = balanced_gpt(case, balance), balanced_gpt(case, balance)

    def fail(*_: Any) -> None:
        in_flight = [inside.in_flight(layer) for layer in balanced_layers(aborted)]
        raise ArithmeticError(f"loss is not finite with {in_flight} plans in flight")

    # Between forward and backward: no backward comes, the graph is dropped.
    for _ in range(2):
        with (
            mock.patch("tests.gpt._loss", fail),
            pytest.raises(ArithmeticError, match=r"with \[1, 1\] plans"),
        ):
            aborted.forward_backward()
    for slot_grads in inside.slot_grads(balanced_layers(aborted)[0]):
        slot_grads.fill_(float("nan"))
    for step in range(2):
        assert clean.train_step(step) == aborted.train_step(step)
    assert all(
        torch.equal(aborted.parameters()[name], value) for name, value in clean.parameters().items()
    )


@pytest.mark.parametrize(
    ("dispatcher", "local_first"), [("alltoall", False), ("allgather", False), ("alltoall", True)]
)
def test_a_clean_step_after_an_aborted_one_equals_a_clean_step(
    dispatcher: str, local_first: bool
) -> None:
    run_ranks(_abort_a_step, 2, dispatcher, local_first)


def _fail_in_the_experts(rank: int) -> None:
    """On all ranks at the same point, as with an error that the data makes."""
    clean, failing = (balanced_gpt(dict(ep=2), EXACT) for _ in range(2))

    def fail(*_: Any) -> None:  # No mock: that keeps what it is called with.
        raise ArithmeticError

    for _ in range(2):
        with (
            mock.patch(inside.RUN_EXPERTS, fail),
            pytest.raises(ArithmeticError),
        ):
            failing.forward_backward()
    for step in range(2):
        assert clean.train_step(step) == failing.train_step(step)


def test_a_step_after_an_error_in_the_experts_equals_a_clean_step() -> None:
    run_ranks(_fail_in_the_experts, 2)


def _slot_bytes(rank: int, num_layers: int, dtype: torch.dtype) -> tuple[int, int]:
    gpt = balanced_gpt(dict(ep=2, num_layers=num_layers), EXACT, dtype=dtype)
    gpt.forward_backward(num_microbatches=2)
    layers = balanced_layers(gpt)
    buffers = {id(inside.slot_buffers(layer)): inside.slot_buffers(layer) for layer in layers}
    assert len(layers) == num_layers
    expert = gpt.chunks[0].module.decoder.layers[0].mlp.experts.local_experts[0]
    return (
        sum(buffer.num_bytes for buffer in buffers.values()),
        sum(weight.numel() for weight in expert.parameters()),
    )


def test_slot_memory_does_not_grow_with_layers() -> None:
    few, many = (run_ranks(_slot_bytes, 2, layers, torch.float32) for layers in (2, 8))
    weight_bytes = gradient_bytes = 4
    for num_bytes, numel in (*few, *many):
        assert num_bytes == BalanceConfig().slots * numel * (weight_bytes + gradient_bytes)


def _forward_only_bytes(rank: int, recompute: str) -> list[int]:
    gpt = balanced_gpt(dict(ep=2, recompute=recompute), EXACT)
    layer = balanced_layers(gpt)[0]
    positions = torch.arange(SEQUENCE).expand(2, -1)
    num_bytes = []
    for is_training, has_gradients in ((False, False), (True, False), (True, True)):
        gpt.chunks[0].train(is_training)
        with torch.set_grad_enabled(has_gradients):
            output = gpt.chunks[0](positions, positions, None)
        assert inside.in_flight(layer) == int(has_gradients)
        if has_gradients:
            output.sum().backward()
        num_bytes.append(inside.slot_buffers(layer).num_bytes)
    weights = layer.experts.local_experts[0].parameters()
    return [*num_bytes, sum(weight.nbytes for weight in weights)]


def _train_after_generation(rank: int, transport: str) -> tuple[list[float], list[float]]:
    losses = []
    for make in (build_gpt, partial(balanced_gpt, balance=BalanceConfig(transport=transport))):
        gpt = make(ep=2) if make is build_gpt else make(dict(ep=2))
        positions = torch.arange(SEQUENCE).expand(2, -1)
        with torch.inference_mode():
            gpt.chunks[0](positions, positions, None)
        losses.append([gpt.train_step(step) for step in range(2)])
    return losses[0], losses[1]


@pytest.mark.option("forward_only")
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_a_first_forward_in_inference_mode_leaves_a_layer_that_trains(transport: str) -> None:
    for plain, balanced in run_ranks(_train_after_generation, 2, transport):
        assert balanced == pytest.approx(plain, rel=1e-6)


@pytest.mark.option("forward_only")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_only_forwards_with_gradients_have_gradient_slots(recompute: str) -> None:
    for evaluated, scored, trained, expert in run_ranks(_forward_only_bytes, 2, recompute):
        assert evaluated == scored == BalanceConfig().slots * expert
        assert trained == 2 * evaluated


def _generate(rank: int) -> float:
    from megatron.core.inference.contexts import StaticInferenceContext

    logits = []
    case = dict(ep=2, mlp_chunks_for_prefill=2)
    gpt = balanced_gpt(case, EXACT)
    for model in (build_gpt(**case), gpt):
        model.chunks[0].eval()
        context = StaticInferenceContext(model.micro_batch_size, SEQUENCE)
        tokens = model.tokens(0, 0)
        with torch.no_grad():
            for first, end in ((0, SEQUENCE - 1), (SEQUENCE - 1, SEQUENCE)):
                context.sequence_len_offset = first
                logits.append(
                    model.chunks[0].module(
                        tokens[:, first:end],
                        torch.arange(first, end).expand(len(tokens), -1),
                        None,
                        inference_context=context,
                        runtime_gather_output=True,
                    )
                )
                context.enable_decode_mode()
    prompt, token, balanced_prompt, balanced_token = logits
    torch.testing.assert_close(balanced_prompt, prompt)
    torch.testing.assert_close(balanced_token, token)
    buffers = inside.slot_buffers(balanced_layers(gpt)[0])
    assert not any(grad is not None for grad in buffers.slot_grads)
    return max(float(weights.abs().max()) for weights in buffers.weight_buffers)


@pytest.mark.option("forward_only")
def test_prefill_and_decoding_equal_unbalanced_megatron() -> None:
    assert max(run_ranks(_generate, 2)) > 0, "no replica was made, so nothing was tested"


def _decode_padded(rank: int) -> str:
    from megatron.core.inference import utils

    gpt = balanced_gpt(dict(ep=2), EXACT)
    with mock.patch.object(utils, "moe_layer_cache", None, create=True):
        utils.set_decode_expert_padding(gpt.chunks[0].module, True, capacity_factor=2.0)
        with pytest.raises(ValueError, match=r"^layer 1: ") as error:
            gpt.forward_backward(forward_only=True)
        utils.set_decode_expert_padding(gpt.chunks[0].module, False)
        gpt.forward_backward(forward_only=True)
    return str(error.value)


def test_padding_experts_for_decoding_is_refused_where_it_begins() -> None:
    """Before 0.19 no setting of the model says that it will."""
    for message in run_ranks(_decode_padded, 2):
        assert "moe_pad_expert_input_to_capacity must stay False" in message


def _freed(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2), EXACT)
    gpt.train_step(0)
    (layer, *_) = balanced_layers(gpt)
    held = weakref.ref(layer.balancer)
    gc.collect()
    gc.disable()
    try:
        del layer.balancer
        assert held() is None
    finally:
        gc.enable()


def test_what_a_layer_holds_is_freed_without_the_garbage_collector() -> None:
    run_ranks(_freed, 2)


def _names(rank: int) -> None:
    plain, gpt = build_gpt(ep=2), balanced_gpt(dict(ep=2), EXACT)
    gpt.forward_backward()
    for of in (
        lambda model: [name for name, _ in model.chunks[0].named_parameters()],
        lambda model: [name for name, _ in model.chunks[0].named_buffers()],
        lambda model: list(model.chunks[0].state_dict()),
        lambda model: [buffer.numel_unpadded for buffer in model.chunks[0].expert_parallel_buffers],
    ):
        assert of(plain) == of(gpt)


def test_slots_are_in_no_parameter_buffer_bucket_or_state() -> None:
    run_ranks(_names, 2)


def test_a_limit_below_the_schedule_fails_before_any_wrong_gradient() -> None:
    with pytest.raises(
        RuntimeError, match=r"layer 1: balance.max_in_flight \(1\) must be 2 or more"
    ):
        run_ranks(_small_limit_raises, 4)


def _small_limit_raises(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2, pp=2), BalanceConfig(tolerance=0.0, max_in_flight=1))
    gpt.forward_backward(num_microbatches=4)


def _in_flight(rank: int, case: dict[str, Any], num_microbatches: int) -> tuple[int, int]:
    peak = 0
    keep = inside.original(inside.KEEP_PLAN)

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        lent = keep(*args, **kwargs)
        peak = max(peak, *map(inside.in_flight, balanced_layers(gpt)))
        return lent

    gpt = balanced_gpt(case, EXACT)
    with mock.patch(inside.KEEP_PLAN, watched):
        gpt.forward_backward(num_microbatches=num_microbatches)
    return peak, max(inside.plans_kept(layer)[0] for layer in balanced_layers(gpt))


@pytest.mark.parametrize(
    ("world_size", "case", "num_microbatches", "by_rank"),
    [
        (4, dict(ep=2, pp=2), 6, [2, 2, 1, 1]),
        (4, dict(ep=2, pp=2, vpp=2, num_layers=4), 8, [4, 4, 3, 3]),
        (2, dict(ep=2), 4, [1, 1]),
    ],
)
def test_a_layer_has_places_for_as_many_plans_as_the_schedule_holds(
    world_size: int, case: dict[str, Any], num_microbatches: int, by_rank: list[int]
) -> None:
    found = run_ranks(_in_flight, world_size, case, num_microbatches)
    assert [peak for peak, _ in found] == [places for _, places in found] == by_rank


def _check_plans(rank: int, tamper: bool) -> None:
    from megatron_ext.balance.plan import BalancePlan

    digest = BalancePlan.digest
    flip = int(tamper and rank == 1)
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(check_plans=True))
    with mock.patch.object(BalancePlan, "digest", lambda plan: digest(plan) ^ flip):
        gpt.forward_backward()


def test_check_plans_passes_equal_plans_and_names_the_rank_that_differs() -> None:
    run_ranks(_check_plans, 2, False)
    with pytest.raises(RuntimeError, match=r"layer 1: EP ranks \[1\] .*another plan .*rank 0"):
        run_ranks(_check_plans, 2, True)


def _disagree(rank: int) -> None:
    balanced_gpt(dict(ep=2), BalanceConfig(slots=1 + rank))


def test_ranks_that_disagree_about_the_config_fail_at_the_start() -> None:
    with pytest.raises(
        RuntimeError, match=r"balance.slots must be equal.*rank 0 has 1, rank 1 has 2"
    ):
        run_ranks(_disagree, 2)


PADDED = dict(
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
    moe_expert_capacity_factor=1.0,
    moe_pad_expert_input_to_capacity=True,
)


@pytest.mark.parametrize(
    ("settings", "balance", "message"),
    [
        (
            dict(cuda_graph_impl="local"),
            {},
            "cuda_graph_impl ('local') must be 'none' or 'transformer_engine' or 'full_iteration'",
        ),
        ({}, dict(strategy="magic"), "unknown strategy 'magic'; known: "),
        ({}, dict(nvlink_domain=3), "balance.nvlink_domain (3) must divide"),
        ({}, dict(slots=257), "balance.slots (257) must be <= 256: transport shared_memory has"),
        (
            dict(num_moe_experts=514),
            dict(strategy="exact"),
            "balance.slots (257 of balance.strategy=exact) must be <= 256",
        ),
        (
            dict(expert_tensor_parallel_size=2, moe_token_dispatcher_type="alltoall"),
            dict(local_first=True),
            "expert_tensor_parallel_size (2) must be 1 with balance.local_first: every token",
        ),
        (dict(num_moe_experts=None), {}, "num_moe_experts (None) must be >= 1"),
        (
            dict(moe_token_dispatcher_type="allgather"),
            dict(local_first=True),
            "moe_token_dispatcher_type ('allgather') must be 'alltoall' with balance.local_first",
        ),
        (
            PADDED,
            dict(local_first=True),
            "moe_pad_expert_input_to_capacity (True) must be False with balance.local_first",
        ),
        (
            PADDED,
            dict(strategy="ideal"),
            "moe_pad_expert_input_to_capacity (True) must be False with balance.strategy=ideal",
        ),
        (
            dict(cuda_graph_impl="local"),
            dict(strategy="ideal"),
            "cuda_graph_impl ('local') must be 'none' or 'transformer_engine' or 'full_iteration'",
        ),
        (
            dict(
                moe_token_dispatcher_type="alltoall",
                moe_shared_expert_intermediate_size=24,
                moe_shared_expert_overlap=True,
            ),
            dict(local_first=True),
            "moe_shared_expert_overlap (True) must be False with balance.local_first",
        ),
    ],
)
def test_settings_that_exclude_balancing_are_named(
    settings: dict[str, Any], balance: dict[str, Any], message: str
) -> None:
    defaults = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=4,
        add_bias_linear=False,
        expert_model_parallel_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
    )
    if settings.get("num_moe_experts", 4) is None:
        defaults["expert_model_parallel_size"] = 1
    config = TransformerConfig(**(defaults | settings))
    problems = validate_for_balancing(config, BalanceConfig(**balance))
    assert len(problems) == 1
    assert message in problems[0]
    assert validate_for_balancing(config, BalanceConfig(strategy="none")) == []


def test_slots_are_limited_where_a_transport_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(num_moe_experts=4, expert_model_parallel_size=2)
    many = dict(slots=257)
    assert validate_for_balancing(config, BalanceConfig(transport="collective", **many)) == []
    alone = SimpleNamespace(num_moe_experts=4, expert_model_parallel_size=1)
    assert validate_for_balancing(alone, BalanceConfig(**many)) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(limits, "lack_here", lambda: None)
    assert validate_for_balancing(config, BalanceConfig(transport="cuda", **many)) == []


def _refuse(rank: int) -> None:
    balanced_gpt({}, BalanceConfig(nvlink_domain=3))


def test_a_layer_that_cannot_be_balanced_is_not_built() -> None:
    with pytest.raises(RuntimeError, match=r"balance.nvlink_domain \(3\) must divide"):
        run_ranks(_refuse, 1)


def _bfloat16(rank: int) -> None:
    case = dict(ep=2)
    plain, gpt = (
        build_gpt(**case, dtype=torch.bfloat16),
        balanced_gpt(case, EXACT, dtype=torch.bfloat16),
    )
    reference = build_gpt(ep=2)
    exact = [reference.train_step(step) for step in range(3)]
    errors = [
        max(abs(model.train_step(step) - exact[step]) for step in range(3))
        for model in (plain, gpt)
    ]
    buffers = inside.slot_buffers(balanced_layers(gpt)[0])
    assert {weight.dtype for weight in buffers.weight_buffers} == {torch.bfloat16}
    assert {grad.dtype for grad in buffers.slot_grads} == {torch.bfloat16}
    # Low precision by the usual rule: at most twice the error that the plain path makes against
    # float32.
    assert errors[1] <= 2 * errors[0], errors


def test_bfloat16_is_as_exact_as_unbalanced_bfloat16() -> None:
    run_ranks(_bfloat16, 2)


def _build_and_listen(rank: int, strategy: str) -> list[str]:
    """Build a model; return what Megatron logs, after a look at its layers' process groups."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    spec = name_stages if strategy == "named" else partial(balance_spec, balance=BALANCE[strategy])
    gpt = build_gpt(ep=2, num_layers=2, spec_transform=spec)
    logging.getLogger().removeHandler(handler)
    layers = gpt.chunks[0].module.decoder.layers
    assert all(isinstance(layer.mlp, NamedMoELayer) for layer in layers)
    groups = {layer.pg_collection.ep for layer in layers} | {layer.mlp.ep_group for layer in layers}
    assert len(groups) == 1
    gpt.train_step(0)
    return heard


BALANCE = {name: BalanceConfig(strategy=name, slots=1) for name in ("quota", "ideal")}


@pytest.mark.parametrize("strategy", [*BALANCE, "named"])
def test_megatron_does_not_warn_of_layers_that_it_does_not_know(strategy: str) -> None:
    for heard in run_ranks(_build_and_listen, 2, strategy):
        assert [line for line in heard if "Unknown MLP" in line] == []
