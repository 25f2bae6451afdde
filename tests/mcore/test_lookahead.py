"""What a layer predicts of the next one, when replicas are sent ahead, and that nothing is left.

Layer 2 (2 gloo ranks). Predictions are compared with the next router's choices counted here;
transfers are noted as they happen. That gradients are right is tested by `test_parity.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, TransformerConfig  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron_ext.mcore.limits import validate_for_balancing  # isort: skip

LIBRA = BalanceConfig(strategy="libra", tolerance=0.0)
LAYERS = 3


def _predictions(rank: int) -> list[Any]:
    """Of one microbatch: reports, and the same counted from the routers' inputs."""
    gpt = balanced_gpt(dict(ep=2, num_layers=LAYERS), LIBRA, dtype=torch.float64)
    layers = balanced_layers(gpt)
    reports: list[Any] = []
    inputs: dict[int, torch.Tensor] = {}
    chosen: dict[int, torch.Tensor] = {}

    def note(layer: Any, router: Any, arguments: Any, outputs: Any) -> None:
        inputs[layer.layer_number] = arguments[0].detach()
        chosen[layer.layer_number] = outputs[1]

    hooks = [layer.router.register_forward_hook(partial(note, layer)) for layer in layers]
    for layer in layers:
        layer.observers.append(reports.append)
    gpt.forward_backward(num_microbatches=1)
    for hook in hooks:
        hook.remove()
    found = []
    for before, layer, report in zip(layers[:-1], layers[1:], reports[1:], strict=True):
        with torch.no_grad():
            predicted = layer.router(inputs[before.layer_number])[1]
        load = torch.stack([torch.zeros_like(predicted.sum(0))] * 2)
        torch.distributed.all_gather(list(load), predicted.sum(0), group=layer.ep_group)
        assert torch.equal(report.prediction.load, load)
        right = int((predicted & chosen[layer.layer_number]).sum())
        assert report.prediction.choice_accuracy == right / int(predicted.sum())
        both = torch.minimum(load.sum(0), report.load.sum(0))
        assert report.prediction.load_accuracy == int(both.sum()) / int(load.sum())
        use = report.prediction
        assert use.hit_replicas + use.topped_up_replicas == report.num_replicas
        found.append((report.layer_number, use.choice_accuracy, use.load_accuracy))
    assert reports[0].prediction is None
    return found


def test_a_prediction_is_the_next_routers_choice_for_this_layers_input() -> None:
    for found in run_ranks(_predictions, 2):
        assert [layer for layer, _, _ in found] == [2, 3]
        # By chance 2 of 4 experts are right half of the time.
        assert all(choice > 0.5 for _, choice, _ in found), found


@contextmanager
def noted(events: list[Any]) -> Iterator[None]:
    """Note what is sent ahead, what is moved with the plan, and when backward begins."""
    points = inside.SEND_AHEAD, inside.START_MATERIALIZE, inside.ARRIVED
    send, materialize, wait = map(inside.original, points)

    def noted_send(layer: Any, predicted: Any) -> Any:
        sent = send(layer, predicted)
        events.append(("send", f"layer {layer.layer_number}", sent.placed))
        return sent

    def noted_wait(sent: Any) -> None:
        events.append(("arrive", None, sent.placed))
        wait(sent)

    def noted_materialize(forward: Any, there: Any = None) -> None:
        moved: list[Any] = []
        transport = forward.buffers.transport
        push = transport.push

        def noted_push(transfers: Any, *arguments: Any) -> Any:
            moved.extend(transfers)
            return push(transfers, *arguments)

        with mock.patch.object(transport, "push", noted_push):
            materialize(forward, there)
        events.append(("materialize", id(forward.buffers), (forward.plan, there, moved)))

    with (
        mock.patch(inside.SEND_AHEAD, noted_send),
        mock.patch(inside.ARRIVED, noted_wait),
        mock.patch(inside.START_MATERIALIZE, noted_materialize),
    ):
        yield


def run_noted(gpt: TinyGPT, **arguments: Any) -> list[Any]:
    gpt.forward_backward(num_microbatches=1)
    events: list[Any] = []
    with noted(events):
        gpt.forward_backward(**arguments)
    return events


def _forward(rank: int, transport: str) -> None:
    balance = BalanceConfig(strategy="libra", tolerance=0.0, transport=transport)
    gpt = balanced_gpt(dict(ep=2, num_layers=LAYERS), balance)
    gathers = dist.all_gather_into_tensor
    with mock.patch.object(dist, "all_gather_into_tensor", side_effect=gathers) as gather:
        events = run_noted(gpt, num_microbatches=1, forward_only=True)
    # No load and no predicted one, where ranks reach each other.
    assert gather.called == (transport == "collective")
    assert [name for name, _, _ in events] == [
        *("materialize", "send", "arrive", "materialize", "send", "arrive", "materialize")
    ]
    assert [label for name, label, _ in events if name == "send"] == ["layer 2", "layer 3"]
    first, second, third = [label for name, label, _ in events if name == "materialize"]
    assert first == third != second, "the layers take two sets of slots in turn"
    for _, _, (plan, there, moved) in [event for event in events if event[0] == "materialize"]:
        there = there if there is not None else torch.full_like(plan.experts_in_slots, -1)
        missing = (plan.experts_in_slots >= 0) & (plan.experts_in_slots != there)
        assert {(t.replica_rank, t.slot_idx) for t in moved} == set(
            map(tuple, missing.nonzero().tolist())
        )


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_replicas_move_between_two_layers_and_once(transport: str) -> None:
    run_ranks(_forward, 2, transport)


def _listed(rank: int) -> list[int]:
    """Numbers of the layers whose mains are listed in one forward, in order."""
    gpt = balanced_gpt(dict(ep=2, num_layers=LAYERS), LIBRA)
    gpt.forward_backward(num_microbatches=1)  # A layer that starts lists them as well.
    listed = []
    for layer in balanced_layers(gpt):
        inside.watch_mains(layer, partial(listed.append, layer.layer_number))
    gpt.forward_backward(num_microbatches=2)
    return listed


def test_mains_are_listed_once_a_forward() -> None:
    assert run_ranks(_listed, 2) == [[1, 2, 3] * 2] * 2


def _recomputed(rank: int, recompute: str) -> None:
    gpt = balanced_gpt(dict(ep=2, num_layers=LAYERS, recompute=recompute), LIBRA)
    events = run_noted(gpt, num_microbatches=2)
    sends = [label for name, label, _ in events if name == "send"]
    # Of each microbatch in its forward; none in backward, where layers run in reverse.
    assert sends == ["layer 2", "layer 3"] * 2
    assert sum(name == "arrive" for name, _, _ in events) == len(sends)
    assert all(inside.sends_nothing_ahead(layer) for layer in balanced_layers(gpt))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nothing_is_sent_ahead_in_a_recomputed_forward(recompute: str) -> None:
    run_ranks(_recomputed, 2, recompute)


def _chunks(rank: int) -> list[Any]:
    gpt = balanced_gpt(dict(ep=1, pp=2, vpp=2, num_layers=8), LIBRA)
    gpt.forward_backward(num_microbatches=2)
    return [(layer.layer_number, inside.chunk(layer)) for layer in balanced_layers(gpt)]


def test_a_layer_knows_its_chunk() -> None:
    first, second = run_ranks(_chunks, 2)
    assert first == [(1, 0), (2, 0), (5, 4), (6, 4)]
    assert second == [(3, 2), (4, 2), (7, 6), (8, 6)]


def _traces_of_prediction(rank: int) -> None:
    """With everything that a router keeps, or draws, in its forward."""
    case = dict(
        ep=2,
        num_layers=LAYERS,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=0.1,
        moe_z_loss_coeff=0.1,
        moe_input_jitter_eps=0.1,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    states = []
    for balance in (BalanceConfig(tolerance=0.0), LIBRA):
        gpt = balanced_gpt(case, balance, dtype=torch.float64)
        gpt.forward_backward(num_microbatches=2)
        torch.manual_seed(7)
        gpt.forward_backward(num_microbatches=2)
        states.append(
            {
                "random": torch.get_rng_state(),
                **gpt.gradients(),
                **{
                    f"{layer.layer_number} {name}": value.clone()
                    for layer in balanced_layers(gpt)
                    for name, value in layer.router.named_buffers()
                },
            }
        )
    without, ahead = states
    assert any("tokens_per_expert" in name for name in without)
    assert sum(layer.num_hits for layer in balanced_layers(gpt)) > 0
    for name, value in without.items():
        torch.testing.assert_close(ahead[name], value, rtol=1e-9, atol=1e-12)


def test_a_prediction_leaves_no_trace_in_the_router() -> None:
    run_ranks(_traces_of_prediction, 2)


def _abort(rank: int, place: str) -> None:
    """Rank 0 fails when it has sent ahead, rank 1 before it or at the same place."""
    from megatron_ext import reset_after_abort

    # So large that a thread copies them: small ones are copied, and peers waited for, at once.
    case = dict(ep=2, num_layers=LAYERS, ffn=4096)
    clean, aborted = balanced_gpt(case, LIBRA), balanced_gpt(case, LIBRA)
    assert clean.train_step(0) == aborted.train_step(0)
    tell_next = inside.original(inside.TELL_NEXT)

    def fail(*arguments: Any) -> None:
        tell_next(*arguments)
        raise ArithmeticError

    failing: Any = mock.patch(inside.TELL_NEXT, fail)
    if rank == 1 and place == "before":
        failing = mock.patch(inside.PLACE_PREDICTED, side_effect=ArithmeticError)
    for _ in range(3):
        with failing, pytest.raises(ArithmeticError):
            aborted.forward_backward()
        reset_after_abort(aborted.chunks)
        assert all(inside.sends_nothing_ahead(layer) for layer in balanced_layers(aborted))
    for step in range(1, 3):
        assert clean.train_step(step) == aborted.train_step(step)
    for name, value in clean.parameters().items():
        assert torch.equal(aborted.parameters()[name], value)


@pytest.mark.parametrize("place", ["before", "same"])
def test_a_clean_step_after_an_abort_with_replicas_on_their_way(place: str) -> None:
    run_ranks(_abort, 2, place)


def _first_abort(rank: int) -> None:
    """In the very first forward, rank 1 fails before layer 2 begins, and rank 0 behind that."""
    from megatron_ext import reset_after_abort

    case = dict(ep=2, num_layers=LAYERS)
    clean, aborted = balanced_gpt(case, LIBRA), balanced_gpt(case, LIBRA)
    second = aborted.chunks[0].module.decoder.layers[1]

    def fail(*_: Any) -> None:
        raise ArithmeticError

    failing = (second.self_attention, second)[rank].register_forward_pre_hook(fail)
    with failing, pytest.raises(ArithmeticError):
        aborted.forward_backward()
    reset_after_abort(aborted.chunks)
    for step in range(2):
        assert clean.train_step(step) == aborted.train_step(step)
    for name, value in clean.parameters().items():
        assert torch.equal(aborted.parameters()[name], value)


def test_ranks_that_came_to_different_layers_in_an_aborted_first_forward_go_on_alike() -> None:
    run_ranks(_first_abort, 2)


def _other_transformer_layers(rank: int) -> int:
    """Layers that are told of no chunk balance as well, and send nothing ahead."""
    from megatron_ext.mcore.transformer_layers import JoiningTransformerLayer

    def forget_chunk(self: Any, *arguments: Any, **keywords: Any) -> None:
        super(JoiningTransformerLayer, self).__init__(*arguments, **keywords)

    with mock.patch.object(JoiningTransformerLayer, "__init__", forget_chunk):
        gpt = balanced_gpt(dict(ep=2, num_layers=LAYERS), LIBRA)
    events = run_noted(gpt, num_microbatches=1)
    assert all(name == "materialize" for name, _, _ in events)
    return sum(layer.num_replicas for layer in balanced_layers(gpt))


def test_without_a_chunk_nothing_is_sent_ahead() -> None:
    assert all(replicas > 0 for replicas in run_ranks(_other_transformer_layers, 2))


def test_a_report_waits_for_no_device() -> None:
    """Tensors on `meta` have no values: a look at one in the forward fails."""
    from megatron_ext.balance.layout import ExpertLayout
    from megatron_ext.balance.plan import BalancePlan
    from megatron_ext.balance.predictions import PredictionReport, replica_use

    layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    choices = torch.zeros(5, 4, dtype=torch.bool).to("meta")
    load = torch.zeros(2, 4, dtype=torch.int64).to("meta")
    slots = torch.zeros(2, 1, dtype=torch.int32).to("meta")
    plan = BalancePlan(layout, torch.zeros(4, 2, dtype=torch.int64).to("meta"), slots)
    report = PredictionReport(
        load=load,
        exact_load=load,
        num_choices=choices.sum(),
        num_right_choices=choices.sum(),
        **replica_use(slots, plan),
        expert_bytes=8,
    )
    for name in ("load_accuracy", "choice_accuracy", "sent_ahead_bytes", "topped_up_bytes"):
        with pytest.raises(RuntimeError, match="meta"):
            getattr(report, name)


def test_routing_replay_is_refused() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2
    )
    config.moe_enable_routing_replay = True
    assert validate_for_balancing(config, BalanceConfig(strategy="quota")) == []
    (problem,) = validate_for_balancing(config, LIBRA)
    assert "moe_enable_routing_replay (True) must be False with balance.strategy=libra" in problem
