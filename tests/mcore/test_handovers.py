"""What one part is given it hands over to the next: groups, numbers, settings, what a spec holds.

Layers 1 and 2 (two gloo ranks). A default in place of what was handed over would pass elsewhere.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.balance.placement import Placement
from megatron_ext.config import BalanceConfig
from megatron_ext.files.placement import write_placement
from megatron_ext.transport import TransportOptions
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer.moe.experts import SequentialMLP  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # isort: skip
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron_ext.mcore.experts import finish_parameter_gather  # isort: skip
from megatron_ext.mcore.moe_layer import BalancedMoELayer  # isort: skip
from megatron_ext.mcore.grouped_experts import grouped_mm_spec  # isort: skip
from megatron_ext.mcore.spec import balance_spec  # isort: skip


def _submodules() -> Any:
    mlp = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False).submodules.mlp
    return getattr(mlp, "submodules", None) or mlp.keywords["submodules"]


def _layer_of_its_own(rank: int) -> None:
    """A layer that is made by hand, in groups of its own, with settings that are no defaults."""
    config = build_gpt(ep=2).config
    groups = get_default_pg_collection()
    groups.ep = groups.tp_ep = dist.new_group()
    of_later_versions = (
        dict(is_mtp_layer=True) if "is_mtp_layer" in inspect.signature(MoELayer).parameters else {}
    )
    balance = BalanceConfig(
        slots=1,
        tolerance=0.0,
        transport="collective",
        timeout_s=7.5,
        push_blocks=8,
        grad_reduce_share=0.5,
    )
    make_slots = inside.original(inside.MAKE_SLOTS)
    with mock.patch(inside.MAKE_SLOTS, side_effect=make_slots) as made:
        layer = BalancedMoELayer(
            config, _submodules(), 3, groups, balance=balance, **of_later_versions
        )
        told: list[Any] = []
        layer.observers.append(told.append)
        maps = [_map_of_a_forward(layer) for _ in range(2)]

    assert layer.layer_number == told[0].layer_number == 3
    assert all(getattr(layer, name) == value for name, value in of_later_versions.items())
    assert layer.ep_group is layer.token_dispatcher.ep_group is groups.ep
    assert config.num_moe_experts == layer.router.num_experts == 4
    asked = made.call_args.kwargs
    assert asked["ep_group"] is groups.ep
    assert asked["transport"] == "collective"
    assert asked["options"] == TransportOptions(
        push_blocks=8, grad_reduce_share=0.5, timeout_s=7.5, domain_ranks=2
    )
    # The second forward takes the memory of the first, whose backward is over.
    assert maps[0].data_ptr() == maps[1].data_ptr()

    layer.eval()
    _map_of_a_forward(layer)
    assert len(told) == 2


def _map_of_a_forward(layer: Any) -> torch.Tensor:
    """Run forward and backward; return the routing map that the dispatcher was given."""
    dispatcher = layer.token_dispatcher
    with mock.patch.object(
        dispatcher, "dispatch_preprocess", wraps=dispatcher.dispatch_preprocess
    ) as dispatch_preprocess:
        output, _ = layer(torch.randn(8, 1, layer.config.hidden_size, requires_grad=True))
    output.sum().backward()
    _, routing_map, _ = dispatch_preprocess.call_args.args
    return routing_map


def test_a_layer_uses_what_it_is_given() -> None:
    run_ranks(_layer_of_its_own, 2)


def _replicas_by_layer(rank: int, path: str) -> list[int]:
    balance = BalanceConfig(strategy="craft", slots=2, tolerance=0.0, placement=path)
    gpt = balanced_gpt(dict(ep=2), balance)
    gpt.forward_backward()
    return [layer.num_replicas for layer in balanced_layers(gpt)]


def test_a_layer_has_the_replicas_placed_for_its_number(tmp_path: Any) -> None:
    slots = torch.tensor([[[-1, -1], [-1, -1]], [[2, 3], [0, 1]]], dtype=torch.int32)
    placement = Placement((1, 2), slots, torch.ones(2, 4, dtype=torch.int64))
    write_placement(tmp_path / "placement.npz", placement)
    for first, second in run_ranks(_replicas_by_layer, 2, str(tmp_path / "placement.npz")):
        assert first == 0
        assert second > 0


@pytest.mark.parametrize("form", ["ModuleSpec", "partial"])
def test_a_spec_keeps_its_other_arguments(form: str) -> None:
    def spec_of(module: type, **keywords: Any) -> Any:
        if form == "ModuleSpec":
            parts = {"submodules": keywords.pop("submodules")} if "submodules" in keywords else {}
            return ModuleSpec(module=module, params={"name": "it", **keywords}, **parts)
        return functools.partial(module, "first", name="it", **keywords)

    def arguments(spec: Any) -> tuple[Any, Any]:
        if form == "ModuleSpec":
            return ("first",), spec.params
        return spec.args, spec.keywords

    submodules = MoESubmodules(experts=spec_of(SequentialMLP))
    layer = grouped_mm_spec(spec_of(MoELayer, submodules=submodules))
    layer = balance_spec(layer, BalanceConfig())
    experts = (layer.submodules if form == "ModuleSpec" else layer.keywords["submodules"]).experts
    for spec in (layer, experts):
        positional, keywords = arguments(spec)
        assert positional == ("first",)
        assert keywords["name"] == "it"


def _parameters_of_this_step(rank: int) -> None:
    gpt = build_gpt(
        ep=1, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    gpt.train_step(0)
    experts = gpt.chunks[0].module.decoder.layers[0].mlp.experts
    # Without a name, and not to be called: of a program that looks at what comes in.
    experts.register_forward_pre_hook(functools.partial(pytest.fail, "a program's hook"))

    def differ() -> bool:
        for value in experts.parameters():
            of_ranks = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(of_ranks, value.detach())
            if not torch.equal(*of_ranks):
                return True
        return False

    assert differ(), "each rank has stepped its shard, and nothing was gathered yet"
    finish_parameter_gather(experts)
    assert not differ()


def test_parameters_that_ddp_gathers_late_are_there_before_they_are_read() -> None:
    run_ranks(_parameters_of_this_step, 2)
