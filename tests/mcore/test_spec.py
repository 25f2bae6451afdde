"""`balance_spec` finds the MoE layers of any spec, in both of Megatron's ways to write one.

Layer 1: no processes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.balance.placement import Placement
from megatron_ext.config import BalanceConfig
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.placement import write_placement

enable_cpu_platform()

# Megatron, and what imports it, must come after the CPU platform.
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from megatron_ext.mcore.even_layer import EvenMoELayer  # noqa: E402
from megatron_ext.mcore.grouped_experts import GroupedExperts, grouped_mm_spec  # noqa: E402
from megatron_ext.mcore.moe_layer import BalancedMoELayer  # noqa: E402
from megatron_ext.mcore.spec import (  # noqa: E402
    _module_of,
    balance_spec,
    replace_parts,
    with_module,
)
from tests.ranks import run_ranks  # noqa: E402


def block_spec(moe_layers: tuple[bool, ...] = (True, True)) -> TransformerBlockSubmodules:
    moe = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    dense = get_gpt_layer_local_spec()
    return TransformerBlockSubmodules(
        layer_specs=[moe if is_moe else dense for is_moe in moe_layers]
    )


def layer_class(mlp: Any) -> Any:
    return getattr(mlp, "module", None) or mlp.func


def settings(mlp: Any) -> dict[str, Any]:
    return mlp.params if hasattr(mlp, "params") else mlp.keywords


def test_every_moe_layer_of_a_block_is_balanced_and_dense_ones_are_left() -> None:
    spec = block_spec((False, True, True, False))
    balance = BalanceConfig(slots=1)
    found = [layer.submodules.mlp for layer in balance_spec(spec, balance).layer_specs]
    before = [layer_class(layer.submodules.mlp) for layer in spec.layer_specs]
    assert [layer_class(mlp) for mlp in found] == [
        BalancedMoELayer if module is MoELayer else module for module in before
    ]
    assert before.count(MoELayer) == 2
    assert all(settings(mlp)["balance"] is balance for mlp in found[1:3])


def test_layers_share_the_placement_that_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "placement.npz"
    balance = BalanceConfig(placement=str(path))
    with pytest.raises(FileNotFoundError):
        balance_spec(block_spec(), balance)
    slots = torch.full((2, 2, 1), -1, dtype=torch.int32)
    write_placement(path, Placement((1, 2), slots, torch.ones(2, 4, dtype=torch.int64)))
    first, second = balance_spec(block_spec(), balance).layer_specs
    placement = settings(first.submodules.mlp)["placement"]
    assert placement.layers == (1, 2)
    assert settings(second.submodules.mlp)["placement"] is placement


def test_a_single_layer_spec_is_balanced() -> None:
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    assert layer_class(balance_spec(spec, BalanceConfig()).submodules.mlp) is BalancedMoELayer


def test_the_given_spec_stays_as_it_was() -> None:
    spec = block_spec()
    before = copy.deepcopy(spec)
    balance_spec(grouped_mm_spec(spec), BalanceConfig())
    assert repr(spec) == repr(before)


def test_none_gives_the_very_spec_back_and_ideal_forces_even_routing() -> None:
    spec = block_spec()
    assert balance_spec(spec, BalanceConfig(strategy="none")) is spec
    even = balance_spec(spec, BalanceConfig(strategy="ideal"))
    assert {layer_class(layer.submodules.mlp) for layer in even.layer_specs} == {EvenMoELayer}


def test_grouped_experts_replace_sequential_ones_before_or_after_balancing() -> None:
    for transforms in ((grouped_mm_spec, _balance), (_balance, grouped_mm_spec)):
        spec = block_spec()
        for transform in transforms:
            spec = transform(spec)
        mlp = spec.layer_specs[0].submodules.mlp
        submodules = getattr(mlp, "submodules", None) or mlp.keywords["submodules"]
        assert layer_class(mlp) is BalancedMoELayer
        assert layer_class(submodules.experts) is GroupedExperts


def _balance(spec: Any) -> Any:
    return balance_spec(spec, BalanceConfig())


class _Specs(list):  # type: ignore[type-arg]
    """As of Step-3.5 in Megatron-Bridge: its last spec is another one for predicted tokens."""


def test_specs_in_a_list_of_a_programs_own_are_balanced() -> None:
    block = block_spec()
    block.layer_specs = _Specs(block.layer_specs)
    balanced = _balance(block)
    assert type(balanced.layer_specs) is _Specs
    assert {layer_class(each.submodules.mlp) for each in balanced.layer_specs} == {BalancedMoELayer}
    assert BalancedMoELayer not in {layer_class(each.submodules.mlp) for each in block.layer_specs}


def test_a_class_of_moe_layers_that_cannot_be_derived_from_ours_is_refused() -> None:
    def dispatch(self: Any, *args: Any) -> Any: ...

    def init(self: Any, config: Any, submodules: Any = None) -> None: ...

    def of_class(members: dict[str, Any]) -> Any:
        own = type("Own", (MoELayer,), members)
        return replace_parts(
            block_spec(),
            lambda part: _module_of(part) is MoELayer,
            lambda part: with_module(part, own),
        )

    for members, problem in (
        (dict(dispatch=dispatch), "class Own .* a dispatch of its own: leave"),
        (dict(__init__=init), r"class Own .* takes no \*\*kwargs: let"),
    ):
        with pytest.raises(ValueError, match=problem):
            _balance(of_class(members))
    mlp = _balance(of_class({})).layer_specs[0].submodules.mlp
    assert layer_class(mlp).__mro__[1].__name__ == "Own"
    assert issubclass(layer_class(mlp), BalancedMoELayer)


def test_a_spec_without_experts_is_refused() -> None:
    dense = get_gpt_layer_local_spec()
    with pytest.raises(ValueError, match=r"spec has no MoE layer .*\bTransformerLayer\b"):
        balance_spec(dense, BalanceConfig())
    with pytest.raises(ValueError, match=r"spec has no SequentialMLP .*Layer"):
        grouped_mm_spec(dense)
    with pytest.raises(ValueError, match=r"spec has no MoE layer .* None$"):
        balance_spec(None, BalanceConfig())


def _stages_without_experts(rank: int) -> list[bool]:
    """Whether a block of dense layers is taken: without Megatron's groups, and with one stage."""
    from megatron.core import parallel_state

    taken = []
    for initialize in (lambda: None, parallel_state.initialize_model_parallel):
        initialize()
        try:
            _balance(block_spec(moe_layers=(False, False)))
        except ValueError:
            taken.append(False)
        else:
            taken.append(True)
    return taken


def test_a_stage_without_experts_is_taken_where_groups_are_given_to_models() -> None:
    assert run_ranks(_stages_without_experts, 1) == [[True, False]]


def test_a_spec_is_balanced_once() -> None:
    for strategy, has in (("quota", "BalancedMoELayer"), ("ideal", "EvenMoELayer")):
        balanced = balance_spec(block_spec(), BalanceConfig(strategy=strategy))
        with pytest.raises(ValueError, match=rf"spec is balanced already: .*\b{has}$"):
            balance_spec(balanced, BalanceConfig())


def test_a_mapping_is_no_config() -> None:
    with pytest.raises(TypeError, match=r"^balance \({'slots': 2}\) must be a BalanceConfig"):
        balance_spec(block_spec(), {"slots": 2})  # type: ignore[arg-type]


def test_experts_of_no_kind_are_named_with_their_setting() -> None:
    """As `moe_grouped_gemm=True` makes them without Transformer Engine, before 0.17."""

    class GroupedMLP(torch.nn.Module):
        """Stands for Megatron's, which later versions lack."""

    for change in (grouped_mm_spec, _balance):
        with pytest.raises(ValueError, match=r"spec .* GroupedMLP\b.*moe_grouped_gemm=False"):
            change(_with_experts(GroupedMLP))


def test_experts_of_transformer_engine_are_balanced_and_not_replaced() -> None:
    grouped = _with_experts(TEGroupedMLP)
    mlp = _balance(grouped).layer_specs[0].submodules.mlp
    assert layer_class(mlp) is BalancedMoELayer
    with pytest.raises(ValueError, match=r"spec .* TEGroupedMLP\b.*moe_grouped_gemm=False"):
        grouped_mm_spec(grouped)


def _with_experts(module: type) -> Any:
    return replace_parts(
        block_spec(),
        lambda part: getattr(part, "module", getattr(part, "func", None)) is SequentialMLP,
        lambda part: ModuleSpec(module=module),
    )


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'magic'; known: "):
        balance_spec(block_spec(), BalanceConfig(strategy="magic"))
