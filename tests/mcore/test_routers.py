"""Every kind of routing is as without balancing: outputs, gradients, statistics and their updates.

Layer 2 (two gloo ranks). Two steps of two microbatches in float64, so that what the first step
leaves in a router works in the second. Counts are compared exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import SEQUENCE, TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron.core.transformer.moe import moe_utils, router_replay  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip

GRADIENT_TOLERANCE = 1e-10
"""As in `test_parity`."""
LOSS_TOLERANCE = 1e-6
"""Megatron keeps the reported losses of a router in float32."""

TOPK = 2
TOKENS = 2 * SEQUENCE
"""Of a microbatch on a rank."""


@dataclass
class Kind:
    """A kind of routing."""

    settings: dict[str, Any]
    prepare: Callable[[TinyGPT], None] = lambda gpt: None
    """Is called with the model before its first step."""
    strategy: str = "quota"
    tells: tuple[str, ...] = ()
    """Losses that it reports, and statistics that it keeps in its first layer."""
    drops: bool = False
    """Whether tokens lose choices."""
    is_even: bool = False
    """Whether all ranks have the same load, so that nothing is replicated."""


def pad_some_tokens(gpt: TinyGPT) -> None:
    mask = torch.zeros(2, SEQUENCE, dtype=torch.bool)
    mask[0, -5:] = True

    def with_mask(module: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"padding_mask": mask}

    gpt.chunks[0].module.register_forward_pre_hook(with_mask, with_kwargs=True)


def record(gpt: TinyGPT) -> None:
    for router in routers(gpt):
        router.router_replay.set_router_replay_action(router_replay.RouterReplayAction.RECORD)


def replay(gpt: TinyGPT) -> None:
    """Two neighbors for each token, most often the first ones."""
    set_targets(gpt, shift=0)
    for router in routers(gpt):
        router.router_replay.set_router_replay_action(
            router_replay.RouterReplayAction.REPLAY_FORWARD
        )


def set_targets(gpt: TinyGPT, shift: int) -> None:
    first = (torch.arange(TOKENS) ** 2 % 7 + shift) % 4
    for router in routers(gpt):
        router.router_replay.set_target_indices(torch.stack([first, (first + 1) % 4], 1))


def replay_again_in_backward(gpt: TinyGPT) -> None:
    """Other targets in each microbatch, which its recomputed forward takes from a list."""
    shifts, actions = itertools.count(), router_replay.RouterReplayAction

    def act(action: Any) -> None:
        for router in routers(gpt):
            router.router_replay.set_router_replay_action(action)

    def begin(module: Any, args: Any) -> None:
        set_targets(gpt, next(shifts))
        act(actions.REPLAY_FORWARD)

    def end(module: Any, args: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: act(actions.REPLAY_BACKWARD))

    gpt.chunks[0].register_forward_pre_hook(begin)
    gpt.chunks[0].register_forward_hook(end)


def give_ids(gpt: TinyGPT) -> None:
    """Let routers give ids, and dispatchers take them; dropped choices are -1."""

    def as_ids(routing: Any, logits: Any, **kwargs: Any) -> Any:
        probs, routing_map = routing(logits, **kwargs)
        chosen = probs.masked_fill(~routing_map, -1).topk(TOPK)
        return chosen.values.relu(), chosen.indices.masked_fill(chosen.values < 0, -1)

    def from_ids(preprocess: Any, experts: int, hidden: Any, ids: Any, probs: Any) -> Any:
        assert (ids.dtype, probs.shape) == (torch.int64, ids.shape)
        shape, ids = (len(ids), experts + 1), ids.masked_fill(ids < 0, experts)
        routing_map = torch.zeros(shape, dtype=torch.bool).scatter(1, ids, True)[:, :experts]
        probs = probs.new_zeros(shape).scatter(1, ids, probs)[:, :experts]
        return preprocess(hidden, routing_map, probs)

    for layer in (m for m in gpt.chunks[0].modules() if isinstance(m, MoELayer)):
        router, dispatcher = layer.router, layer.token_dispatcher
        router.routing = partial(as_ids, router.routing)
        dispatcher.dispatch_preprocess = partial(
            from_ids, dispatcher.dispatch_preprocess, dispatcher.num_experts
        )


BIASED = dict(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.1,
    moe_router_dtype="fp64",
)
BIAS = ("counted, local_tokens_per_expert 0", "expert_bias 0")
COUNTED_GLOBALLY = ("counted, global_tokens_per_expert 0", "counted, ga_steps 0")

KINDS = {
    "aux loss, z loss, jitter": Kind(
        dict(
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.1,
            moe_z_loss_coeff=0.01,
            moe_input_jitter_eps=0.1,
        ),
        tells=("load_balancing_loss", "z_loss"),
    ),
    "sequence loss, scores before top-k": Kind(
        dict(
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=0.1,
            moe_router_pre_softmax=True,
            moe_router_topk_scaling_factor=2.5,
        ),
        tells=("seq_load_balancing_loss",),
    ),
    "two losses": Kind(
        dict(
            moe_router_load_balancing_type=["global_aux_loss", "seq_aux_loss"],
            moe_aux_loss_coeff=[0.1, 0.05],
        ),
        tells=("global_load_balancing_loss", "seq_load_balancing_loss", *COUNTED_GLOBALLY),
        strategy="libra",
    ),
    "expert bias, groups": Kind(
        dict(BIASED, experts=8, moe_router_num_groups=4, moe_router_group_topk=2), tells=BIAS
    ),
    "expert bias, predicted": Kind(dict(BIASED, num_layers=3), strategy="libra", tells=BIAS),
    "sinkhorn": Kind(dict(moe_router_load_balancing_type="sinkhorn"), strategy="libra"),
    "forced": Kind(dict(moe_router_force_load_balancing=True)),
    "padding mask": Kind(
        dict(
            moe_router_load_balancing_type="global_aux_loss",
            moe_aux_loss_coeff=0.1,
            moe_z_loss_coeff=0.01,
        ),
        pad_some_tokens,
        tells=("global_load_balancing_loss", "z_loss", *COUNTED_GLOBALLY),
    ),
    "recorded": Kind(dict(moe_enable_routing_replay=True), record, tells=("recorded 0",)),
    "replayed": Kind(dict(moe_enable_routing_replay=True), replay, tells=("left to replay 0",)),
    "replayed in backward": Kind(
        dict(moe_enable_routing_replay=True, recompute="full"), replay_again_in_backward
    ),
    "dropped by probability": Kind(
        dict(BIASED, moe_router_load_balancing_type="none", moe_expert_capacity_factor=0.8),
        tells=BIAS,
        drops=True,
    ),
    "ids": Kind(dict(experts=8), give_ids, "libra"),
    "ids, dropped": Kind(
        dict(moe_router_load_balancing_type="none", moe_expert_capacity_factor=0.8),
        give_ids,
        drops=True,
    ),
    "dropped by position": Kind(
        dict(
            topk=1,
            dispatcher="allgather",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.1,
            moe_expert_capacity_factor=0.5,
            moe_token_drop_policy="position",
        ),
        tells=("load_balancing_loss",),
        drops=True,
    ),
    "dropped and padded": Kind(
        dict(
            moe_router_load_balancing_type="none",
            moe_expert_capacity_factor=0.8,
            moe_pad_expert_input_to_capacity=True,
        ),
        drops=True,
        is_even=True,
    ),
}
if hasattr(TopKRouter, "quantile_balancing"):  # from megatron-core 0.19 on
    KINDS["quantiles"] = Kind(
        dict(moe_router_load_balancing_type="quantile_balancing", moe_aux_loss_coeff=0.0),
        strategy="libra",
        tells=("counted, qb_beta_accum 0", "qb_beta 0"),
    )
    KINDS["square root"] = Kind(dict(BIASED, moe_router_score_function="sqrtsoftplus"), tells=BIAS)


def routers(gpt: TinyGPT) -> list[Any]:
    return [m for chunk in gpt.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]


def statistics(gpt: TinyGPT) -> dict[str, torch.Tensor]:
    """What the routers have counted, and the bias that they choose by."""
    found = {}
    for index, router in enumerate(routers(gpt)):
        named = dict(router.named_buffers())
        if router.router_replay is not None:
            named["recorded"] = router.router_replay.get_recorded_indices()
            left = len(router.router_replay.replay_backward_list)
            named["left to replay"] = torch.tensor(left)
        found |= {f"{name} {index}": b.clone() for name, b in named.items() if b is not None}
    return found


def reported_losses() -> dict[str, torch.Tensor]:
    """Values of Megatron's tracker, which are cleared."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before megatron-core 0.17
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        values = {name: entry["values"] for name, entry in tracker.items()}
    else:
        values = {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    found = {name: value.clone() for name, value in values.items() if value.any()}
    for value in values.values():
        value.zero_()
    return found


def outcome(gpt: TinyGPT) -> tuple[dict[str, torch.Tensor], ...]:
    """Outputs and gradients, reported losses, and statistics after two steps."""
    config = gpt.chunks[0].config
    finalize = config.finalize_model_grads_func
    counted: dict[str, torch.Tensor] = {}

    def count_and_finalize(*args: Any, **kwargs: Any) -> None:
        counted.update({f"counted, {name}": each for name, each in statistics(gpt).items()})
        finalize(*args, **kwargs)  # which forgets the counts

    config.finalize_model_grads_func = count_and_finalize
    torch.manual_seed(torch.distributed.get_rank())
    reported_losses()
    values = {}
    for step in range(2):
        for index, report in enumerate(gpt.forward_backward(step, num_microbatches=2)):
            values |= {f"{name} {step} {index}": value for name, value in report.items()}
    router_replay.RouterReplay.clear_global_router_replay_instances()
    return values | gpt.gradients(), reported_losses(), counted | statistics(gpt)


def distances(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> dict[str, float]:
    assert expected.keys() == found.keys()
    return {
        name: float((found[name] - value).norm() / value.norm().clamp(min=1e-30))
        for name, value in expected.items()
    }


def _compare(rank: int, name: str) -> tuple[int, set[int], list[str]]:
    """Returns the number of replicas, the assignments of microbatches in the first layer, and what
    routers reported and counted that is not zero."""
    kind = KINDS[name]
    case = dict(ep=2) | kind.settings
    plain = build_gpt(**case, dtype=torch.float64)
    kind.prepare(plain)
    expected, losses, counts = outcome(plain)
    gpt = balanced_gpt(
        case, BalanceConfig(strategy=kind.strategy, tolerance=0.0), dtype=torch.float64
    )
    kind.prepare(gpt)
    assignments = set()
    first, *_ = balanced_layers(gpt)
    first.observers.append(lambda report: assignments.add(int(report.load.sum())))
    found, found_losses, found_counts = outcome(gpt)

    far = {k: v for k, v in distances(expected, found).items() if not v <= GRADIENT_TOLERANCE}
    assert not far, far
    far = {k: v for k, v in distances(losses, found_losses).items() if not v <= LOSS_TOLERANCE}
    assert not far, far
    assert counts.keys() == found_counts.keys()
    differ = [each for each, value in counts.items() if not torch.equal(value, found_counts[each])]
    assert not differ, differ
    replicas = sum(layer.num_replicas for layer in balanced_layers(gpt))
    told = [*losses, *(each for each, value in counts.items() if value.any())]
    return replicas, assignments, told


SHOWN = {
    "aux loss, z loss, jitter": "aux_loss",
    "two losses": "aux_loss",
    "expert bias, groups": "expert_bias",
    "sinkhorn": "sinkhorn",
    "padding mask": "padding_mask",
    "recorded": "router_replay",
    "replayed": "router_replay",
    "replayed in backward": "router_replay",
    "ids": "routing_ids",
    "dropped by position": "capacity",
    "dropped and padded": "capacity",
}
"""Rows of docs/compatibility.md by kind."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.option(SHOWN[name]) if name in SHOWN else ())
        for name in KINDS
    ],
)
def test_routing_is_as_without_balancing(name: str) -> None:
    kind = KINDS[name]
    for replicas, assignments, told in run_ranks(_compare, 2, name):
        assert (replicas == 0) == kind.is_even
        assert (max(assignments) < 2 * TOKENS * kind.settings.get("topk", TOPK)) == kind.drops
        assert set(kind.tells) <= set(told)
        assert kind.prepare is not replay_again_in_backward or "left to replay 0" not in told
