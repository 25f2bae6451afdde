"""Quantized experts of Transformer Engine, balanced.

A replica has its main's bytes, and computes with them what the main would: in every format. So
training is the same where a row's blocks do not depend on the rows beside it, which is compared
bit by bit, or up to the order of sums; pairs with other options are in
`test_quantized_combinations.py`. In the other formats a balanced model is as far from an
unquantized one as Megatron's own. Layers 1 and 2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_ext.config import BalanceConfig, ConfigError
from tests.gpt import SEQUENCE, TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.clock import DEAR_EXPERTS_MS, rounds_take
from tests.mcore.covering import WITH_ONE_VERSION, dealt, of_this_version
from tests.mcore.parity import balanced_gpt, balanced_layers, relative_distance
from tests.mcore.test_partial_graphs import Case as GraphCase
from tests.mcore.test_partial_graphs import train_with_and_without
from tests.ranks import run_ranks
from tests.te.quantized import (
    EXACT,
    EXPERTS,
    FORMATS,
    LOSSES,
    Apart,
    Case,
    Settings,
    apart,
    assert_training_is_the_same,
    balanced_and_not,
    first_step,
    in_format,
)
from tests.te.test_experts import HAS_BLOCKS
from tests.te.test_saved import ToHost as UnquantizedToHost
from tests.te_quantized_on_cpu import GPU, OTHER_GPUS, answer_like

PUSH = "megatron_ext.balance.slots.SlotBuffers.push"
HIDE = "megatron_ext.mcore.te_experts.kept_in_place"
"""Hides slots from hooks around a linear."""

# --- bytes of replicas

ROWS_AND_COLUMNS = {
    "tensorwise": (("_data", "_scale_inv"), ("_transpose", "_scale_inv")),
    **dict.fromkeys(
        ("blockwise", "mxfp8"),
        (
            ("_rowwise_data", "_rowwise_scale_inv"),
            ("_columnwise_data", "_columnwise_scale_inv"),
        ),
    ),
    "nvfp4": (
        ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
        ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
    ),
}
"""What a forward's products read of a weight, and what those of a backward read."""


@contextmanager
def _checked_pushes(name: str, counts: dict[bool, int]) -> Iterator[None]:
    """Compare slots with what their mains' linears have, after each push; count by direction."""
    push = inside.original(PUSH)

    def checked(buffers: Any, replicas: Any, mains: Any, *args: Any, **kwargs: Any) -> Any:
        columnwise = kwargs.get("columnwise", False)
        for buffer in buffers.weight_buffers:
            buffer.fill_(0xA5)
        dist.barrier()  # No rank fills slots when another's push has begun.
        pushed = push(buffers, replicas, mains, *args, **kwargs)
        mine = [_bytes_of_mains(name, each.linear, columnwise) for each in mains._segments]
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        wait = pushed.wait

        def wait_and_compare() -> None:
            wait()
            for s, expert in enumerate(replicas.experts_in_slots[buffers.ep_rank].tolist()):
                home, main = divmod(expert, buffers.layout.mains_per_rank)
                for of_linear, of_slots in zip(by_rank[home], buffers.slot_weights, strict=True):
                    for expected, slots in zip(of_linear[main], of_slots, strict=True):
                        if expert >= 0:
                            assert torch.equal(slots[s][: len(expected)], expected)
                            counts[columnwise] += 1

        pushed.wait = wait_and_compare
        return pushed

    with mock.patch(PUSH, checked):
        yield


def _bytes_of_mains(name: str, linear: Any, columnwise: bool) -> list[list[torch.Tensor]]:
    """The parts of each main, uint8."""
    found = []
    for weight in _as_products_read(linear):
        parts = [getattr(weight, each) for each in ROWS_AND_COLUMNS[name][columnwise]]
        if parts[0] is None:  # A Blackwell reads a tensor with one scale in both directions.
            parts[0] = weight._data
        found.append([part.detach().clone().reshape(-1).view(torch.uint8) for part in parts])
    return found


def _as_products_read(linear: Any) -> list[Any]:
    """What a linear keeps of each main, or the main."""
    names = [f"weight{m}" for m in range(linear.num_gemms)]
    return [linear._fp8_workspaces.get(name, getattr(linear, name)) for name in names]


@contextmanager
def _quantized_by_pushes_only() -> Iterator[None]:
    """The linear takes what a push has quantized, and quantizes no weight again."""
    from transformer_engine.pytorch.module import grouped_linear

    quantize = grouped_linear.quantize_weight

    def take(**settings: Any) -> Any:
        weight, new = quantize(**settings)
        if torch.is_grad_enabled():  # Not where costs are measured.
            assert new is None
            assert not settings["update_workspace"]
        return weight, new

    with mock.patch.object(grouped_linear, "quantize_weight", take):
        yield


def _push_and_compare(rank: int, name: str, gpu: str) -> None:
    for native in (False, True):
        answer_like(gpu)
        dtype = torch.bfloat16 if native or name == "nvfp4" else torch.float32
        # The first layer's mains run alone first, to be measured, and need one direction only.
        balance = BalanceConfig(tolerance=0.0, objective="time", link_bandwidth=1e15)
        gpt = balanced_gpt(EXPERTS | in_format(name, native=native), balance, dtype=dtype)
        counts = {False: 0, True: 0}
        linear = balanced_layers(gpt)[0].experts.linear_fc1
        parts = []
        with (
            _checked_pushes(name, counts),
            _quantized_by_pushes_only(),
            rounds_take(DEAR_EXPERTS_MS),
        ):
            for step in range(2):
                gpt.train_step(step, num_microbatches=2)
                mains = _as_products_read(linear)
                of_mains = [part for each in mains for part in each.get_data_tensors()]
                parts.append([part for part in of_mains if part is not None])
        # On a Blackwell the last layer's slots may still have what its backward reads.
        assert min(counts.values()) > 0, counts
        # A GPU keeps each list of addresses that it has pushed from.
        first, second = ([part.data_ptr() for part in of_step] for of_step in parts)
        assert first == second


def _on(*gpus: tuple[str, str]) -> Any:
    """Formats, with their rows of the compatibility page, and GPUs as parameters of a test."""
    shown = [pytest.param(*each, marks=pytest.mark.option(each[0])) for each in gpus]
    return pytest.mark.parametrize(("name", "gpu"), shown)


@pytest.mark.option("quantized_parameters")
@_on(*dealt([*GPU.items(), *OTHER_GPUS]))
def test_a_slot_has_its_mains_bytes_after_each_push(name: str, gpu: str) -> None:
    run_ranks(_push_and_compare, 2, name, gpu)


# --- a replica and its main

FEW, MANY = [128, 256], [128, 0, 128, 256]
"""Rows of the owner's mains; of two other mains, and of the owner's in two slots."""


def _linear_with_slots(
    name: str, gpu: str, native: bool = False, fused: bool = False, turns: bool = True
) -> list[bool]:
    """Whether a linear with mains and one with slots for them are equal: y, dx, dw of each."""
    from megatron.core.fp8_utils import get_fp8_context

    answer_like(gpu)
    settings = EXPERTS | in_format(name, native=native) | dict(ep=1, num_layers=1, experts=2)
    settings |= dict(dtype=torch.bfloat16, hidden=160, ffn=160)
    with _to_nearest():
        gpts = [build_gpt(**settings, seed=seed) for seed in (1, 2)]
    models: list[Any] = [gpt.chunks[0].module for gpt in gpts]
    owner, other = (model.decoder.layers[0].mlp.experts.linear_fc1 for model in models)
    context = get_fp8_context
    if name == "nvfp4":
        from megatron.core.fp4_utils import get_fp4_context as context
    rows, upstream = _random(sum(MANY), 160), _random(sum(MANY), owner.out_features)
    first = sum(MANY[:2])
    with _to_nearest():
        for linear in (owner, other):
            linear.fuse_wgrad_accumulation = fused
        with context(owner.config, 0):
            memory, slots, refill = _slots(owner, other)
            x = rows[first:].clone().requires_grad_()
            y, _ = owner(x, FEW)
            x_there = rows.clone().requires_grad_()
            y_there, _ = _run_with_slots(other, slots, x_there)
        for part in memory:
            part.fill_(0xA5)
        refill(columnwise=turns)
        y.backward(upstream[first:])
        y_there.backward(upstream)
    assert sorted(other._fp8_workspaces) == ([] if native else ["weight0", "weight1"])
    pairs = [(y, y_there[first:]), (x.grad, x_there.grad[first:])]
    for slot, main in zip(slots, (owner.weight0, owner.weight1), strict=True):
        pairs.append((main.main_grad, slot.main_grad if fused else slot.grad.float()))
    assert all(one.any() for one, _ in pairs)
    return [torch.equal(one, other) for one, other in pairs]


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def _slots(owner: Any, other: Any) -> Any:
    """Memory of `other`'s slots, slots in it with `owner`'s rows, and what brings the columns."""
    from megatron_ext.mcore.quantized import Precision, QuantizedMains

    of_owner, of_other = (
        QuantizedMains([each.weight0, each.weight1], each, Precision.of(each))
        for each in (owner, other)
    )
    memory = [
        torch.empty(2, part.num_bytes, dtype=torch.uint8) for part in of_owner.precision.parts
    ]

    def fill(columnwise: bool) -> None:
        of_other.rows(columnwise=columnwise)
        for slots, mains in zip(memory, of_owner.rows(columnwise=columnwise), strict=True):
            for slot, main in zip(slots, mains, strict=True):
                slot[: len(main)] = main

    fill(columnwise=False)
    slots = [slot.requires_grad_() for slot in of_other.weights(memory)]
    for slot in slots:
        slot.main_grad = torch.zeros(slot.shape)
    return memory, slots, fill


def _run_with_slots(linear: Any, slots: list[Any], rows: torch.Tensor) -> Any:
    from megatron_ext.mcore.quantized import SlotQuantizers
    from megatron_ext.mcore.te_experts import _with_slots

    with (
        SlotQuantizers(linear, len(slots)).lent(),
        _with_slots(linear, {"weight": slots}),
    ):
        return linear(rows, MANY)


@contextmanager
def _to_nearest() -> Iterator[None]:
    """As NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1, which counts when TE is imported."""
    from transformer_engine.common.recipe import NVFP4BlockScaling

    make = NVFP4BlockScaling.__post_init__

    def without_chance(recipe: Any) -> None:
        recipe.disable_stochastic_rounding = True
        make(recipe)

    with mock.patch.object(NVFP4BlockScaling, "__post_init__", without_chance):
        yield


def _linears_with_slots(rank: int, name: str, gpu: str) -> None:
    for native in (False, True):
        for fused in (False, True):
            assert _linear_with_slots(name, gpu, native, fused) == [True] * 4


@_on(*GPU.items(), *OTHER_GPUS)
def test_a_replica_computes_what_its_main_would(name: str, gpu: str) -> None:
    run_ranks(_linears_with_slots, 1, name, gpu)


def _linear_with_rows_in_backward(rank: int, name: str) -> list[bool]:
    return _linear_with_slots(name, GPU[name], turns=False)


@pytest.mark.parametrize("name", FORMATS)
def test_a_backward_with_what_the_forward_read_is_seen(name: str) -> None:
    assert run_ranks(_linear_with_rows_in_backward, 1, name) == [[True, False, True, True]]


def _linear_with_shared_quantizers(rank: int) -> None:
    from megatron_ext.mcore.quantized import SlotQuantizers

    def shared(quantizers: Any, of_mains: list[Any]) -> list[Any]:
        return of_mains * 2  # As many slots as mains.

    with (
        mock.patch.object(SlotQuantizers, "_with_slots", shared),
        pytest.raises(ValueError, match="groups 0 and 2 have rows, and one quantizer for both"),
    ):
        _linear_with_slots("tensorwise", "hopper")


def test_quantizers_shared_with_mains_are_seen() -> None:
    run_ranks(_linear_with_shared_quantizers, 1)


# --- training in formats in which it is the same


def _recipe_of_linears(**of_linears: Any) -> Any:
    """Megatron's `--te-precision-config-file`: the parameters of each linear's quantization."""
    from megatron.core.quantization.quant_config import RecipeConfig

    matchers = {
        name: dict(type="glob", enabled=True, pattern=f"*experts.{name}", config=name)
        for name in of_linears
    }
    key = dict(transformer_engine_config_type="TEQuantizationParams")
    configs = {name: key | of_linear for name, of_linear in of_linears.items()}
    return RecipeConfig.from_config_dict(dict(matchers=matchers, configs=configs))


IN_16_BITS: Settings = dict(dtype=torch.bfloat16, gradient_accumulation_fusion=True)
FROZEN: Settings = dict(frozen=r"layers\.0\..*\.experts\.|fc1")
GATHERED: Settings = IN_16_BITS | dict(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)
OP_FUSER: Settings = dict(
    use_transformer_engine_op_fuser=True, moe_mlp_glu_interleave_size=32, ffn=128
)
"""Its rows are padded to 256; only bfloat16 takes its packed groups, float32 a list of them."""
CASES = of_this_version(
    {
        "gathered mxfp8": Case("mxfp8", GATHERED, native=True, world_size=4),
        "gathered blockwise": Case("blockwise", GATHERED, native=True, world_size=4),
        "gradients in 16 bits": Case(
            "mxfp8", IN_16_BITS | dict(ddp=dict(grad_reduce_in_fp32=False))
        ),
        "measured": Case("blockwise", balance=dict(objective="time")),
        "padding for FP8": Case(
            "blockwise", dict(moe_router_padding_for_fp8=True), gpu="blackwell"
        ),
        "frozen": Case("blockwise", FROZEN),
        "frozen parameters": Case("mxfp8", FROZEN | IN_16_BITS, native=True),
    }
)
if HAS_BLOCKS:
    CASES |= {
        "op fuser": Case("mxfp8", OP_FUSER | IN_16_BITS),
        # With fused gradients, Megatron's own frozen experts fail in the op fuser.
        "op fuser in float32": Case(
            "mxfp8", OP_FUSER | dict(frozen=r"experts\..*fc1"), number="hybrid", evaluates=True
        ),
        "op fuser, blockwise": Case("blockwise", OP_FUSER | IN_16_BITS, native=True),
        "op fuser, gathered": Case(
            "mxfp8", OP_FUSER | GATHERED | dict(recompute="selective"), native=True, world_size=4
        ),
        "op fuser, delayed": Case(
            "mxfp8",
            OP_FUSER
            | IN_16_BITS
            | dict(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
        ),
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_the_same(case: Case) -> None:
    assert_training_is_the_same(case)


def _scales_of_op_fuser(rank: int) -> list[str]:
    case = Case("mxfp8", OP_FUSER | IN_16_BITS)
    answer_like(GPU[case.format])
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        gpt = _make_balanced(**case.model)
        gpt.forward_backward()
    return [each.form for each in inside.slot_buffers(balanced_layers(gpt)[0]).segments]


def _own_loop(rank: int, settings: Settings) -> list[list[float]]:
    """Losses of a loop that never says that a step's first microbatch comes."""
    case = Case("mxfp8", IN_16_BITS | settings)
    answer_like(GPU[case.format])
    losses = []
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        for make in (build_gpt, _make_balanced):
            gpt = make(**case.model)
            vars(gpt.chunks[0])["set_is_first_microbatch"] = lambda: None
            for module in gpt.chunks[0].modules():
                if not hasattr(module, "num_gemms") and hasattr(module, "is_first_microbatch"):
                    module.disable_parameter_transpose_cache = True  # Nothing is kept but experts.
            losses.append([gpt.train_step(step, num_microbatches=2) for step in range(2)])
    return losses


@pytest.mark.parametrize(
    "settings",
    [dict(disable_parameter_transpose_cache=True), *[OP_FUSER] * HAS_BLOCKS],
    ids=["keeps nothing", "op fuser"][: 1 + HAS_BLOCKS],
)
def test_what_quantizes_in_each_forward_is_pushed_so(settings: Settings) -> None:
    for stock, balanced in run_ranks(_own_loop, 2, settings):
        assert stock == pytest.approx(balanced, rel=LOSSES)


@pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron has no fused experts")
def test_slots_of_the_op_fuser_have_scales_in_rows() -> None:
    """Its fused kernels, which have no stand-in here, take them so without a look."""
    for form in run_ranks(_scales_of_op_fuser, 2)[0]:
        assert "with_gemm_swizzled_scales=False" in form


IN_BLOCKS = dict(fp8_quantization_recipe="blockwise", override_nonquantized_autocast=True)
BY_LINEAR: dict[str, Settings] = {
    "one in bf16": dict(linear_fc2=dict(training_recipe={})),
    "both in a model in bf16": {
        name: dict(training_recipe=IN_BLOCKS) for name in ("linear_fc1", "linear_fc2")
    },
}


@pytest.mark.option("precision_by_layer")
@pytest.mark.parametrize("name", BY_LINEAR)
def test_training_with_precision_by_linear_is_the_same(name: str) -> None:
    settings = IN_16_BITS | dict(quant_recipe=_recipe_of_linears(**BY_LINEAR[name]), experts=8)
    if "in a model in bf16" in name:
        settings["fp8"] = None  # Nothing pads the rows then, to MXFP8's blocks.
    assert_training_is_the_same(Case("blockwise", settings, balance=dict(slots=1)))


def _train_after_generation(rank: int, native: bool) -> list[list[float]]:
    case = Case("mxfp8", IN_16_BITS, native=native)
    answer_like(GPU[case.format])
    losses = []
    for make in (build_gpt, _make_balanced):
        gpt = make(**case.model)
        positions = torch.arange(SEQUENCE).expand(2, -1)
        with torch.inference_mode():
            gpt.chunks[0](positions, positions, None)
        losses.append([gpt.train_step(step) for step in range(2)])
    return losses


@pytest.mark.parametrize("native", [False, True], ids=["cached", "native"])
def test_a_first_forward_in_inference_mode_leaves_a_layer_that_trains(native: bool) -> None:
    for plain, balanced in run_ranks(_train_after_generation, 2, native):
        assert balanced == pytest.approx(plain, rel=LOSSES)


def test_own_tokens_first_without_slots_is_the_same() -> None:
    """Experts that run in parts would lose the gradient of one: see `LocalFirstMoELayer`."""
    case = Case("mxfp8", IN_16_BITS, balance=dict(slots=0, local_first=True))
    for found in run_ranks(balanced_and_not, 2, case):
        assert found.forwards == []
        assert found.gradients == 0


def test_own_tokens_first_where_a_layer_is_not_quantized_is_the_same() -> None:
    """No push of that layer's tells its linears that this is no first microbatch."""
    settings = IN_16_BITS | dict(
        gradient_accumulation_fusion=True,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=1,
        num_layers_at_end_in_bf16=0,
    )
    assert_training_is_the_same(Case("mxfp8", settings, balance=dict(local_first=True)))


def _train_with_graphs(rank: int, name: str, case: GraphCase) -> tuple[int, int]:
    answer_like(GPU[name])
    return train_with_and_without(rank, case)


@pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron-Core 0.19.2 shows the same")
def test_training_with_partial_graphs_is_the_same() -> None:
    settings = EXPERTS | in_format("mxfp8")
    # The twins of products look at values, which a capture forbids.
    case = GraphCase(settings, ("moe_router", "moe_preprocess"), num_microbatches=2)
    for replicas, num_operations in run_ranks(_train_with_graphs, 2, "mxfp8", case):
        assert num_operations > 0
        assert replicas > 0


# --- hooks on saved tensors


class ToHost(UnquantizedToHost):
    """Notes where the parts of quantized tensors are."""

    def _copy(self, saved: torch.Tensor) -> torch.Tensor:
        return _copied(saved)


def _copied(saved: Any) -> torch.Tensor:
    parts = saved.get_data_tensors() if hasattr(saved, "get_data_tensors") else (saved,)
    ToHost.copied += [part.untyped_storage().data_ptr() for part in parts if part is not None]
    return saved.clone()


def _gradients(
    case: Case, around: Any = None, **settings: Any
) -> tuple[dict[str, torch.Tensor], set[int], set[int]]:
    """Gradients, and where slots and mains are; `around` the whole step."""
    gpt = balanced_gpt(case.model | settings, EXACT)
    with around or nullcontext():
        _, gradients = first_step(gpt, case)
    layer = balanced_layers(gpt)[0]
    assert layer.num_replicas > 0
    mains = _as_products_read(layer.experts.linear_fc1)
    parts = [part for main in mains for part in main.get_data_tensors()]
    return gradients, _addresses(inside.slot_weights(layer)), _addresses(parts)


def _addresses(tensors: list[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tensors}


def _offloaded(rank: int, native: bool) -> None:
    from megatron.core.transformer.moe import experts

    case = Case("mxfp8", native=native)
    offload = dict(
        offload_modules=["expert_fc1", "moe_act"], fine_grained_activation_offloading=True
    )
    answer_like(GPU[case.format])
    everywhere = torch.autograd.graph.saved_tensors_hooks(_copied, torch.clone)
    with mock.patch.object(experts, "off_interface", ToHost):
        kept, _, _ = _gradients(case)
        for how in (offload, dict(around=everywhere)):
            ToHost.copied.clear()
            copied, slots, mains = _gradients(case, **how)
            assert mains & set(ToHost.copied), "hooks see weights, as without balancing"
            assert not slots & set(ToHost.copied)
            assert _different(kept, copied) == []
        ToHost.copied.clear()
        with mock.patch(HIDE, return_value=nullcontext()):
            copied, slots, _ = _gradients(case, **offload)
        assert slots & set(ToHost.copied), "hooks that see slots are not seen"
        assert _different(kept, copied)
        ToHost.copied.clear()


def _different(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, each in some.items() if not torch.equal(each, others[name])]


@pytest.mark.parametrize("native", of_this_version({"cached": False, "native": True}).values())
def test_hooks_on_saved_tensors_do_not_see_slots(native: bool) -> None:
    run_ranks(_offloaded, 2, native)


# --- formats in which a number's scale depends on other rows


@contextmanager
def _powers_of_two() -> Iterator[None]:
    """As NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1, which counts when TE is imported."""
    from transformer_engine.common.recipe import Float8CurrentScaling, QParams

    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    scales = QParams(power_2_scale=True, amax_epsilon=0.0)
    with mock.patch.multiple(Float8CurrentScaling, **dict.fromkeys(names, scales)):
        yield


def _distances(some: Any, others: Any) -> list[float]:
    """Relative distances of all numbers of forwards together, and of all gradients."""
    return [
        relative_distance(
            *(torch.cat([each.flatten().float() for each in one.values()]) for one in pair)
        )
        for pair in zip(some, others, strict=True)
    ]


def _logits(outcome: Any) -> Any:
    forwards, gradients = outcome
    return {name: each for name, each in forwards.items() if "logits" in name}, gradients


def _run(case: Case, make: Callable[..., TinyGPT] = build_gpt, **settings: Any) -> Any:
    return _logits(first_step(make(**(case.model | settings)), case))


def _make_balanced(**settings: Any) -> TinyGPT:
    return balanced_gpt(settings, EXACT)


def _scales_of_all_rows(rank: int, name: str, gpu: str) -> dict[str, list[float]]:
    # Only of bfloat16 NVFP4 mixes rows.
    dtype = torch.bfloat16 if name == "nvfp4" else torch.float32
    case = Case(name, dict(dtype=dtype), num_microbatches=4)
    answer_like(gpu)
    with _to_nearest():
        exact = _run(case, fp8=None, fp4=None)
        stock, first, second = (_run(case, make) for make in (build_gpt, *[_make_balanced] * 2))
    found = {
        "alike": _distances(second, first),
        "stock": _distances(stock, exact),
        "balanced": _distances(first, exact),
        "apart": _distances(first, stock),
    }
    if name == "tensorwise":
        with _powers_of_two():
            stock, balanced = (_run(case, make) for make in (build_gpt, _make_balanced))
        found["powers"] = [
            max(relative_distance(balanced[i][name], each) for name, each in stock[i].items())
            for i in (0, 1)
        ]
    return found


@_on(*dealt([("tensorwise", "hopper"), ("tensorwise", "blackwell"), ("nvfp4", "blackwell")]))
def test_balanced_models_are_as_near_to_unquantized_ones(name: str, gpu: str) -> None:
    for found in run_ranks(_scales_of_all_rows, 2, name, gpu):
        assert found["alike"] == [0.0, 0.0]
        assert min(found["apart"]) > 0.01, "the scales were those of unbalanced training"
        for of_balanced, of_stock in zip(found["balanced"], found["stock"], strict=True):
            assert of_balanced <= 1.05 * of_stock
        if name == "tensorwise":
            logits, gradients = found["powers"]
            assert logits <= 1e-5
            assert gradients <= 2e-2


# --- what is broken is seen


def _rows_in_backward() -> Any:
    push = inside.original(PUSH)
    return mock.patch(PUSH, lambda *args, columnwise=False, **kwargs: push(*args, **kwargs))


def _workspaces_left() -> Any:
    """Slots are plain numbers: the linear quantizes them, and keeps that for the next replica."""
    from megatron_ext.mcore.quantized import QuantizedMains

    make = QuantizedMains.weights
    return mock.patch.object(
        QuantizedMains,
        "weights",
        lambda mains, parts: [each.dequantize() for each in make(mains, parts)],
    )


def _break(rank: int) -> list[Apart]:
    """Train with nothing broken, then with each of the above."""
    # A slot has one replica after the other.
    case = Case("mxfp8", dict(experts=8), num_microbatches=4)
    answer_like(GPU[case.format])
    expected = first_step(build_gpt(**case.model), case)
    found = []
    for breaking in (nullcontext, _rows_in_backward, _workspaces_left):
        with breaking():
            gpt = balanced_gpt(case.model, BalanceConfig(tolerance=0.0, slots=1))
            found.append(apart(case, expected, first_step(gpt, case)))
    return found


@WITH_ONE_VERSION
def test_wrong_bytes_are_seen() -> None:
    by_rank = run_ranks(_break, 2)
    for sound, wrong_way, _ in by_rank:
        assert sound.forwards == wrong_way.forwards == []
        assert sound.gradients <= 1
        assert wrong_way.gradients > 1e4
    assert any(stale.forwards for *_, stale in by_rank)


# --- what is refused, before the first step


def _config(**settings: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    sizes = dict(num_layers=1, hidden_size=64, num_attention_heads=2, num_moe_experts=4)
    fixed = dict(moe_ffn_hidden_size=96, expert_model_parallel_size=2, add_bias_linear=False)
    return TransformerConfig(**(sizes | fixed | settings))


def _problems(**settings: Any) -> list[str]:
    from megatron_ext.mcore.limits import validate_for_balancing

    return validate_for_balancing(_config(**settings), EXACT)


FACTORY = "tests.te.test_quantized"
REFUSED: list[tuple[Settings, str, str]] = [
    (dict(fp8="hybrid", fp8_recipe="delayed"), "fp8_recipe ('delayed') must be", "no history"),
    (
        dict(fp8="e4m3", fp8_recipe="custom", fp8_quantizer_factory=FACTORY),
        "fp8_recipe ('custom') must be",
        "--fp8-recipe",
    ),
    (
        dict(fp4="e2m1", fp4_recipe="custom", fp4_quantizer_factory=FACTORY),
        "fp4_recipe ('custom') must be 'nvfp4'",
        "--fp4-recipe",
    ),
    *(
        (in_format(name) | dict(hidden_size=size), f"hidden_size ({size}) must be", f"of {least}")
        for name, size, least in (
            ("tensorwise", 72, 16),
            ("blockwise", 72, 16),
            ("mxfp8", 80, 32),
            ("nvfp4", 80, 32),
        )
    ),
    (
        in_format("mxfp8") | dict(moe_ffn_hidden_size=48),
        "moe_ffn_hidden_size (48) must be",
        "of 32",
    ),
    (in_format("mxfp8") | dict(moe_latent_size=16), "moe_latent_size (16) must be", "of 32"),
]


@pytest.mark.parametrize(("settings", "what", "rule"), REFUSED)
def test_settings_are_refused(settings: Settings, what: str, rule: str) -> None:
    (problem,) = _problems(**settings)
    assert problem.startswith(what)
    assert rule in problem


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_not_refused(name: str) -> None:
    assert _problems(**in_format(name)) == []


def test_sizes_are_refused_together_and_by_shard() -> None:
    (problem,) = _problems(**in_format("mxfp8"), hidden_size=72, moe_ffn_hidden_size=100)
    assert problem.startswith("hidden_size (72) and moe_ffn_hidden_size (100) must be a multiple")
    assert "--fp8-recipe" in problem
    (problem,) = _problems(**in_format("mxfp8"), expert_tensor_parallel_size=2)
    assert problem.startswith("moe_ffn_hidden_size (96 / 2 shards) must be a multiple of 32")


def test_check_looks_at_the_experts_of_a_spec() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from megatron_ext import check

    for grouped in (True, False):
        spec = get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=grouped)
        with nullcontext() if grouped else pytest.raises(ConfigError, match="SequentialMLP"):
            check(_config(**in_format("mxfp8")), EXACT, spec)


def test_a_gpu_without_the_format_is_refused() -> None:
    answer_like("hopper")
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("megatron_ext.mcore.limits.lack_here", return_value=None),
    ):
        found = [each for each in _problems(**in_format("mxfp8")) if "fp8" in each]
    (problem,) = found
    assert problem.startswith("fp8_recipe ('mxfp8') is not for this GPU")
    assert "--fp8-recipe" in problem
    answer_like("hopper")  # The next test may ask for another one.


@pytest.mark.parametrize("setting", ["fp8=e4m3", "quant_recipe"])
def test_an_older_transformer_engine_is_refused(setting: str) -> None:
    from megatron_ext.mcore.limits import validate_for_balancing

    recipe = _recipe_of_linears(linear_fc1=dict(training_recipe=IN_BLOCKS))
    config = _config(**in_format("mxfp8") if "fp8" in setting else dict(quant_recipe=recipe))
    with mock.patch("megatron.core.utils._te_version", Version("2.18.0")):
        (problem,) = validate_for_balancing(config, EXACT)
    assert problem.startswith(f"Transformer Engine (2.18.0) must be >= 2.20 with {setting}")
    assert "install" in problem


def _first_forward(settings: Settings, name: str) -> str:
    """The error of a balanced model's first forward."""
    answer_like(GPU[name])
    gpt = _make_balanced(**EXPERTS | settings)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at it
        gpt.forward_backward()
    return str(error.value)


def _unlike(rank: int, per_rank: list[Settings]) -> str:
    return _first_forward(per_rank[rank], "mxfp8")


BFLOAT16 = dict(dtype=torch.bfloat16)
UNLIKE = {
    "native": ([in_format("mxfp8"), in_format("mxfp8", native=True)], ["cached", "native"]),
    "recipe": (
        [in_format("mxfp8"), in_format("tensorwise")],
        ["MXFP8Tensor", "Float8Tensor"],
    ),
    "dtype": (
        [in_format("mxfp8"), in_format("mxfp8") | BFLOAT16],
        ["torch.float32", "torch.bfloat16"],
    ),
    "none": ([in_format("mxfp8") | BFLOAT16, BFLOAT16], ["MXFP8Tensor", "torch.bfloat16"]),
}


@pytest.mark.parametrize(("per_rank", "names"), UNLIKE.values(), ids=UNLIKE.keys())
def test_ranks_of_different_formats_are_refused(per_rank: list[Settings], names: list[str]) -> None:
    first, second = run_ranks(_unlike, 2, per_rank)
    assert first == second
    assert first.startswith("experts must be alike on all EP ranks")
    assert all(name in first for name in names)
    assert "--fp8-param-gather" in first


def _refused_when_built(rank: int, settings: Settings) -> None:
    answer_like(GPU["mxfp8"])
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        _make_balanced(**EXPERTS | in_format("mxfp8") | settings)


BUILT: dict[str, Settings] = {
    r"fp8=e4m3 must not be set with SequentialMLP": dict(moe_grouped_gemm=False)
}
if HAS_BLOCKS:
    BUILT[r"moe_single_grouped_weight \(True\) must be False with fp8=e4m3"] = dict(
        moe_single_grouped_weight=True, **OP_FUSER
    )


@pytest.mark.parametrize(("error", "settings"), BUILT.items())
def test_experts_without_quantized_replicas_are_refused(error: str, settings: Settings) -> None:
    with pytest.raises(RuntimeError, match=error):
        run_ranks(_refused_when_built, 2, settings)


def _overridden(rank: int) -> str:
    from transformer_engine.common.recipe import MXFP8BlockScaling

    def override(recipe: Any) -> None:  # As the variable does, which counts when TE is imported.
        recipe.backward_override = "dequantized"

    with mock.patch.object(MXFP8BlockScaling, "__post_init__", override):
        return _first_forward(in_format("mxfp8"), "mxfp8")


def test_another_backward_is_refused() -> None:
    for error in run_ranks(_overridden, 2):
        assert error.startswith("NVTE_BACKWARD_OVERRIDE (dequantized) must not be set")
        assert "quantized bytes" in error


def make_quantizer(role: Any) -> Any:
    """A factory of a custom recipe."""
    import transformer_engine.pytorch as te

    return te.MXFP8Quantizer(te.DType.kFloat8E4M3)


def _custom_linear(rank: int) -> str:
    custom = dict(
        fp8_quantization_recipe="custom", custom_recipe_factory=f"{FACTORY}.make_quantizer"
    )
    recipe = _recipe_of_linears(linear_fc1=dict(training_recipe=custom))
    return _first_forward(in_format("mxfp8") | dict(quant_recipe=recipe), "mxfp8")


def test_a_custom_recipe_of_a_linear_is_refused() -> None:
    for error in run_ranks(_custom_linear, 2):
        assert error.startswith("fp8_recipe (CustomRecipe) must be")
        assert "factory of quantizers" in error


def _evaluated_otherwise(rank: int) -> tuple[str, str]:
    from megatron.core.extensions.transformer_engine import (
        TEQuantizationParams,
        TEQuantizationRecipe,
    )

    mxfp8 = dict(fp8_quantization_recipe="mxfp8")
    recipe = _recipe_of_linears(linear_fc1=dict(training_recipe=mxfp8, evaluation_recipe={}))
    answer_like(GPU["mxfp8"])
    settings = EXPERTS | in_format("mxfp8")
    with pytest.raises(ValueError) as evaluated:  # noqa: PT011 - see the caller
        _make_balanced(**settings, quant_recipe=recipe).forward_backward()
    gpt = _make_balanced(**settings)
    gpt.forward_backward()
    (experts, *_) = (layer.experts for layer in balanced_layers(gpt))
    in_bf16 = TEQuantizationRecipe(override_quantized_autocast=True)
    experts.linear_fc1.te_quant_params = TEQuantizationParams(in_bf16, None)
    with pytest.raises(ValueError) as changed:  # noqa: PT011 - see the caller
        gpt.forward_backward()
    return str(evaluated.value), str(changed.value)


def test_another_precision_than_in_the_first_forward_is_refused() -> None:
    for evaluated, changed in run_ranks(_evaluated_otherwise, 2):
        assert evaluated.startswith("evaluation_recipe (")
        assert "--te-precision-config-file" in evaluated
        assert changed.startswith("experts.linear_fc1 computes by no recipe")
        assert "MXFP8BlockScaling" in changed
