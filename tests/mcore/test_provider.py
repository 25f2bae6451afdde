"""A provider of Megatron-Bridge's shape makes balanced specs of its function, also after a pickle.

Megatron's specs ask for process groups, so this runs on ranks.
"""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks

from megatron.core.models.gpt.gpt_layer_specs import (  # isort: skip
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig  # isort: skip

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


def test_a_spec_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"spec_function \(ModuleSpec\) must be a function"):
        balanced_provider_spec(get_gpt_layer_local_spec(4, False), BalanceConfig())
