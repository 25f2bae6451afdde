"""Models that are more than equal MoE layers in a row: every MoE layer is balanced, or named.

Layer 2 (2 and 4 gloo ranks). Gradients are compared with Megatron's own layers in float64.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_ext.config import BalanceConfig
from tests import gpt as gpt_module
from tests.gpt import SEQUENCE, TransformerConfig, build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import (
    balanced_gpt,
    balanced_layers,
    balancing_models,
    gradient_difference,
)
from tests.mcore.test_parity import GRADIENT_TOLERANCE
from tests.mcore.test_recompute import assert_equal
from tests.ranks import run_ranks

EXACT = BalanceConfig(tolerance=0.0)

_FIELDS = {f.name for f in dataclasses.fields(TransformerConfig)}
HAS_REPEATED = "mtp_use_repeated_layer" in _FIELDS
HAS_PARTS = "mlp_chunks_for_training" in _FIELDS

CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        dict(mtp_num_layers=1),
        dict(mtp_num_layers=2, num_layers=1, recompute="full"),
        dict(num_layers=4, moe_layer_freq=[1, 0, 1, 0], moe_latent_size=8),
        *[
            dict(mtp_num_layers=2, num_layers=1, mtp_use_repeated_layer=True, recompute=recompute)
            for recompute in ("none", "full")
            if HAS_REPEATED
        ],
        # Parts of 6, 6 and 4 tokens.
        *[
            dict(mlp_chunks_for_training=3, mtp_num_layers=1, recompute=recompute)
            for recompute in ("none", "full")
            if HAS_PARTS
        ],
    ],
    4: [
        # The first chunk of the first stage has no MoE layer.
        dict(pp=2, vpp=2, num_layers=4, moe_layer_freq=[0, 1, 1, 1], mtp_num_layers=1),
        *[
            dict(pp=2, num_layers=2, mtp_num_layers=2, mtp_use_repeated_layer=True)
            for _ in range(HAS_REPEATED)
        ],
    ],
}


class _Linear(nn.Linear):
    """Stands for Transformer Engine's, which Megatron wants for the projections of latent MoE."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(inputs), None


def _differences(
    rank: int, cases: list[tuple[BalanceConfig, dict[str, Any]]], num_microbatches: int
) -> list[Any]:
    from megatron.core.transformer.moe import moe_layer

    with (
        mock.patch.multiple(moe_layer, create=True, TELinear=_Linear, HAVE_TE=True),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message=".*balanced but for")
        return [
            gradient_difference(
                dict(ep=2, **case), num_microbatches=num_microbatches, balance=balance
            )
            for balance, case in cases
        ]


@pytest.mark.option("mtp_repeated" if HAS_REPEATED else "mtp")
@pytest.mark.option("mlp_chunks" if HAS_PARTS else "mtp")
@pytest.mark.option("mtp")
@pytest.mark.option("dense_layers")
@pytest.mark.option("latent")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_equal_unbalanced_megatron(world_size: int) -> None:
    cases = [(EXACT, case) for case in CASES[world_size]]
    if world_size == 2:
        # Predicts in the decoder, but not what multi-token prediction begins with.
        ahead = BalanceConfig(strategy="libra", tolerance=0.0)
        cases.append((ahead, dict(num_layers=2, mtp_num_layers=2)))
    for of_rank in run_ranks(_differences, world_size, cases, world_size):
        for case, difference in zip(cases, of_rank, strict=True):
            assert difference.worst <= GRADIENT_TOLERANCE, f"{case}: {difference}"
            assert difference.replicas > 0, f"{case}: nothing was tested"


def _numbers(rank: int) -> list[list[int]]:
    def numbers(**case: Any) -> list[int]:
        return [
            layer.layer_number for layer in balanced_layers(balanced_gpt(dict(ep=2) | case, EXACT))
        ]

    return [numbers(mtp_num_layers=2), numbers(num_layers=3, moe_layer_freq=[1, 0, 1])]


def test_layers_are_numbered_through_the_model() -> None:
    """Also those of multi-token prediction: a report of theirs is no report of the first layer."""
    assert run_ranks(_numbers, 2) == [[[1, 2, 3, 4], [1, 3]]] * 2


def _left_out(rank: int) -> list[str]:
    block_specs: list[Any] = []
    make_mtp_spec = gpt_module.get_gpt_mtp_block_spec

    def of_its_own(config: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
        return make_mtp_spec(config, block_specs[0], *args, **kwargs)

    def balanced(spec: Any) -> Any:
        from megatron_ext.mcore.spec import balance_spec

        block_specs.append(spec)
        return balance_spec(spec, EXACT)

    with (
        warnings.catch_warnings(record=True) as seen,
        mock.patch.object(gpt_module, "get_gpt_mtp_block_spec", of_its_own),
    ):
        warnings.simplefilter("always")
        gpt = build_gpt(ep=2, mtp_num_layers=1, spec_transform=balanced)
        build_gpt(ep=2, mtp_num_layers=1)  # A model that is not to be balanced.
    assert len(balanced_layers(gpt)) == 2
    return [str(each.message) for each in seen if "balanced" in str(each.message)]


def test_a_part_that_a_program_does_not_balance_is_named() -> None:
    first, second = run_ranks(_left_out, 2)
    assert first == [
        "GPTModel is balanced but for 1 MoE layer(s) of mtp: make the spec of that part from the "
        "balanced block spec, or give it to megatron_ext.balance_spec too"
    ]
    assert second == [], "one rank of the EP group says it"


class _OfItsOwnSize:
    """Gives a layer a configuration of its own, by its number."""

    def __init__(self, config: Any, *args: Any, layer_number: int, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.num_moe_experts *= layer_number // 2
        config.moe_ffn_hidden_size += 8 * layer_number
        super().__init__(config, *args, layer_number=layer_number, **kwargs)


def _own_moe_layer() -> type:
    """A program's own class, in the way of Gemma 4's: it scales, and then adds shared experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    class ScaledMoELayer(MoELayer):
        def __init__(self, config: Any, submodules: Any = None, **kwargs: Any) -> None:
            super().__init__(config=config, submodules=submodules, **kwargs)
            self.scale = nn.Parameter(torch.full((1,), 0.5))

        def postprocess(self, output: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
            assert shared is not None
            return self.token_dispatcher.combine_postprocess(output) * self.scale + shared

    return ScaledMoELayer


class _Mixer(nn.Module):
    """In place of Megatron's, which needs `mamba_ssm`: each token has the mean of those before."""

    def __init__(self, config: Any, d_model: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, d_model))

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        lengths = torch.arange(1, len(hidden) + 1).view(-1, 1, 1)
        return (hidden.cumsum(0) / lengths) @ self.weight, None


def _hybrid_spec(*, is_own: bool = False) -> tuple[Any, dict[str, Any]]:
    """Mamba, MoE, attention, MoE as hybrid models stack them, and the stack's arguments.

    The MoE layers are Megatron's, or of a program's own classes and of different sizes.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    from megatron_ext.mcore.spec import with_module

    try:
        from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules

        stack, submodules = HybridStack, HybridStackSubmodules
        pattern: dict[str, Any] = dict(layer_type_list=list("ME*E"))
    except ModuleNotFoundError:  # megatron-core 0.16
        from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules

        stack, submodules = MambaStack, MambaStackSubmodules
        pattern = dict(hybrid_override_pattern="ME*E")
    layer = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False).submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
    )
    moe_class, mlp = MoETransformerLayer, layer.mlp
    if is_own:
        moe_class = type("MoELayerOfItsOwnSize", (_OfItsOwnSize, MoETransformerLayer), {})
        mlp = with_module(mlp, _own_moe_layer())
    moe = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=mlp, mlp_bda=layer.mlp_bda
    )
    mamba = MambaLayerSubmodules(
        norm=layer.input_layernorm, mixer=_Mixer, mamba_bda=layer.self_attn_bda
    )
    layers = submodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        moe_layer=ModuleSpec(module=moe_class, submodules=moe),
    )
    return ModuleSpec(module=stack, submodules=layers), pattern


def _hybrid(rank: int, is_own: bool, recompute: str) -> tuple[int, list[bool]]:
    """Return the replicas of a step, and whether each forward waits at its layer's input."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatron_ext.mcore.moe_layer import BalancedMoELayer
    from megatron_ext.mcore.spec import balance_spec

    shared = dict(moe_shared_expert_intermediate_size=8 if is_own else None)
    gpt = build_gpt(ep=2, num_layers=4, dtype=torch.float64, recompute=recompute, **shared)
    config = gpt.config
    spec, pattern = _hybrid_spec(is_own=is_own)
    found, reports, is_joined = [], [], []
    push = inside.original(inside.START_MATERIALIZE)

    def noted(forward: Any, there: Any = None) -> None:
        is_joined.append(forward.is_joined)
        push(forward, there)

    for each in (spec, balance_spec(spec, EXACT)):
        stack = build_module(
            each,
            config=config,
            post_process=False,  # The norm behind it needs Transformer Engine.
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            **pattern,
        ).double()
        balanced = [layer for layer in stack.modules() if isinstance(layer, BalancedMoELayer)]
        for layer in balanced:
            layer.observers.append(reports.append)
        gpt_module._initialize(stack, seed=1)
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(SEQUENCE, 2, 16, generator=generator, dtype=torch.float64)
        with mock.patch(inside.START_MATERIALIZE, noted):
            stack(hidden.requires_grad_(), None).square().sum().backward()
        found.append({name: p.grad for name, p in stack.named_parameters()} | {"": hidden.grad})
    assert_equal(*found)
    assert [layer.layout.num_experts for layer in balanced] == ([4, 8] if is_own else [4, 4])
    assert len({id(inside.slot_buffers(layer)) for layer in balanced}) == 1 + is_own
    return sum(int((report.experts_in_slots >= 0).sum()) for report in reports), is_joined


def _built(rank: int) -> list[int]:
    """Layer numbers of the layers that were attended to while models were built."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.mamba.mamba_model import MambaModel

    from megatron_ext.mcore.moe_layer import BalancedMoELayer

    config = build_gpt(ep=2, num_layers=4).config
    spec, _ = _hybrid_spec()
    sizes = dict(vocab_size=gpt_module.VOCAB, max_sequence_length=SEQUENCE)
    attended: list[Any] = []
    with balancing_models(EXACT, attended.append):
        model = MambaModel(
            config=config,
            mamba_stack_spec=spec,
            hybrid_override_pattern="ME*E",
            post_process=False,
            **sizes,
        )
        dense = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True
        )
        gpt_module.GPTModel(dense, get_gpt_layer_local_spec(), **sizes)
    found = [layer for layer in model.modules() if isinstance(layer, BalancedMoELayer)]
    assert attended == found
    return [layer.layer_number for layer in found]


def test_hybrid_models_are_balanced_and_dense_ones_left_alone() -> None:
    """A class of models may be made of another: since 0.18 MambaModel is a HybridModel."""
    assert run_ranks(_built, 2) == [[2, 4]] * 2


def _numbers_of_hybrid(rank: int) -> list[list[int]]:
    """Numbers of all MoE layers, with and without balancing."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ext.balance.layer_report import number_of
    from megatron_ext.mcore.spec import balance_spec
    from megatron_ext.mcore.step_metrics import StepMetrics

    config = build_gpt(ep=2, num_layers=4, mtp_num_layers=2).config
    spec, _ = _hybrid_spec()
    norm = spec.submodules.moe_layer.submodules.pre_mlp_layernorm
    predicting = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    spec.submodules.mtp_block_spec = ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=predicting)]
        ),
    )
    found = []
    for each in (spec, balance_spec(spec, EXACT)):
        with mock.patch.object(hybrid_block, "TENorm", norm):
            model = HybridModel(
                config=config,
                hybrid_stack_spec=each,
                hybrid_layer_pattern="ME*E/*E/*E",
                vocab_size=gpt_module.VOCAB,
                max_sequence_length=SEQUENCE,
            )
        StepMetrics([model]).close()
        layers = [part for part in model.modules() if isinstance(part, MoELayer)]
        found.append([number_of(layer) for layer in layers])
    assert [layer.layer_number for layer in layers] == found[1]
    return found


@pytest.mark.skipif(not HAS_REPEATED, reason="hybrid models predict since Megatron-Core 0.19")
def test_predicting_layers_of_hybrid_models_are_numbered_behind_the_decoders() -> None:
    """Theirs began at 1: their loads were added to those of a layer on another stage."""
    assert run_ranks(_numbers_of_hybrid, 2) == [[[2, 4, 6, 8], [2, 4, 6, 8]]] * 2


@pytest.mark.option("hybrid")
@pytest.mark.parametrize(
    ("is_own", "recompute"), [(True, "none"), (False, "none"), (False, "full")]
)
def test_a_hybrid_model_whose_layers_differ_is_balanced(is_own: bool, recompute: str) -> None:
    """Backward waits at the input of its MoE layers, also of those of a program's own classes."""
    for replicas, is_joined in run_ranks(_hybrid, 2, is_own, recompute):
        assert replicas > 0
        assert all(is_joined[-2:])  # Of a recomputed layer, in the second pass.
