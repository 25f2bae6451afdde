"""The stand-ins for Transformer Engine's quantizing kernels (`tests/te_quantized_on_cpu.py`).

Quantizing is compared with Transformer Engine's own references in Python where its wheel has them,
and else with the format's definition; products with products of what was dequantized. Layers 1
and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.cpu_platform import enable_cpu_platform
from tests.ranks import run_ranks
from tests.te_on_cpu import (
    enable_te_on_cpu,
    te_general_grouped_gemm,
    te_general_grouped_gemm_by_counts,
)
from tests.te_quantized_on_cpu import (
    GPU,
    answer_like,
    gather_one_by_one,
    product_of_quantized,
    swizzled,
    unswizzled,
)

enable_te_on_cpu()
enable_cpu_platform()

RECIPES = tuple(GPU)
CLASSES = ("Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor", "NVFP4Tensor")
CLASS = dict(zip(RECIPES, CLASSES, strict=True))
HALF_STEP = {name: 2.0**-2 if name == "nvfp4" else 2.0**-4 for name in RECIPES}
"""What rounding to nearest changes at most, relative to a normal number: the mantissa of E4M3 has 3
bits, and that of E2M1 has 1."""
SPLITS = [128, 0, 256]
"""Multiples of what each recipe pads to."""
INPUTS, OUTPUTS = 128, 256


@pytest.fixture(autouse=True)
def _hopper_again() -> Iterator[None]:
    yield
    answer_like("hopper")


def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    answer_like(GPU[name])
    if name == "nvfp4":
        return recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    kinds = dict(
        tensorwise=recipe.Float8CurrentScaling,
        blockwise=recipe.Float8BlockScaling,
        mxfp8=recipe.MXFP8BlockScaling,
    )
    return kinds[name]()


def _quantizer(name: str, **settings: Any) -> Any:
    """As for weights, whose blocks are squares where the recipe has such."""
    import transformer_engine.pytorch as te

    answer_like(GPU[name])
    e4m3, both = te.DType.kFloat8E4M3, dict(rowwise=True, columnwise=True)
    if name == "tensorwise":
        return te.Float8CurrentScalingQuantizer(e4m3, "cpu", **settings)
    if name == "blockwise":
        return te.Float8BlockQuantizer(e4m3, **both, **settings)
    if name == "mxfp8":
        return te.MXFP8Quantizer(e4m3, **settings)
    return te.NVFP4Quantizer(**({"with_2d_quantization": True} | settings))


def _module(kind: str, recipe: Any, *args: Any, native: bool = False, **settings: Any) -> Any:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    with te.quantized_model_init(enabled=native, recipe=recipe):
        return getattr(te, kind)(*args, params_dtype=torch.bfloat16, device="cpu", **settings)


def _run(module: Any, recipe: Any, tokens: Tensor, upstream: Tensor, *args: Any) -> list[Tensor]:
    """Output and gradients: of the tokens, then of the parameters."""
    import transformer_engine.pytorch as te

    tokens = tokens.clone().requires_grad_()
    with te.autocast(enabled=True, recipe=recipe):
        output = module(tokens, *args)
    return [output, *torch.autograd.grad(output, [tokens, *module.parameters()], upstream)]


def _tokens(rows: int = sum(SPLITS)) -> tuple[Tensor, Tensor]:
    """Tokens, and a gradient of outputs."""
    torch.manual_seed(1)
    return torch.randn(rows, INPUTS).bfloat16(), torch.randn(rows, OUTPUTS).bfloat16()


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- products


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_grouped_linear(name: str, native: bool) -> None:
    recipe = _recipe(name)
    grouped = _module("GroupedLinear", recipe, len(SPLITS), INPUTS, OUTPUTS, native=native)
    weights = [getattr(grouped, f"weight{index}") for index in range(len(SPLITS))]
    biases = [getattr(grouped, f"bias{index}") for index in range(len(SPLITS))]
    assert {type(weight).__name__ for weight in weights} == {CLASS[name] if native else "Parameter"}
    for bias in biases:
        torch.nn.init.normal_(bias)
    tokens, upstream = _tokens()
    found = _run(grouped, recipe, tokens, upstream, SPLITS)
    assert all(map(torch.equal, found, _run(grouped, recipe, tokens, upstream, SPLITS)))
    output, of_tokens, *of_parameters = found
    gradients = dict(zip(dict(grouped.named_parameters()), of_parameters, strict=True))

    high = [(weight.dequantize() if native else weight).detach().double() for weight in weights]
    xs, dys = tokens.double().split(SPLITS), upstream.double().split(SPLITS)
    added = torch.cat([bias.expand(len(x), -1) for bias, x in zip(biases, xs, strict=True)])
    pairs = [
        (output - added, torch.cat([x @ w.T for x, w in zip(xs, high, strict=True)])),
        (of_tokens, torch.cat([dy @ w for dy, w in zip(dys, high, strict=True)])),
        *((gradients[f"weight{index}"], dys[index].T @ xs[index]) for index in (0, 2)),
    ]
    for value, expected in pairs:
        # Two factors were rounded, each by at most this, and not alike: the rest is far smaller.
        assert 2**-6 < _error(value.detach(), expected) < 2**0.5 * HALF_STEP[name]
    assert not gradients["weight1"].any()
    for index, dy in enumerate(dys):
        torch.testing.assert_close(gradients[f"bias{index}"], dy.sum(0).bfloat16())


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_of_the_values_that_were_rounded(name: str) -> None:
    quantizer = _quantizer(name)
    tokens, upstream = _tokens(128)
    weight = torch.randn(OUTPUTS, INPUTS).bfloat16()
    w, x, dy = (quantizer(each) for each in (weight, tokens, upstream))
    for columnwise, found, b, a in (
        ((0, 0), product_of_quantized(w, True, x, False), x, w),
        ((0, 1), product_of_quantized(w, False, dy, False), dy, w),
        ((1, 1), product_of_quantized(x, False, dy, True), dy, x),
    ):
        b, a = (_only(each, way) for each, way in zip((b, a), columnwise, strict=True))
        b = b.dequantize(dtype=torch.float32).double()
        a = a.dequantize(dtype=torch.float32).double()
        expected = (b.T if columnwise[0] else b) @ (a if columnwise[1] else a.T)
        assert found.dtype == torch.float32
        assert _error(found, expected) < 1e-6  # of float32's sums of blocks


def _only(tensor: Any, columnwise: int) -> Any:
    """With one of its copies."""
    copy = tensor.detach()
    # On a Blackwell a `Float8Tensor` has the same for both.
    copy.update_usage(rowwise_usage=not columnwise, columnwise_usage=bool(columnwise))
    return copy


@pytest.mark.parametrize("name", RECIPES)
def test_a_product_needs_the_copy_that_it_reads(name: str) -> None:
    quantizer = _quantizer(name)
    tokens, upstream = _tokens(128)
    x, dy = quantizer(tokens), quantizer(upstream)
    product_of_quantized(_only(x, True), False, _only(dy, True), True)
    for x_columnwise, dy_columnwise in ((False, True), (True, False)):
        with pytest.raises(RuntimeError, match="which"):
            product_of_quantized(_only(x, x_columnwise), False, _only(dy, dy_columnwise), True)
    with pytest.raises(RuntimeError, match="which"):
        product_of_quantized(_only(x, True), True, _only(x, False), False)


def test_a_blackwell_reads_one_copy_of_a_tensor_with_one_scale_in_both_directions() -> None:
    tokens, upstream = _tokens(128)
    products = []
    for gpu, transposed in (("hopper", True), ("blackwell", False)):
        quantizer = _quantizer("tensorwise")
        answer_like(gpu)
        x, dy = quantizer(tokens), quantizer(upstream)
        assert (x._transpose is not None) == transposed
        products.append(product_of_quantized(x, False, dy, True))
    assert torch.equal(*products)


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside(name: str) -> None:
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    shape = 256, OUTPUTS
    upstream = torch.randn(shape) * torch.exp2(torch.randint(-15, 15, shape).float())
    upstream[::32, 0] = upstream.abs().max()  # Where one number scales all rows, it is this one's.
    upstream = upstream.bfloat16()
    quantizer = _quantizer(name)
    weight = quantizer(torch.randn(OUTPUTS, INPUTS).bfloat16())
    if name != "nvfp4":  # As in `hybrid` recipes: the widest range of exponents.
        quantizer.dtype = te.DType.kFloat8E5M2
    whole = product_of_quantized(weight, False, quantizer(upstream), False)
    parts = [32, 96, 128]
    for part, expected in zip(upstream.split(parts), whole.split(parts), strict=True):
        alone = product_of_quantized(weight, False, quantizer(part), False)
        assert torch.equal(alone, expected)


def test_sums_of_a_wide_range_are_exact() -> None:
    from transformer_engine.pytorch.constants import DType

    quantizer = _quantizer("tensorwise")
    weight = quantizer(torch.full((16, 160), 448.0))
    assert weight._scale_inv == 1
    quantizer.dtype = DType.kFloat8E5M2
    tokens = torch.zeros(16, 160)
    # 2^31 in between, beside which float64 does not hold the least.
    tokens[:, :72], tokens[:, 72], tokens[:, 88:] = 57344.0, 2.0**-16, -57344.0
    weight._data[:, 72] = 1  # 2^-9
    found = product_of_quantized(weight, True, quantizer(tokens), False)
    assert torch.equal(found, torch.full((16, 16), 2.0**-25))


def test_a_linear_is_a_group_and_a_norm_may_come_first() -> None:
    recipe = _recipe("mxfp8")
    tokens, upstream = _tokens(64)
    linear = _module("Linear", recipe, INPUTS, OUTPUTS)
    grouped = _module("GroupedLinear", recipe, 1, INPUTS, OUTPUTS)
    both = _module("LayerNormLinear", recipe, INPUTS, OUTPUTS, normalization="RMSNorm")
    torch.nn.init.normal_(both.layer_norm_weight)
    with torch.no_grad():
        for other in (grouped.weight0, both.weight):
            other.copy_(linear.weight)
    expected = _run(linear, recipe, tokens, upstream)
    assert all(map(torch.equal, _run(grouped, recipe, tokens, upstream, [64]), expected))
    normalized = torch.nn.functional.rms_norm(
        tokens.float(), (INPUTS,), both.layer_norm_weight.float(), both.eps
    ).bfloat16()
    expected = _run(linear, recipe, normalized, upstream)
    output, _, *gradients = _run(both, recipe, tokens, upstream)
    assert torch.equal(output, expected[0])
    names = [name for name, _ in both.named_parameters()]
    assert torch.equal(gradients[names.index("weight")], expected[2])


@pytest.mark.parametrize("names", [("mxfp8", None), ("mxfp8", "nvfp4")])
def test_a_product_has_factors_of_one_kind(names: tuple[str, str | None]) -> None:
    tokens, _ = _tokens(128)
    a, b = (_quantizer(name)(tokens) if name else tokens for name in names)
    with pytest.raises(TypeError, match="a product of MXFP8Tensor and"):
        product_of_quantized(a, True, b, False)


def test_a_group_without_rows_reads_no_weight() -> None:
    recipe = _recipe("mxfp8")
    grouped = _module("GroupedLinear", recipe, 3, INPUTS, OUTPUTS, native=True, bias=False)
    tokens, upstream = _tokens()
    expected = _run(grouped, recipe, tokens, upstream, SPLITS)
    for buffer in (grouped.weight1._rowwise_data, grouped.weight1._columnwise_data):
        buffer.fill_(0xFF)
    assert grouped.weight1.dequantize().isnan().all()
    assert all(map(torch.equal, _run(grouped, recipe, tokens, upstream, SPLITS), expected))
    quantizer = _quantizer("mxfp8")
    weights = [grouped.weight0, _only(grouped.weight1, True)]
    groups = [quantizer(part) for part in tokens.split(SPLITS)[:2]]
    output = torch.full((128, OUTPUTS), 3.0)
    rest = [torch.empty(0)] * 2, None, True, None, False, None, 0, False, False, 0
    te_general_grouped_gemm(weights, True, groups, False, [output], None, [128, 0], *rest)
    assert torch.equal(output, product_of_quantized(weights[0], True, groups[0], False))


# --- quantizing

INPUT_KINDS = ("normal", "wide", "zeros")


def _values(kind: str, shape: tuple[int, int] = (128, 192)) -> Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-20, 20, shape).float())
    if kind == "zeros":
        x[:64, :100] = 0
    return x.bfloat16()


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("f8", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_tensorwise_is_its_reference(f8: torch.dtype, pow_2: bool, kind: str) -> None:
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

    quantizer = _quantizer("tensorwise", force_pow_2_scales=pow_2)
    quantizer.dtype = DType.kFloat8E5M2 if f8 == torch.float8_e5m2 else DType.kFloat8E4M3
    found = quantizer(_values(kind))
    expected = reference.CurrentScalingQuantizerRef(
        dtype=f8, rowwise=True, columnwise=True, pow_2_scales=pow_2, eps=0.0
    ).quantize(_values(kind))
    assert torch.equal(found._data, expected.data.view(torch.uint8))
    assert torch.equal(found._transpose, expected.data_t.view(torch.uint8))
    assert torch.equal(found._scale_inv, expected.scale.reshape(1))
    assert not pow_2 or torch.frexp(found._scale_inv).mantissa == 0.5


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("way", ["rows", "squares", "mixed"])
def test_nvfp4_is_its_reference(way: str, kind: str) -> None:
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as reference
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    square, mixed = way == "squares", way == "mixed"
    found = _quantizer(
        "nvfp4", with_2d_quantization=square, with_rht=mixed, with_post_rht_amax=mixed
    )(_values(kind))
    expected = reference.NVFP4QuantizerRef(
        Fp4Formats.E2M1, quant_tile_shape=(16 if square else 1, 16), with_rht=mixed
    ).quantize(_values(kind))
    rows, columns = found.shape
    assert torch.equal(found._rowwise_data, expected.data)
    assert torch.equal(found._columnwise_data, expected.data_t)
    for scales, exact, (tall, wide) in (
        (found._rowwise_scale_inv, expected.scale, (rows, columns // 16)),
        (found._columnwise_scale_inv, expected.scale_t, (columns, rows // 16)),
    ):
        assert torch.equal(scales[:tall, :wide], exact.view(torch.uint8))
        assert not scales[:, wide:].any()
    assert torch.equal(found._amax_rowwise, expected.global_amax_row)
    assert torch.equal(found._amax_columnwise, expected.global_amax_col)


def _assert_nearest(data: Tensor, scaled: Tensor) -> None:
    """Bytes are those of the nearest numbers of E4M3 for each number, float64."""
    table = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (scaled.reshape(-1, 1) - table[table.isfinite()]).abs().amin(1)
    found = data.view(torch.float8_e4m3fn).double()
    assert torch.equal((scaled - found).abs().reshape(-1), nearest)


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("columnwise", [False, True])
def test_mxfp8_scales_by_the_least_power_with_which_a_block_fits(
    columnwise: bool, kind: str
) -> None:
    x = _values(kind)
    found = _quantizer("mxfp8")(x)
    data = found._columnwise_data if columnwise else found._rowwise_data
    scales = found._columnwise_scale_inv if columnwise else found._rowwise_scale_inv
    if columnwise:
        x, data, scales = x.T, data.T, scales.T
    rows, columns = x.shape
    largest = x.double().unflatten(1, (-1, 32)).abs().amax(2)
    power = torch.exp2(scales[:rows, : columns // 32].double() - 127)
    assert (largest <= 448 * power).all()
    assert ((largest > 448 * power / 2) | (largest == 0)).all()
    assert not scales[:, columns // 32 :].any()
    _assert_nearest(data, x.double() / power.repeat_interleave(32, 1))


@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("pow_2", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_blockwise_scales_by_the_largest_of_a_block(square: bool, pow_2: bool, kind: str) -> None:
    x = _values(kind, (160, 200))  # The last blocks are smaller.
    settings = dict(block_scaling_dim=2 if square else 1, force_pow_2_scales=pow_2)
    found = _quantizer("blockwise", **settings)(x)
    for source, data, scale_inv in (
        (x, found._rowwise_data, found._rowwise_scale_inv),
        (x.T, found._columnwise_data, found._columnwise_scale_inv),
    ):
        tall = 128 if square else 1
        scale_inv = scale_inv if square else scale_inv.T
        for i in range(0, source.shape[0], tall):
            for j in range(0, source.shape[1], 128):
                block = source[i : i + tall, j : j + 128].double()
                inverse = scale_inv[i // tall, j // 128]
                largest = block.abs().max()
                if not largest:
                    assert inverse == 1
                elif pow_2:
                    assert torch.frexp(inverse).mantissa == 0.5
                    assert 224 < largest / inverse.double() <= 448
                else:
                    torch.testing.assert_close(inverse.double(), largest / 448, rtol=2**-22, atol=0)
        if pow_2:
            everywhere = scale_inv.repeat_interleave(tall, 0).repeat_interleave(128, 1).double()
            scaled = source.double() / everywhere[: source.shape[0], : source.shape[1]]
            _assert_nearest(data, scaled)


def test_halves_are_rounded_to_even() -> None:
    x = torch.zeros(32, 32)
    x[0, :5] = torch.tensor([256.0, 1 + 1 / 16, 1 + 3 / 16, -1 - 1 / 16, 3 * 2.0**-10])
    found = _quantizer("mxfp8")(x).dequantize()[0, :5]
    assert found.tolist() == [256.0, 1.0, 1.25, -1.0, 2 * 2.0**-9]


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average() -> None:
    x = torch.full((1024, 16), 2.25)
    x[:, 0] = 6.0
    x[0, 0] = 6.0 * 448.0  # Then the other rows' scales are 1.
    torch.manual_seed(0)
    quantizer = _quantizer("nvfp4", with_2d_quantization=False, stochastic_rounding=True)
    first, second = (quantizer(x).dequantize()[1:, 1:] for _ in range(2))
    assert set(first.unique().tolist()) == {2.0, 3.0}
    assert not torch.equal(first, second)
    # Five standard deviations of a mean of n numbers, which are 3 once in four times.
    assert abs(first.mean() - 2.25) < 5 * (3 / 16 / first.numel()) ** 0.5


@pytest.mark.parametrize("name", RECIPES)
def test_dequantized_both_copies_are_near(name: str) -> None:
    x = _values("normal")
    quantized = _quantizer(name)(x)
    rowwise, columnwise = (
        _only(quantized, way).dequantize(dtype=torch.float32) for way in (False, True)
    )
    for found in (rowwise, columnwise):
        assert 2**-7 < _error(found, x) < HALF_STEP[name]
    if name != "mxfp8":  # Its blocks are rows in one copy and columns in the other.
        assert torch.equal(rowwise, columnwise)
    assert torch.equal(quantized.dequantize(dtype=torch.float32), rowwise)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "nvfp4"])
def test_the_column_wise_copy_is_made_of_the_row_wise_one(name: str) -> None:
    whole = _quantizer(name)(_values("normal"))
    made = _only(whole, False)
    with pytest.raises(RuntimeError, match="which"):
        product_of_quantized(made, False, made, True)
    made.update_usage(rowwise_usage=True, columnwise_usage=True)
    assert torch.equal(
        product_of_quantized(made, False, made, True),
        product_of_quantized(whole, False, whole, True),
    )


def test_swizzled_scales() -> None:
    scales = torch.arange(256 * 8).view(256, 8)
    for row, column in ((0, 0), (1, 0), (32, 0), (31, 3), (127, 3), (128, 0), (200, 5)):
        # Tiles of 128 x 4 one after the other; in one, 16 numbers of rows 32 apart are together.
        tile = row // 128 * 2 + column // 4
        place = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert swizzled(scales).view(-1)[place] == scales[row, column]
    assert torch.equal(unswizzled(swizzled(scales)), scales)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_scales_are_read_in_the_order_that_a_tensor_says(name: str) -> None:
    torch.manual_seed(0)
    quantizer = _quantizer(name)
    wide = torch.exp2(torch.randint(-9, 9, (256, 256)).float())
    w, x = (torch.randn(256, 256) * wide).bfloat16(), torch.randn(128, 256).bfloat16()
    plain, tokens = quantizer(w), quantizer(x)
    quantizer.optimize_for_gemm = True
    ordered = quantizer(w)
    assert ordered._with_gemm_swizzled_scales
    for transa in (True, False):
        expected = product_of_quantized(plain, transa, tokens, False)
        assert torch.equal(product_of_quantized(ordered, transa, tokens, False), expected)
    ordered._with_gemm_swizzled_scales = False
    for transa in (True, False):
        expected = product_of_quantized(plain, transa, tokens, False)
        assert not torch.equal(product_of_quantized(ordered, transa, tokens, False), expected)


# --- groups


def test_groups_with_rows_have_quantizers_of_their_own() -> None:
    import transformer_engine_torch as tex

    tokens, _ = _tokens(48)
    first, second = (_quantizer("tensorwise") for _ in range(2))
    parts = tex.split_quantize(tokens, [16, 0, 32], [first, first, second])
    assert torch.equal(parts[2]._data, second(tokens[16:])._data)
    with pytest.raises(ValueError, match="groups 0 and 2 have rows"):
        tex.split_quantize(tokens, [16, 0, 32], [first, second, first])


def test_kernels_for_groups_take_64() -> None:
    import transformer_engine_torch as tex

    tokens = torch.randn(16, INPUTS).bfloat16()
    for name, most in (("nvfp4", 64), ("blockwise", 65)):
        quantizers = [_quantizer(name) for _ in range(65)]
        tex.split_quantize(tokens, [16] + [0] * (most - 1), quantizers[:most])
    quantizers = [_quantizer("nvfp4") for _ in range(65)]
    with pytest.raises(RuntimeError, match="got 65"):
        tex.split_quantize(tokens, [16] + [0] * 64, quantizers)
    weights, ones = [torch.ones(1, 1)] * 65, torch.ones(1)
    with pytest.raises(RuntimeError, match="got 65"):
        te_general_grouped_gemm_by_counts(weights, True, None, False, None, None, None, ones, ones)


def test_what_no_kernel_writes_is_not_there() -> None:
    quantizer = _quantizer("tensorwise")
    assert quantizer(torch.empty(0, INPUTS))._scale_inv.isnan()
    quantizer.set_usage(rowwise=False)
    with pytest.raises(NotImplementedError, match="only the column-wise"):
        quantizer(_values("normal"))
    mixing = _quantizer("nvfp4", with_rht=True, with_post_rht_amax=True)
    with pytest.raises(RuntimeError, match=r"got torch\.float32"):
        mixing(_values("normal").float())


def test_packed_groups_are_of_whole_tiles() -> None:
    import transformer_engine_torch as tex

    tokens = torch.randn(144, INPUTS).bfloat16()
    for name in RECIPES:
        fails = name != "tensorwise"
        with pytest.raises(RuntimeError, match=r"got \[128, 16\]") if fails else nullcontext():
            tex.group_quantize(tokens, _quantizer(name), 2, torch.tensor([128, 16]))


def test_an_output_has_the_copies_that_its_quantizer_writes() -> None:
    for name in RECIPES:
        quantizer = _quantizer(name)
        quantizer.set_usage(columnwise=False)
        x = _values("normal")
        tensor = quantizer(x)
        quantizer.set_usage(columnwise=True)
        both, rows = quantizer(x), tensor.get_data_tensors()[0]
        quantizer.update_quantized(x, tensor)
        assert all(map(torch.equal, _parts(tensor), _parts(both)))
        assert tensor.get_data_tensors()[0] is rows
        quantizer.set_usage(columnwise=False)
        quantizer.update_quantized(x, tensor)
        assert tensor.get_data_tensors()[1] is None


def _parts(tensor: Any) -> list[Tensor]:
    return [getattr(tensor, attribute) for attribute, _ in type(tensor)._INNER_TENSORS]


def test_rows_are_padded_and_padding_is_taken_away() -> None:
    import transformer_engine.pytorch as te

    tokens = torch.randn(12, 4, requires_grad=True)
    sizes = [3, 0, 9]
    padded, padded_sizes = te.Fp8Padding(3, 8)(tokens, sizes)
    assert padded_sizes == [8, 0, 16]
    assert torch.equal(padded[3:8], torch.zeros(5, 4))
    assert torch.equal(torch.cat([padded[:3], padded[8:17]]), tokens)
    back = te.Fp8Unpadding(3, 8)(padded, sizes)
    assert torch.equal(back, tokens)
    upstream = torch.randn(12, 4)
    back.backward(upstream)
    assert torch.equal(tokens.grad, upstream)


# --- the distributed optimizer


def _cast_shards(rank: int, name: str) -> list[bool]:
    from transformer_engine.pytorch.tensor.utils import (
        cast_master_weights_to_fp8,
        post_all_gather_processing,
    )

    quantizer = _quantizer(name)
    shape = 496, 512
    masters = [_values(kind, shape).float() for kind in ("wide", "normal")]
    expected = [quantizer(master.bfloat16()) for master in masters]
    weights = [quantizer(torch.zeros(shape).bfloat16()) for _ in masters]
    # The first rank has a part of the first weight, the second its rest and all of the other.
    cut = 12346
    shards = [masters[0].view(-1)[:cut], None]
    starts: list[int | None] = [0, None]
    if rank == 1:
        shards, starts = [masters[0].view(-1)[cut:], masters[1].view(-1)], [cut, 0]
    cast_master_weights_to_fp8(
        weights, shards, starts, dist.group.WORLD, manual_post_all_gather_processing=True
    )
    attribute = "_data" if name == "tensorwise" else "_rowwise_data"
    of_first, of_second = (getattr(weight, attribute).view(-1) for weight in weights)
    num_bytes = cut // 2 if name == "nvfp4" else cut
    for part, owner in ((of_first[:num_bytes], 0), (of_first[num_bytes:], 1), (of_second, 1)):
        dist.broadcast(part, owner)
    post_all_gather_processing(weights)
    return [
        torch.equal(*pair)
        for tensors in zip(weights, expected, strict=True)
        for pair in zip(*map(_parts, tensors), strict=True)
    ]


@pytest.mark.parametrize(("name", "buffers"), [("tensorwise", 3), ("blockwise", 4), ("nvfp4", 6)])
def test_shards_of_a_master_weight_are_cast_as_the_whole(name: str, buffers: int) -> None:
    assert run_ranks(_cast_shards, 2, name) == [[True] * 2 * buffers] * 2


def _gather_bytes_and_numbers(rank: int, one_by_one: bool) -> bool:
    from megatron.core.distributed import param_and_grad_buffer as buffers

    if one_by_one:
        gather_one_by_one()
    sources = [torch.full((5,), rank + 1, dtype=dtype) for dtype in (torch.uint8, torch.bfloat16)]
    targets = [torch.zeros(10, dtype=source.dtype) for source in sources]
    with buffers._coalescing_manager(dist.group.WORLD, async_ops=True) as handle:
        for target, source in zip(targets, sources, strict=True):
            buffers.dist_all_gather_func(target, source, group=dist.group.WORLD, async_op=True)
    handle.wait()
    return all(target.tolist() == [1] * 5 + [2] * 5 for target in targets)


def test_bytes_are_gathered_beside_numbers() -> None:
    assert run_ranks(_gather_bytes_and_numbers, 2, True) == [True] * 2
    # Once gloo can, `gather_one_by_one` may go. The ranks before are the same ones: it was undone.
    assert run_ranks(_gather_bytes_and_numbers, 2, False) == [False] * 2
