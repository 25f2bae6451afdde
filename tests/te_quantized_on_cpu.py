"""Stand-ins for Transformer Engine's kernels that quantize, and for products of what is quantized.
`te_on_cpu.py` puts them in place.

Quantizers and quantized tensors are Transformer Engine's own. As on a GPU are

* scales, as its sources compute them, and rounding: to nearest even, saturating;
* layouts of data and scales with their padding, and the swizzled order of scales of MXFP8 and NVFP4
  where a tensor says that it has it;
* which of a tensor's two copies a product reads: row-wise for TN, column-wise of the weight for NN,
  column-wise of both for NT. What is not there raises RuntimeError.

Another is the order in which a GPU adds. Here sums inside a scaling block are exact, and blocks are
added one after the other in float32: a row of a product depends on its values only, and not on the
rows beside. Stochastic rounding (NVFP4's gradients) takes `torch.rand`, so no two calls are alike.

Not here, and raising NotImplementedError: delayed scaling, weights that are packed, MXFP8 with
blocks of 32 x 32, NVFP4 with scales by row or 4over6, amaxes that ranks share, and the op fuser's
fused kernels.

Legend: a product is D[m, n] = sum over k of B[m, k] A[n, k], with scales for blocks of k.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import after_call

GPU = {"tensorwise": "hopper", "blockwise": "hopper", "mxfp8": "blackwell", "nvfp4": "blackwell"}
"""What a recipe of Megatron runs on: `answer_like`."""

OTHER_GPUS = (("tensorwise", "blackwell"), ("blockwise", "blackwell"))
"""What else recipes run on. With one scale, a Blackwell has one copy for both directions; products
in blocks are MXFP8's there, of the same numbers."""

_CAPABILITY = {"hopper": (9, 0), "blackwell": (10, 0)}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT32_MAX = torch.finfo(torch.float32).max


def answer_like(gpu: str) -> None:
    """Let Transformer Engine hear of a "hopper" or a "blackwell", on a rank until its call ends."""
    from transformer_engine.pytorch import quantization, utils

    capability = _CAPABILITY[gpu]
    cuda = utils.torch.cuda  # Its own: see `te_on_cpu.py`.
    properties = cuda.get_device_properties()
    properties.major, properties.minor = capability
    vars(cuda)["get_device_capability"] = lambda device=None: capability
    for module in (utils, quantization):  # They remember earlier answers.
        for name, each in [*vars(module).items()]:
            if isinstance(each, functools._lru_cache_wrapper):
                each.cache_clear()
            elif name.endswith("_SUPPORT"):
                setattr(module, name, None)


def kind_of(tensor: Any) -> str | None:
    """The class of a quantized tensor, be it a `torch.Tensor` or bare storage; None of others."""
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    if not isinstance(tensor, QuantizedTensorStorage):
        return None
    return type(tensor).__name__.removesuffix("Storage")


def _torch_dtype(te_dtype: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch

    if isinstance(te_dtype, torch.dtype):
        return te_dtype
    return TE_DType_To_Torch[DType.cast(te_dtype)]


# --- scales


def _scale_of(amax: Tensor, largest: float, pow_2: bool, epsilon: float, limit: float) -> Tensor:
    """largest / amax, float32, at most `limit`; 1 where there is no such number."""
    amax = amax.clamp(min=epsilon)
    scale = torch.full_like(amax, largest) / amax  # A number over a tensor is rounded twice.
    scale = scale.where(scale.isfinite(), limit)
    if pow_2:  # The mantissa is cut off.
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale.where((amax > 0) & amax.isfinite(), 1.0)


def _e8m0_of(amax: Tensor, largest: float) -> Tensor:
    """The exponent of amax / largest, rounded up, with a bias of 127: uint8."""
    value = amax * torch.tensor(1.0 / largest)
    bits = value.view(torch.int32)
    # A mantissa carries over into the exponent. Half of the least normal number has its own power
    # of two, with nothing to round up.
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(max=0xFE) * (bits > 0x400000)
    return exponent.masked_fill(value.isnan(), 0xFF).to(torch.uint8)


def _power_of(e8m0: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(e8m0.shape), e8m0.int() - 127)


def _amax(x: Tensor, tall: int, wide: int) -> Tensor:
    """Largest magnitudes of blocks, float32 [ceil(rows / tall), ceil(columns / wide)]."""
    rows, columns = x.shape
    if columns % wide or rows % tall:
        x = F.pad(x, (0, -columns % wide, 0, -rows % tall))
    return x.abs().float().reshape(-1, tall, x.shape[1] // wide, wide).amax((1, 3))


def _spread(scale: Tensor, tall: int, wide: int, like: Tensor) -> Tensor:
    """A number of each block at all its elements."""
    everywhere = scale[:, None, :, None].expand(-1, tall, -1, wide)
    everywhere = everywhere.reshape(len(scale) * tall, -1)
    return everywhere[: like.shape[0], : like.shape[1]]


def swizzled(scales: Tensor) -> Tensor:
    """Scales [R, C], R a multiple of 128 and C of 4, in the order that cuBLAS reads."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


def unswizzled(scales: Tensor) -> Tensor:
    """The inverse of `swizzled`."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)


# --- quantizing


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any = None, pin: bool = False
) -> Any:
    """The buffers that the quantizer names, holding no numbers: what nothing writes shall show."""
    if type(quantizer).__name__ == "Float8Quantizer":
        raise NotImplementedError("delayed scaling has no twin")
    made = quantizer.storage_metadata(dtype)
    nominal: dict[str, Any] = {}
    if issubclass(made["cls"], Tensor):
        nominal = dict(shape=torch.Size(shape), dtype=dtype, device="cpu")
    names = dict(made["cls"]._INNER_TENSORS).values()
    made = made["cls"](**nominal, **dict.fromkeys(names), **made["nontensor_kwargs"])
    _fit(made, quantizer, shape)
    return made


def _fit(tensor: Any, quantizer: Any, shape: Sequence[int]) -> None:
    """Let a tensor have the buffers that the quantizer writes, and no others."""
    specs = quantizer.inner_tensor_specs(tuple(shape))
    for attribute, _ in tensor._INNER_TENSORS:
        if attribute not in specs:
            setattr(tensor, attribute, None)
        elif getattr(tensor, attribute) is None:
            size, dtype = specs[attribute]
            nothing = float("nan") if dtype.is_floating_point else 0xFF
            setattr(tensor, attribute, torch.full(size, nothing, dtype=dtype))
    if hasattr(tensor, "_transpose_invalid"):
        tensor._transpose_invalid = tensor._transpose is None


@torch.no_grad()
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """The tensor quantized, in `output` if there is one; `noop` may say to leave that as it is.

    An output loses a copy that its quantizer does not write, and gets one that is not there.
    Nothing is written of a tensor without rows, no scale either.
    """
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype)
    elif type(quantizer).__name__ != "Float8Quantizer":  # It names no buffers.
        _fit(output, quantizer, output.shape)
    if tensor.numel() and (noop is None or not noop.any()):
        rows = tensor.detach().reshape(-1, tensor.shape[-1])
        _QUANTIZE[type(quantizer).__name__](rows, quantizer, output)
    return output


def _cast(x: Tensor, f8: torch.dtype) -> Tensor:
    """Bytes of the nearest values of a format."""
    return x.clamp(-_LARGEST[f8], _LARGEST[f8]).to(f8).view(torch.uint8)


def _quantize_by_own_scale(x: Tensor, quantizer: Any, out: Any) -> None:
    if quantizer.with_amax_reduction:
        raise NotImplementedError("amaxes that ranks share have no twin")
    _quantize_by_scale(
        x,
        _scale_of(
            x.abs().amax().float(),
            _LARGEST[_torch_dtype(quantizer.dtype)],
            quantizer.force_pow_2_scales,
            quantizer.amax_epsilon,
            _FLOAT32_MAX,
        ),
        quantizer,
        out,
    )


def _quantize_by_given_scale(x: Tensor, quantizer: Any, out: Any) -> None:
    """The distributed optimizer's cast of a shard: ranks have agreed on a scale."""
    if quantizer.amax.numel():
        raise NotImplementedError("delayed scaling has no twin")
    _quantize_by_scale(x, quantizer.scale.reshape(()), quantizer, out)


def _quantize_by_scale(x: Tensor, scale: Tensor, quantizer: Any, out: Any) -> None:
    if out._data is None:
        raise NotImplementedError("no kernel writes only the column-wise copy")
    data = _cast(x.float() * scale, _torch_dtype(quantizer.dtype))
    out._data.copy_(data.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(data.T.reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.fill_(scale.reciprocal())


def _quantize_blockwise(x: Tensor, quantizer: Any, out: Any) -> None:
    f8, wide = _torch_dtype(quantizer.dtype), quantizer.block_len
    square = quantizer.block_scaling_dim == 2
    tall = wide if square else 1
    for source, data, scale_inv in (
        (x, out._rowwise_data, out._rowwise_scale_inv),
        (x.T, out._columnwise_data, out._columnwise_scale_inv),  # Its rows are columns of `x`.
    ):
        if data is None:
            continue
        scale = _scale_of(
            _amax(source, tall, wide),
            _LARGEST[f8],
            quantizer.force_pow_2_scales,
            quantizer.amax_epsilon,
            min(torch.finfo(x.dtype).max, _FLOAT32_MAX),
        )
        value = source.float() * _spread(scale, tall, wide, source)
        data.copy_(_cast(value, f8).reshape(data.shape))
        _put(scale.reciprocal() if square else scale.reciprocal().T, scale_inv)


def _put(scales: Tensor, padded: Tensor) -> None:
    padded.zero_()
    padded[: scales.shape[0], : scales.shape[1]] = scales


def _quantize_mxfp8(x: Tensor, quantizer: Any, out: Any) -> None:
    if quantizer.with_2d_quantization:
        raise NotImplementedError("MXFP8 with blocks of 32 x 32 has no twin")
    f8 = _torch_dtype(quantizer.dtype)
    out._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)
    for columnwise, data, scale_inv in (
        (False, out._rowwise_data, out._rowwise_scale_inv),
        (True, out._columnwise_data, out._columnwise_scale_inv),
    ):
        if data is None:
            continue
        tall, wide = (32, 1) if columnwise else (1, 32)
        e8m0 = _e8m0_of(_amax(x, tall, wide), _LARGEST[f8])
        value = x.float() * _spread(_power_of(254 - e8m0.int()), tall, wide, x)
        data.copy_(_cast(value, f8).reshape(data.shape))
        _put(e8m0, scale_inv)
        if out._with_gemm_swizzled_scales:
            scales = scale_inv.T if columnwise else scale_inv
            scale_inv.view(-1).copy_(swizzled(scales).reshape(-1))


def _quantize_nvfp4(x: Tensor, quantizer: Any, out: Any) -> None:
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6:
        raise NotImplementedError("NVFP4 with scales by row, or 4over6, has no twin")
    if quantizer.with_amax_reduction:
        raise NotImplementedError("amaxes that ranks share have no twin")
    if len(x) % 16:
        raise ValueError(f"NVFP4 takes rows by 16, got {len(x)}")
    out._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)
    turned = x.T
    if quantizer.with_rht and x.dtype != torch.bfloat16:
        raise RuntimeError(f"a random Hadamard transform is of bfloat16, got {x.dtype}")
    if quantizer.with_rht:  # Column-wise only: a random Hadamard transform of 16 rows at a time.
        mixed = turned.float().unflatten(1, (-1, 16)) @ quantizer.rht_matrix.float()
        turned = mixed.flatten(1).to(x.dtype)
    tall = 16 if quantizer.with_2d_quantization else 1
    for source, data, scale_inv, amax in (
        (x, out._rowwise_data, out._rowwise_scale_inv, out._amax_rowwise),
        (turned, out._columnwise_data, out._columnwise_scale_inv, out._amax_columnwise),
    ):
        if data is None:
            continue
        amax.fill_(source.abs().amax())
        whole = _nvfp4_whole(amax)
        scale = _nvfp4_scale(_amax(source, tall, 16), whole)
        value = source.float() * _spread(_nvfp4_factor(scale, whole), tall, 16, source)
        data.copy_(_packed(_fp4_codes(value, quantizer.stochastic_rounding)).reshape(data.shape))
        _put(scale.view(torch.uint8).repeat_interleave(tall, 0)[: len(source)], scale_inv)
        if out._with_gemm_swizzled_scales:
            scale_inv.copy_(swizzled(scale_inv))


def _nvfp4_whole(amax: Tensor) -> Tensor:
    """One number for a tensor, which scales the scales of its blocks."""
    whole = (torch.full_like(amax, 448.0 * 6.0) / amax).clamp(max=_FLOAT32_MAX)
    return whole.where(whole != 0, 1.0)


def _nvfp4_scale(amax: Tensor, whole: Tensor) -> Tensor:
    """Of blocks, E4M3."""
    scale = amax * (whole * torch.tensor(6.0).reciprocal())
    return scale.clamp(max=448.0).to(torch.float8_e4m3fn)


def _nvfp4_factor(scale: Tensor, whole: Tensor) -> Tensor:
    """What a block's values are multiplied with, to lie in FP4's range."""
    return (1.0 / (scale.float() * (1.0 / whole))).clamp(max=_FLOAT32_MAX)


def _fp4_codes(x: Tensor, stochastic: bool = False) -> Tensor:
    """Numbers as four bits: a sign, and the index of a magnitude."""
    x, grid = x.clamp(-6, 6), torch.tensor(_FP4)
    low = (torch.searchsorted(grid, x.abs().contiguous(), right=True) - 1).clamp(0, 6)
    share = (x.abs() - grid[low]) / (grid[low + 1] - grid[low])
    if stochastic:
        up = torch.rand_like(share) < share
    else:  # To nearest, and half way to the even code.
        up = (share > 0.5) | ((share == 0.5) & (low % 2 == 1))
    return (low + up + 8 * (x < 0)).to(torch.uint8)


def _packed(codes: Tensor) -> Tensor:
    """Two codes of four bits a byte, along rows."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _unpacked(data: Tensor) -> Tensor:
    return torch.stack([data & 0xF, data >> 4], -1).flatten(-2)


_QUANTIZE: dict[str, Callable[[Tensor, Any, Any], None]] = {
    "Float8CurrentScalingQuantizer": _quantize_by_own_scale,
    "Float8Quantizer": _quantize_by_given_scale,
    "Float8BlockQuantizer": _quantize_blockwise,
    "MXFP8Quantizer": _quantize_mxfp8,
    "NVFP4Quantizer": _quantize_nvfp4,
}


_OF_GROUPS = {
    "data": ("_rowwise_data", "_data"),
    "columnwise_data": ("_columnwise_data", "_transpose"),
    "scale_inv": ("_rowwise_scale_inv", "_scale_inv"),
    "columnwise_scale_inv": ("_columnwise_scale_inv", "_scale_inv"),
    "amax": ("_amax_rowwise",),
    "columnwise_amax": ("_amax_columnwise",),
}
"""Buffers of packed groups, and their names in a quantized tensor."""


def check_groups(number: int) -> None:
    """Arguments of one kernel hold so many groups.

    Raises:
        RuntimeError: There are more.
    """
    if number > 64:
        raise RuntimeError(f"a kernel takes 64 groups, got {number}")


@torch.no_grad()
def group_quantize(
    tensor: Tensor, quantizer: Any, num_groups: int, split_sizes: Tensor, **_: Any
) -> Any:
    """Groups of rows quantized each by itself, and packed: one buffer for the data of all, and so
    for scales. Rows behind the last group are left out.

    Raises:
        RuntimeError: Blocks are scaled, and a group has not a multiple of 128 rows.
    """
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensorStorage

    sizes = split_sizes.tolist()
    has_blocks = type(quantizer).__name__ != "Float8CurrentScalingQuantizer"
    if has_blocks and any(size % 128 for size in sizes):
        raise RuntimeError(f"groups must have multiples of 128 rows, got {sizes}")
    parts = [quantize(part, quantizer) for part in tensor[: sum(sizes)].split(sizes)]
    packed = {}
    for argument, names in _OF_GROUPS.items():
        name = next((each for each in names if getattr(parts[0], each, None) is not None), None)
        if name is not None:
            packed[argument] = torch.cat([getattr(part, name).flatten() for part in parts])
    return GroupedTensorStorage(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        num_tensors=num_groups,
        quantizer=quantizer,
        first_dims=split_sizes,
        tensor_offsets=F.pad(split_sizes.cumsum(0) * tensor.shape[-1], (1, 0)),
        with_gemm_swizzled_scales=bool(quantizer.optimize_for_gemm),
        **packed,
    )


def split_quantize(
    tensor: Tensor,
    split_sizes: Sequence[int],
    quantizers: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Each group of rows quantized by itself.

    Raises:
        ValueError: Two groups with rows have one quantizer. A GPU may quantize them at once, and a
            quantizer has scratch memory for one amax and scale.
    """
    groups: dict[int, int] = {}
    for group, (rows, quantizer) in enumerate(zip(split_sizes, quantizers, strict=True)):
        if rows and (other := groups.setdefault(id(quantizer), group)) != group:
            raise ValueError(f"groups {other} and {group} have rows, and one quantizer for both")
    if type(quantizers[0]).__name__ == "NVFP4Quantizer":
        check_groups(len(split_sizes))
    parts = tensor.split(list(split_sizes))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def bgrad_quantize(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of a bias, and the tensor quantized."""
    summed = tensor.float().reshape(-1, tensor.shape[-1]).sum(0)
    return summed.to(tensor.dtype), quantize(tensor, quantizer)


# --- the other copy of a tensor, made of the first


def fp8_transpose(data: Tensor, te_dtype: Any, out: Tensor | None = None) -> Tensor:
    """Bytes with the last dimension first."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def nvfp4_data_transpose(rowwise: Tensor, out: Tensor | None = None) -> Tensor:
    """Four bits an element, [M, K / 2] to [K, M / 2]."""
    turned = _packed(_unpacked(rowwise).T).contiguous()
    return turned if out is None else out.copy_(turned)


def nvfp4_2d_scale_transpose(
    rowwise: Tensor, columnwise: Tensor, m_tiles: int, k_tiles: int
) -> None:
    """Write scales of blocks of 16 x 16, each of which stands in 16 rows."""
    _put(rowwise[: 16 * m_tiles : 16, :k_tiles].T.repeat_interleave(16, 0), columnwise)


def nvfp4_2d_multi_tensor_transpose(
    rowwise: Sequence[Tensor],
    columnwise: Sequence[Tensor],
    rowwise_scales: Sequence[Tensor],
    columnwise_scales: Sequence[Tensor],
    m_sizes: Sequence[int],
    k_sizes: Sequence[int],
) -> None:
    """Both for several tensors."""
    for data, turned, m, k in zip(
        zip(rowwise, rowwise_scales, strict=True),
        zip(columnwise, columnwise_scales, strict=True),
        m_sizes,
        k_sizes,
        strict=True,
    ):
        nvfp4_data_transpose(data[0], out=turned[0])
        nvfp4_2d_scale_transpose(data[1], turned[1], -(-m // 16), -(-k // 16))


# --- products


@dataclass(frozen=True)
class Operand:
    """What a product reads of a tensor, the summed dimension k last.

    `values` are the format's own numbers, float64 [rows, k]; `scales` float32 [rows, ceil(k /
    block)]; `factor` is one more scale, for all.
    """

    values: Tensor
    scales: Tensor
    block: int
    factor: Tensor

    def dequantized(self) -> Tensor:
        """float32 [rows, k]."""
        values = self.values.float()
        return values * _spread(self.scales, 1, self.block, values) * self.factor


def operand(tensor: Any, columnwise: bool) -> Operand:
    """Read a quantized tensor.

    Args:
        tensor: Not changed.
        columnwise: Whether the product sums over the rows of the tensor.

    Raises:
        RuntimeError: It has no such copy.
    """
    if kind_of(tensor) == "Float8Tensor":
        values = _values_of_float8(tensor, columnwise)
        return Operand(values, torch.ones(len(values), 1), values.shape[1], tensor._scale_inv)
    way = "columnwise" if columnwise else "rowwise"
    data = _held(tensor, f"_{way}_data")
    is_turned = columnwise and kind_of(tensor) != "MXFP8Tensor"
    data = data.flatten(1) if is_turned else data.flatten(0, -2)
    scales = _held(tensor, f"_{way}_scale_inv")
    one = torch.ones(1)
    if kind_of(tensor) == "Float8BlockwiseQTensor":
        values = _decoded(data, tensor)
        scales = scales.repeat_interleave(128, 0) if tensor._is_2D_scaled else scales.T
        return Operand(values, _blocks(scales, values, 128), 128, one)
    if kind_of(tensor) == "MXFP8Tensor":
        values = _decoded(data, tensor)
        if columnwise:  # Neither data nor scales are stored turned, but the order of scales is.
            values, turned = values.T, scales.T
            scales = scales.reshape(turned.shape) if tensor._with_gemm_swizzled_scales else turned
        scales = unswizzled(scales) if tensor._with_gemm_swizzled_scales else scales
        return Operand(values, _power_of(_blocks(scales, values, 32)), 32, one)
    if kind_of(tensor) != "NVFP4Tensor":
        raise NotImplementedError(f"products of {type(tensor).__name__} have no twin")
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.float64)
    values = table[_unpacked(data).long()]
    scales = unswizzled(scales) if tensor._with_gemm_swizzled_scales else scales
    scales = _blocks(scales, values, 16).view(torch.float8_e4m3fn).float()
    return Operand(values, scales, 16, _held(tensor, f"_amax_{way}") / (6.0 * 448.0))


def _values_of_float8(tensor: Any, columnwise: bool) -> Tensor:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    transpose = None if tensor._transpose_invalid else tensor._transpose
    if not columnwise:
        data = _held(tensor, "_data")
        return _decoded(data.flatten(0, -2), tensor)
    if transpose is not None:
        return _decoded(transpose.flatten(1), tensor)
    if not is_non_tn_fp8_gemm_supported():
        raise RuntimeError(f"{type(tensor).__name__} has no valid _transpose, which a Hopper reads")
    return _values_of_float8(tensor, columnwise=False).T


def _held(tensor: Any, attribute: str) -> Tensor:
    buffer = getattr(tensor, attribute)
    if buffer is None:
        raise RuntimeError(f"{type(tensor).__name__} has no {attribute}, which this product reads")
    return buffer


def _decoded(data: Tensor, tensor: Any) -> Tensor:
    return data.view(_torch_dtype(tensor._fp8_dtype)).double()


def _blocks(scales: Tensor, values: Tensor, block: int) -> Tensor:
    """Without padding: [rows, ceil(k / block)]."""
    return scales[: len(values), : -(-values.shape[1] // block)]


def product_of_quantized(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """cuBLAS's op(a) op(b) of quantized tensors, by rows: D [m, n], float32."""
    if kind_of(a) != kind_of(b):
        raise TypeError(f"a product of {type(a).__name__} and {type(b).__name__}")
    left, right = operand(b, columnwise=transb), operand(a, columnwise=not transa)
    rows, columns = _addable(left.values, b), _addable(right.values, a)
    total = torch.zeros(len(left.values), len(right.values))
    for index in range(left.scales.shape[1]):
        k = slice(index * left.block, (index + 1) * left.block)
        parts = (x[:, k] @ y[:, k].T for x in rows for y in columns)
        exact = functools.reduce(torch.add, parts)
        total += exact.float() * torch.outer(left.scales[:, index], right.scales[:, index])
    return total * (left.factor * right.factor)


def _addable(values: Tensor, tensor: Any) -> list[Tensor]:
    """Parts whose products float64 adds without rounding, so that their order does not matter.

    E4M3 and FP4 have multiples of 2^-9 below 2^9. E5M2's numbers range from 2^-16 to 2^16: those
    below 1 go alone.
    """
    if kind_of(tensor) == "NVFP4Tensor" or _torch_dtype(tensor._fp8_dtype) != torch.float8_e5m2:
        return [values]
    small = values.where(values.abs() < 1, 0)
    return [small, values - small]


@torch.no_grad()
def dequantize(tensor: Any, te_dtype: Any) -> Tensor:
    """The values of the row-wise copy, or else of the column-wise one."""
    columnwise = (tensor._data if hasattr(tensor, "_data") else tensor._rowwise_data) is None
    values = operand(tensor, columnwise).dequantized()
    values = values.T if columnwise else values
    return values.reshape(tensor.shape).to(_torch_dtype(te_dtype))


# --- padding of groups


def fused_multi_row_padding(
    rows: Tensor, out: Tensor, sizes: Sequence[int], padded: Sequence[int]
) -> None:
    """Write groups of rows, each followed by zeros."""
    out.zero_()
    for source, target in zip(rows.split(list(sizes)), out.split(list(padded)), strict=True):
        target[: len(source)] = source


def fused_multi_row_unpadding(
    rows: Tensor, out: Tensor, padded: Sequence[int], sizes: Sequence[int]
) -> None:
    """Write groups without what was added."""
    for source, target in zip(rows.split(list(padded)), out.split(list(sizes)), strict=True):
        target.copy_(source[: len(target)])


# --- the distributed optimizer: a rank casts its shard of the master parameters


@torch.no_grad()
def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude [1]."""
    amax.fill_(tensor.abs().amax())


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk: int,
    noop: Tensor,
    lists: Sequence[Sequence[Tensor]],
    largest: float,
    pow_2: bool,
    epsilon: float,
) -> None:
    """Lists are amaxes, and scales and their inverses, which are written."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(_scale_of(amax, largest, pow_2, epsilon, _FLOAT32_MAX))
        scale_inv.copy_(scale.reciprocal())


@torch.no_grad()
def fp8_block_scaling_compute_partial_amax(
    shard: Tensor, amax: Tensor, height: int, width: int, start: int, block: int
) -> None:
    """Write what a shard gives to the amaxes of a weight's blocks."""
    found = _amax(_in_its_place(shard, height, width, start), block, block)
    amax[: found.shape[0], : found.shape[1]] = found


@torch.no_grad()
def fp8_block_scaling_partial_cast(
    shard: Tensor,
    out: Tensor,
    scale: Tensor,
    height: int,
    width: int,
    start: int,
    block: int,
    te_dtype: Any,
) -> None:
    """Write a shard's bytes."""
    value = _in_its_place(shard, height, width, start)
    data = _cast(value * _spread(scale, block, block, value), _torch_dtype(te_dtype))
    out.copy_(data.reshape(-1)[start : start + shard.numel()].view(out.shape))


@torch.no_grad()
def mxfp8_scaling_compute_partial_amax(
    shard: Tensor, rowwise: Tensor, columnwise: Tensor, height: int, width: int, start: int
) -> None:
    """Write what a shard gives to the amaxes of a weight's blocks, in both directions."""
    value = _in_its_place(shard, height, width, start)
    _put(_amax(value, 1, 32), rowwise)
    _put(_amax(value, 32, 1), columnwise)


@torch.no_grad()
def multi_tensor_compute_scale_inv_e8m0(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]]
) -> None:
    """Lists are amaxes, and inverse scales, which are written."""
    for amax, scale_inv in zip(*lists, strict=True):
        scale_inv.copy_(_e8m0_of(amax.float(), _LARGEST[torch.float8_e4m3fn]))


@torch.no_grad()
def mxfp8_scaling_partial_cast(
    shard: Tensor,
    rowwise: Tensor,
    columnwise: Tensor,
    rowwise_scale_inv: Tensor,
    columnwise_scale_inv: Tensor,
    height: int,
    width: int,
    start: int,
) -> None:
    """Write a shard's bytes in both directions."""
    value = _in_its_place(shard, height, width, start).float()
    for out, e8m0, tall, wide in (
        (rowwise, rowwise_scale_inv, 1, 32),
        (columnwise, columnwise_scale_inv, 32, 1),
    ):
        scaled = value * _spread(_power_of(254 - e8m0.int()), tall, wide, value)
        data = _cast(scaled, torch.float8_e4m3fn).reshape(-1)
        out.copy_(data[start : start + shard.numel()].view(out.shape))


@torch.no_grad()
def nvfp4_multi_tensor_compute_partial_amax(
    shards: Sequence[Tensor],
    amaxes: Sequence[Tensor],
    amaxes_of_all: Sequence[Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
    block: int,
) -> None:
    """Write what shards give to the amaxes of weights' blocks, and of weights [1]."""
    for shard, amax, of_all, *place in zip(
        shards, amaxes, amaxes_of_all, heights, widths, starts, strict=True
    ):
        amax.copy_(_amax(_in_its_place(shard, *place), block, block))
        of_all.fill_(amax.max())


@torch.no_grad()
def nvfp4_compute_global_scale(amaxes: Tensor, scales: Tensor) -> None:
    """Write one number for each weight."""
    scales.copy_(_nvfp4_whole(amaxes))


@torch.no_grad()
def nvfp4_multi_tensor_fused_scale(
    amaxes: Sequence[Tensor],
    amaxes_of_all: Sequence[Tensor],
    scales: Sequence[Tensor],
    weights_scales: Sequence[Tensor],
    weights_amaxes: Sequence[Tensor],
    tile_rows: Sequence[int],
    tile_columns: Sequence[int],
    padded_rows: Sequence[int],
    block: int,
) -> None:
    """Write scales of blocks as numbers, and as weights hold them, and the amaxes of weights."""
    for amax, of_all, scale, held_scale, held_amax in zip(
        amaxes, amaxes_of_all, scales, weights_scales, weights_amaxes, strict=True
    ):
        found = _nvfp4_scale(amax, _nvfp4_whole(of_all))
        scale.copy_(found.float())
        _put(found.view(torch.uint8).repeat_interleave(block, 0), held_scale)
        held_amax.copy_(of_all)


@torch.no_grad()
def nvfp4_multi_tensor_2d_partial_cast(
    shards: Sequence[Tensor],
    outs: Sequence[Tensor],
    scales: Sequence[Tensor],
    scales_of_all: Sequence[Tensor],
    heights: Sequence[int],
    widths: Sequence[int],
    starts: Sequence[int],
    block: int,
) -> None:
    """Write shards' bytes, each of two elements.

    Raises:
        ValueError: A shard begins or ends inside of a byte.
    """
    for shard, out, scale, whole, *place in zip(
        shards, outs, scales, scales_of_all, heights, widths, starts, strict=True
    ):
        start, end = place[2], place[2] + shard.numel()
        if start % 2 or end % 2:
            raise ValueError(f"a shard of elements {start} to {end} has half a byte of NVFP4")
        value = _in_its_place(shard, *place)
        value = value * _spread(_nvfp4_factor(scale, whole), block, block, value)
        data = _packed(_fp4_codes(value)).reshape(-1)[start // 2 : end // 2]
        out.copy_(data.view(out.shape))


def _in_its_place(shard: Tensor, height: int, width: int, start: int) -> Tensor:
    """A weight that is zero outside of the shard, float32."""
    weight = torch.zeros(height * width)
    weight[start : start + shard.numel()] = shard.reshape(-1).float()
    return weight.view(height, width)


QUANTIZED_TWINS: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        *(create_empty_quantized_tensor, quantize, split_quantize, bgrad_quantize, dequantize),
        group_quantize,
        *(fp8_transpose, nvfp4_data_transpose, nvfp4_2d_scale_transpose),
        *(nvfp4_2d_multi_tensor_transpose, fused_multi_row_padding, fused_multi_row_unpadding),
        *(compute_amax, multi_tensor_compute_scale_and_scale_inv),
        *(fp8_block_scaling_compute_partial_amax, fp8_block_scaling_partial_cast),
        *(mxfp8_scaling_compute_partial_amax, multi_tensor_compute_scale_inv_e8m0),
        *(mxfp8_scaling_partial_cast,),
        *(nvfp4_multi_tensor_compute_partial_amax, nvfp4_compute_global_scale),
        *(nvfp4_multi_tensor_fused_scale, nvfp4_multi_tensor_2d_partial_cast),
    )
}
"""Functions of `transformer_engine_torch`."""


# --- what Megatron asks of gloo


_patches = contextlib.ExitStack()
after_call.append(_patches.close)


def gather_one_by_one() -> None:
    """Let Megatron's DDP gather each bucket of parameters by itself, until a rank's call ends.

    It gathers buckets of bytes beside buckets of bfloat16 in one coalesced call, and gloo takes all
    for one dtype: quantized parameters come back as nonsense.
    """
    from megatron.core.distributed import param_and_grad_buffer as buffers

    class Done:
        def wait(self) -> None:
            pass

    def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*args, **(kwargs | {"async_op": False}))

    functions = ("dist_all_gather_func", "dist_reduce_scatter_func")
    changed: dict[str, Any] = {name: at_once(getattr(buffers, name)) for name in functions}
    changed["_coalescing_manager"] = lambda *args, **kwargs: contextlib.nullcontext(Done())
    _patches.enter_context(mock.patch.multiple(buffers, **changed))
