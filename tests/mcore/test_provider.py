"""A provider of Megatron-Bridge's shape makes balanced specs of its function, also after a pickle.

Megatron's specs ask for process groups, so this runs on ranks.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
import sys
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks

from megatron.core.models.gpt.gpt_layer_specs import (  # isort: skip
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip

from megatron_ext.mcore.moe_layer import BalancedMoELayer  # isort: skip
from megatron_ext.mcore.provider import balanced_provider_spec  # isort: skip
from megatron_ext.mcore.spec import has_moe_layers  # isort: skip


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> Any:
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)


def layer_spec(config: TransformerConfig) -> Any:
    return get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False)


@dataclass
class Provider:
    """Holds the function, and asks it as Megatron-Bridge's GPT provider does."""

    config: TransformerConfig
    transformer_layer_spec: Any

    def specs(self) -> tuple[Any, Any]:
        """Of the decoder, and of multi-token prediction."""
        spec = self.transformer_layer_spec
        stage = {"vp_stage": None} if "vp_stage" in inspect.signature(spec).parameters else {}
        decoder, again = spec(self.config, **stage), spec(self.config, **stage)
        return decoder, get_gpt_mtp_block_spec(self.config, again, use_transformer_engine=False)


def _specs_of_a_pickled_provider(rank: int) -> None:
    config = build_gpt(ep=2).config
    config.mtp_num_layers = 1
    for function in (block_spec, layer_spec):
        plain = Provider(config, function)
        assert [has_moe_layers(spec) for spec in plain.specs()] == [True, True]
        balanced = balanced_provider_spec(plain.transformer_layer_spec, BalanceConfig(slots=1))
        loaded = pickle.loads(pickle.dumps(balanced))
        assert loaded == balanced
        for spec in Provider(config, loaded).specs():
            assert not has_moe_layers(spec)
            assert "BalancedMoELayer" in repr(spec)


@pytest.mark.option("bridge")
def test_specs_of_a_pickled_provider_are_balanced() -> None:
    run_ranks(_specs_of_a_pickled_provider, 2)


def test_chunks_get_their_own_spec() -> None:
    stages: list[int | None] = []

    def noting(config: Any, vp_stage: int | None = None) -> Any:
        stages.append(vp_stage)
        return layer_spec(config)

    config = SimpleNamespace(num_moe_experts=4, mtp_num_layers=None)
    balanced_provider_spec(noting, BalanceConfig())(config, vp_stage=1)
    assert stages == [1]


@pytest.mark.option("bridge")
def test_a_function_may_take_nothing_or_a_stage_alone() -> None:
    def stack() -> Any:
        return layer_spec(SimpleNamespace(num_moe_experts=4))

    def stack_of(vp_stage: int | None) -> Any:
        return stack()

    config = SimpleNamespace(mtp_num_layers=None)
    for each in (stack, stack_of):
        assert "BalancedMoELayer" in repr(balanced_provider_spec(each, BalanceConfig())(config))


@pytest.mark.option("bridge")
def test_a_spec_may_name_its_module() -> None:
    def named(config: Any) -> Any:
        spec = layer_spec(config)
        return replace(spec, module=(spec.module.__module__, spec.module.__name__))

    config = SimpleNamespace(num_moe_experts=4, mtp_num_layers=1)
    assert "BalancedMoELayer" in repr(balanced_provider_spec(named, BalanceConfig())(config))


@pytest.mark.option("bridge")
def test_without_a_function_a_hybrid_provider_has_bridges(monkeypatch: pytest.MonkeyPatch) -> None:
    bridges = ModuleType("megatron.bridge.models.hybrid.hybrid_provider")
    bridges.get_default_hybrid_stack_spec = layer_spec  # type: ignore[attr-defined]
    for name in ("", ".models", ".models.hybrid"):
        monkeypatch.setitem(sys.modules, f"megatron.bridge{name}", ModuleType(f"bridge{name}"))
    monkeypatch.setitem(sys.modules, bridges.__name__, bridges)
    config = SimpleNamespace(hybrid_stack_spec=None, num_moe_experts=4, mtp_num_layers=None)
    assert "BalancedMoELayer" in repr(balanced_provider_spec(None, BalanceConfig())(config))


def _specs_of_a_model_config(rank: int) -> None:
    with mock.patch.object(logging, "basicConfig"):  # Megatron's training sets up the process
        from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig

    model_config = GPTModelConfig(
        transformer=build_gpt(ep=2).config,
        transformer_layer_spec=balanced_provider_spec(None, BalanceConfig(slots=1)),
        vocab_size=32,
        seq_length=16,
        position_embedding_type="rope",
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(model_config).build_model(groups)
    assert [isinstance(layer.mlp, BalancedMoELayer) for layer in model.decoder.layers] == [True] * 2


@pytest.mark.option("bridge")
def test_megatrons_own_builder_builds_a_balanced_model() -> None:
    pytest.importorskip("megatron.training.models.gpt", reason="megatron-core 0.19 has it")
    run_ranks(_specs_of_a_model_config, 2)


@pytest.mark.option("bridge")
def test_a_saved_configuration_knows_nothing_of_balancing() -> None:
    """What is loaded must be of packages that Megatron and Bridge trust, and this one is not."""
    container = pytest.importorskip("megatron.training.config.container")
    from megatron.training.config.instantiate_utils import instantiate
    from megatron.training.config.yaml_utils import safe_yaml_representers

    provider = {
        "transformer_layer_spec": balanced_provider_spec(
            get_gpt_decoder_block_spec, BalanceConfig()
        ),
        "hybrid_stack_spec": balanced_provider_spec(None, BalanceConfig()),
    }
    with safe_yaml_representers():
        written = container.ConfigContainerBase._convert_value_to_dict(provider)
        text = yaml.safe_dump(written)
    assert "megatron_ext" not in text
    assert instantiate(yaml.safe_load(text)) == {
        "transformer_layer_spec": get_gpt_decoder_block_spec,
        "hybrid_stack_spec": None,
    }


def test_bridge_may_copy_a_provider_and_set_what_it_finds() -> None:
    """`remove_non_pickleables` of Bridge sets all attributes of what has a `__dict__`."""
    made = balanced_provider_spec(layer_spec, BalanceConfig())
    assert not hasattr(made, "__dict__")
    assert not isinstance(made, FunctionType | MethodType | functools.partial)
    assert copy.copy(made) == made


def test_a_spec_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"spec_function \(ModuleSpec\) must be a function"):
        balanced_provider_spec(get_gpt_layer_local_spec(4, False), BalanceConfig())
