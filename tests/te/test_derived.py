"""MoE models of Megatron-Bridge whose layers are classes of their own: Gemma 4's.

Layer 2 (2 gloo ranks). Gradients are compared with the same layers without balancing in float64.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import balanced_layers
from tests.ranks import run_ranks

HAS_BRIDGE = importlib.util.find_spec("megatron.bridge") is not None


def _with_layers_of_gemma(spec: Any) -> Any:
    from megatron.bridge.models.gemma.modeling_gemma4 import Gemma4MoELayer, Gemma4TransformerLayer
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_ext.mcore.spec import _module_of, replace_parts, with_module

    for old, new in ((MoELayer, Gemma4MoELayer), (TransformerLayer, Gemma4TransformerLayer)):
        spec = replace_parts(
            spec,
            lambda part, old=old: _module_of(part) is old,
            lambda part, new=new: with_module(part, new),
        )
    return spec


def _compare(rank: int) -> tuple[float, int]:
    """Return the largest difference of a gradient, over its largest element, and the replicas."""
    from megatron_ext.mcore.spec import balance_spec

    gradients, reports = [], []
    for balance in (None, BalanceConfig(tolerance=0.0)):

        def transform(spec: Any, balance: BalanceConfig | None = balance) -> Any:
            spec = _with_layers_of_gemma(spec)
            return spec if balance is None else balance_spec(spec, balance)

        gpt = build_gpt(
            ep=2,
            num_layers=2,
            dtype=torch.float64,
            moe_shared_expert_intermediate_size=8,
            spec_transform=transform,
        )
        for layer in balanced_layers(gpt):
            layer.observers.append(reports.append)
        gpt.chunks[0].double()  # Gemma's own buffers and norms.
        gpt.forward_backward()
        gradients.append(
            {name: each.main_grad.clone() for name, each in gpt.chunks[0].named_parameters()}
        )
    plain, balanced = gradients
    assert plain.keys() == balanced.keys()
    worst = max(
        float((plain[name] - balanced[name]).abs().max() / plain[name].abs().max())
        for name in plain
    )
    return worst, sum(report.num_replicas for report in reports)


@pytest.mark.skipif(not HAS_BRIDGE, reason="needs Megatron-Bridge, of Python 3.12")
def test_layers_of_gemma_are_balanced() -> None:
    """Three inputs of the MoE layer, norms behind it, and shared experts added last."""
    for worst, replicas in run_ranks(_compare, 2):
        assert worst < 1e-12
        assert replicas > 0
