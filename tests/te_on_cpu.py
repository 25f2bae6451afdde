"""Lets the Python modules of Transformer Engine 2.20.2 run without CUDA.

All of `transformer_engine.pytorch` is the real one. Below it, Python stands in for the compiled
extension `transformer_engine_torch`: products of matrices, norms, routing, permutation and
optimizer steps in the dtypes bfloat16, float32 and float64, and what quantizes
(`te_quantized_on_cpu.py`). What is asked for and not here (fused attention) raises
NotImplementedError.

The stand-ins follow signatures that are private to one version. `tests/te/run.sh` puts that version
into a folder of its own, and runs tests with the folder on their path. There Megatron takes
Transformer Engine's norms and optimizers; all other tests run without it.

Legend: a product `op(a) @ op(b)` is said as cuBLAS says it, by columns. With rows it is `b @ a.T`
for TN (forward), `b @ a` for NN (gradient of the input), `b.T @ a` for NT (of the weight).
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ranks import after_call
from tests.te_quantized_on_cpu import (
    QUANTIZED_TWINS,
    answer_like,
    check_groups,
    dequantize,
    kind_of,
    product_of_quantized,
    quantize,
)
from tests.te_routing_on_cpu import PERMUTATION_TWINS, ROUTING_TWINS

VERSION = "2.20.2"

_enabled = False


def te_is_here() -> bool:
    """Whether this process has Transformer Engine on its path."""
    return importlib.util.find_spec("transformer_engine") is not None


def enable_te_on_cpu() -> None:
    """Make Transformer Engine importable and its modules runnable on the CPU, if it is here.

    Call it before anything imports Megatron, and before `enable_cpu_platform()`.

    Raises:
        RuntimeError: It is here in another version.
    """
    global _enabled
    if _enabled or not te_is_here():
        return
    if (found := importlib.metadata.version("transformer_engine")) != VERSION:
        raise RuntimeError(f"transformer_engine is {found}, and its twin for the CPU {VERSION}")
    _put_twins_in_place()
    _answer_like_a_gpu()
    after_call.append(functools.partial(answer_like, "hopper"))
    _enabled = True


# --- products


def _product(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """See the legend; in float32 at least, as tensor cores add."""
    if kind_of(a) or kind_of(b):
        return product_of_quantized(a, transa, b, transb)
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = (x.detach().reshape(-1, x.shape[-1]).to(wide) for x in (a, b))
    return (b.T if transb else b) @ (a.T if transa else a)


def _write(out: Tensor, value: Tensor, accumulate: bool) -> None:
    value = value.reshape(out.shape)
    out.copy_(out.to(value.dtype) + value if accumulate else value)


def _check_dtypes(outs: Sequence[Tensor]) -> None:
    if len(dtypes := {each.dtype for each in outs}) > 1:
        # Some of its kernels take the first's for all, and write over what is beside the others.
        raise TypeError(f"a grouped product has outputs of several dtypes: {dtypes}")


@torch.no_grad()
def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    pre_gelu_out: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """A product for each group. With `grad`, `bias` takes the sums of `b`; else it is added."""
    outs = out[0].split(list(m_splits)) if single_output else out
    _check_dtypes(outs)
    if len(kinds := {kind_of(each) for each in a}) > 1:
        raise TypeError(f"a grouped product has tensors of several kinds: {kinds}")
    for a_i, b_i, out_i, bias_i in zip(a, b, outs, bias, strict=True):
        if grad and bias_i.numel():
            bias_i.copy_(b_i.to(torch.promote_types(b_i.dtype, torch.float32)).sum(0))
        if kind_of(b_i) and not b_i.shape.numel():  # Then nothing of the weight is read.
            value = torch.zeros(out_i.shape)
        else:
            value = _product(a_i, transa, b_i, transb)
        if not grad and bias_i.numel():
            value = value + bias_i.to(value.dtype)
        _write(out_i, value, accumulate)
    return bias


@torch.no_grad()
def te_general_grouped_gemm_by_counts(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    bias: Any,
    bias_scale: Any,
    alpha: Tensor,
    beta: Tensor,
    *rest: Any,
) -> Any:
    """The same where rows are counted by a tensor, which a kernel reads on the device."""
    if bias is not None:
        raise NotImplementedError("biases of such products have no twin")
    for each in (a, out):
        if isinstance(each, list):
            check_groups(len(each))
    if isinstance(out, list):
        _check_dtypes(out)
    for a_i, b_i, out_i in zip(*(_parts(each) for each in (a, b, out)), strict=True):
        if b_i.shape[0]:  # A weight without rows is not read.
            _write(out_i, _product(a_i, transa, b_i, transb), bool(beta.any()))
        elif not bool(beta.any()):
            out_i.zero_()
    return out


def _parts(groups: Any) -> Sequence[Tensor]:
    """The tensors of a list, or of Transformer Engine's storage for groups of rows, or weights."""
    if isinstance(groups, list):
        return groups
    if groups.quantizer is not None:
        parts: Sequence[Tensor] = groups.split_into_quantized_tensors()
        return parts
    rows = groups.rowwise_data.view(groups.logical_shape)
    if groups.first_dims is None:  # All have the same shape.
        return rows.chunk(groups.num_tensors)
    counts = groups.first_dims.tolist()
    return rows[: sum(counts)].split(counts)


def splits_to_offsets_multi(
    splits: Tensor,
    device: torch.device,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The counts, and where each group ends in elements; its beginning as well, with a zero."""
    ends = splits.cumsum(0)
    offsets = [
        F.pad(ends * stride, (1 if with_zero else 0, 0)).to(dtype)
        for stride, with_zero, dtype in zip(strides, include_leading_zero, dtypes, strict=True)
    ]
    return splits, offsets


@torch.no_grad()
def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **rest: Any,
) -> list[Tensor | None]:
    """One product: [out, gradient of the bias, input of GELU, further output]."""
    if gelu or quantizer is not None or rest.get("comm_overlap") is not None:
        raise NotImplementedError("GELU, quantized outputs and overlap have no twin")
    value = _product(a, transa, b, transb) * rest.get("alpha", 1.0)
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.reshape(-1, b.shape[-1]).sum(0).to(bias.dtype)
        else:
            value = value + bias.to(value.dtype)
    if out is None:
        shape = value.shape if transb else (*b.shape[:-1], value.shape[-1])
        default = value.dtype if kind_of(a) else a.dtype
        out = value.reshape(shape).to(_torch_dtype(out_dtype, default))
    else:
        _write(out, value, accumulate)
    return [out, bias_grad, None, None]


def _torch_dtype(te_dtype: Any, default: torch.dtype) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    if te_dtype is None or isinstance(te_dtype, torch.dtype):
        return te_dtype or default
    return default if default == torch.float64 else TE_DType_To_Torch[te_dtype]


# --- norms


@torch.no_grad()
def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, *rest: Any
) -> list[Any]:
    """[normalized, None, 1 / root mean square]."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    value = wide * scale * _gamma(weight, rest)
    return [_deliver(value.to(_torch_dtype(dtype, x.dtype)), out, quantizer), None, scale[..., 0]]


@torch.no_grad()
def rmsnorm_bwd(dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *rest: Any) -> list[Tensor]:
    """Gradients of input and weight."""
    scale, dy = scale.unsqueeze(-1), _wide(dy)
    y, dz = _wide(x) * scale, dy * _gamma(weight, rest)
    dx = scale * (dz - y * (dz * y).mean(-1, keepdim=True))
    return [dx.to(x.dtype), (dy * y).flatten(0, -2).sum(0).to(weight.dtype)]


@torch.no_grad()
def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any,
    *rest: Any,
) -> list[Any]:  # fmt: skip
    """[normalized, mean, 1 / standard deviation]."""
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((wide - mean).pow(2).mean(-1, keepdim=True) + eps)
    value = (wide - mean) * scale * _gamma(weight, rest) + _wide(bias)
    value = _deliver(value.to(_torch_dtype(dtype, x.dtype)), out, quantizer)
    return [value, mean[..., 0], scale[..., 0]]


@torch.no_grad()
def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *rest: Any
) -> list[Tensor]:
    """Gradients of input, weight and bias."""
    scale, dy = scale.unsqueeze(-1), _wide(dy)
    y, dz = (_wide(x) - mean.unsqueeze(-1)) * scale, dy * _gamma(weight, rest)
    centred = dz - dz.mean(-1, keepdim=True)
    dx = scale * (centred - y * (dz * y).mean(-1, keepdim=True))
    sums = [value.flatten(0, -2).sum(0).to(weight.dtype) for value in (dy * y, dy)]
    return [dx.to(x.dtype), *sums]


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _gamma(weight: Tensor, rest: Sequence[Any]) -> Tensor:
    """The last argument of a norm says whether the weight is kept less one."""
    return _wide(weight) + (1.0 if rest[-1] else 0.0)


def _deliver(value: Tensor, out: Any, quantizer: Any) -> Any:
    if quantizer is not None:
        return quantize(value, quantizer, out)
    return value if out is None else out.copy_(value)


# --- activations of the op fuser


def scaled_swiglu(x: Tensor, scales: Tensor, quantizer: Any, interleaved: int) -> Tensor:
    """silu(gate) * linear * scale of the row; gate and linear may come in blocks by turns."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if interleaved:
        blocks = wide.unflatten(-1, (-1, 2, interleaved)).transpose(-3, -2)
        wide = blocks.reshape(x.shape)
    gate, linear = wide.chunk(2, -1)
    return (F.silu(gate) * linear * scales.unsqueeze(-1)).to(x.dtype)


def scaled_dswiglu(
    dy: Tensor, x: Tensor, scales: Tensor, quantizer: Any, interleaved: int, scale_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of input and scales."""
    with torch.enable_grad():
        x, scales = (value.detach().requires_grad_() for value in (x, scales))
        y = scaled_swiglu(x, scales, quantizer, interleaved)
    of_x, of_scales = torch.autograd.grad(y, (x, scales), dy)
    return of_x, of_scales if scale_grad else None


# --- optimizers: Megatron takes Transformer Engine's wherever it can be imported


@torch.no_grad()
def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Norm of all tensors together [1], and of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


@torch.no_grad()
def multi_tensor_scale(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], scale: Any
) -> None:
    """Write the first list's tensors, scaled, into the second's."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


@torch.no_grad()
def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *settings: Any
) -> None:
    """A step of Adam; lists are gradients, parameters, two moments, and maybe master parameters."""
    for grad, parameter, first, second, *masters in zip(*lists, strict=True):
        value = _adam((masters or [parameter])[0].float(), grad, first, second, *settings)
        for target in (parameter, *masters):
            target.copy_(value)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk: int, noop: Tensor, lists: Sequence[Sequence[Tensor]], *settings: Any
) -> None:
    """The same for bfloat16 parameters; the last list holds what `whole` adds to them."""
    for grad, parameter, first, second, remainder in zip(*lists, strict=True):
        value = _adam(whole(parameter, remainder), grad, first, second, *settings)
        low, high = value.view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
        remainder.copy_(low)
        parameter.view(torch.int16).copy_(high + (low < 0))


def whole(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The float32 values of which a bfloat16 parameter, rounded, and an int16 remainder are made.

    The remainder is the lower half of the bits. Where it is negative the upper half was rounded up.
    """
    high = parameter.detach().view(torch.int16) - (remainder < 0).short()
    return torch.stack([remainder, high], -1).view(torch.float32)[..., 0]


def _adam(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: bool,
    bias_correction: bool,
    weight_decay: float,
) -> Tensor:
    """A float32 weight after a step; the moments are changed in place."""
    correct = [1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2)]
    grad = grad.float()
    if not decoupled:
        grad = grad + weight_decay * weight
    first.copy_(beta1 * first + (1 - beta1) * grad)
    second.copy_(beta2 * second + (1 - beta2) * grad * grad)
    update = (first / correct[0]) / ((second / correct[1]).sqrt() + eps)
    if decoupled:
        update = update + weight_decay * weight
    return weight - lr * update


_TWINS: dict[str, Callable[..., Any]] = {
    "generic_gemm": generic_gemm,
    "get_cublasLt_version": lambda: 130600,
    "get_cudnn_version": lambda: 92000,
    "get_fused_attn_backend": lambda *args, **kwargs: (-1, "there are no kernels"),
    "get_grouped_gemm_setup_workspace_size": lambda num_groups: 1,
    "get_num_cublas_streams": lambda: 1,
    "layernorm_bwd": layernorm_bwd,
    "layernorm_fwd": layernorm_fwd,
    "multi_tensor_adam": multi_tensor_adam,
    "multi_tensor_adam_param_remainder": multi_tensor_adam_param_remainder,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
    "multi_tensor_scale_tensor": multi_tensor_scale,
    "rmsnorm_bwd": rmsnorm_bwd,
    "rmsnorm_fwd": rmsnorm_fwd,
    "scaled_dswiglu": scaled_dswiglu,
    "scaled_swiglu": scaled_swiglu,
    "splits_to_offsets_multi": splits_to_offsets_multi,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "te_general_grouped_gemm_for_discrete_in": te_general_grouped_gemm_by_counts,
    "te_general_grouped_gemm_for_discrete_out": te_general_grouped_gemm_by_counts,
    "te_general_grouped_gemm_for_grouped_tensor": te_general_grouped_gemm_by_counts,
    **QUANTIZED_TWINS,
    **ROUTING_TWINS,
}

# --- the compiled extension's place


class _AnyMember(enum.EnumMeta):
    """An enumeration that has every name: those of attention and routing are only passed on."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0


def _extension() -> types.ModuleType:
    """The module that stands for `transformer_engine_torch`."""
    module: Any = types.ModuleType("transformer_engine_torch")
    module.DType = enum.IntEnum(
        "DType",
        # Transformer Engine's own values. It has no name for float64: see `_answer_like_a_gpu`.
        dict(kByte=0, kInt32=2, kFloat32=4, kFloat16=5, kBFloat16=6, kFloat8E4M3=7, kFloat8E5M2=8)
        | dict(kFloat4E2M1=10),
    )
    kinds = ("INPUT", "WEIGHT", "OUTPUT"), ("GRAD_OUTPUT", "GRAD_INPUT")
    for name, names in (
        ("FP8FwdTensors", [f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in kinds[0]]),
        ("FP8BwdTensors", [f"{kind}{i}" for i in (1, 2, 3) for kind in kinds[1]]),
    ):
        setattr(module, name, enum.IntEnum(name, names, start=0))
    module.NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend",
        dict(NVTE_No_Backend=-1, NVTE_F16_arbitrary_seqlen=1, NVTE_FP8=2),
    )
    for name, twin in _TWINS.items():
        setattr(module, name, twin)

    def other(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith(("NVTE", "CommOverlap", "Float8BlockScale")):
            made: Any = _AnyMember(name, (enum.IntEnum,), enum.EnumMeta.__prepare__(name, ()))
        else:
            made = functools.partial(_has_no_twin, name)
        setattr(module, name, made)
        return made

    module.__getattr__ = other
    return module


def _has_no_twin(name: str, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(f"transformer_engine_torch.{name} has no twin for the CPU")


def _put_twins_in_place() -> None:
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # The library of kernels is not loaded.
    sys.modules["transformer_engine_torch"] = _extension()
    # Kernels in Triton, and export: what they import may be missing, and most is not used.
    unused = [f"triton.{path.stem}" for path in (root / "pytorch/triton").glob("[!_]*.py")]
    for name in ("onnx_extensions", "triton", *unused):
        name = f"transformer_engine.pytorch.{name}"
        sys.modules[name] = mock.MagicMock(
            name=name, __spec__=importlib.machinery.ModuleSpec(name, None)
        )
    kernels = sys.modules["transformer_engine.pytorch.triton"]
    kernels.permutation = types.SimpleNamespace(**PERMUTATION_TWINS)  # type: ignore[attr-defined]
    # `transformer_engine` imports `transformer_engine.pytorch`, which asks for the extension.
    path = root / "common"
    name = "transformer_engine.common"
    spec = importlib.util.spec_from_file_location(
        name, path / "__init__.py", submodule_search_locations=[str(path)]
    )
    assert spec is not None
    assert spec.loader is not None
    common: Any = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None
    vars(importlib.import_module("transformer_engine"))["common"] = common
    importlib.import_module("transformer_engine.pytorch")


# --- what Transformer Engine asks of PyTorch


class _Delegate(types.ModuleType):
    """A module with some answers of its own."""

    def __init__(self, module: Any, **answers: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, **answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _answer_like_a_gpu() -> None:
    """Transformer Engine hears of a GPU; everybody else who asks PyTorch hears the truth."""
    from transformer_engine.pytorch import (
        DotProductAttention,
        constants,
        distributed,
        permutation,
    )
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.ops.basic import grouped_linear
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage, nvfp4_tensor_storage

    properties = types.SimpleNamespace(name="CPU", multi_processor_count=1, total_memory=1 << 34)
    cuda = _Delegate(
        torch.cuda,
        is_available=lambda: True,
        current_device=lambda: torch.device("cpu"),
        get_device_properties=lambda device=None: properties,
        is_current_stream_capturing=lambda: False,
        synchronize=lambda device=None: None,
        default_generators={torch.device("cpu"): torch.default_generator},
    )
    distributed._lazy_init = lambda: None
    theirs = _Delegate(torch, cuda=cuda, version=_Delegate(torch.version, cuda="13.0"))
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine.") and vars(module).get("torch") is torch:
            module.torch = theirs  # type: ignore[attr-defined]
    answer_like("hopper")
    constants.TE_DType[torch.float64] = constants.DType.kFloat32
    gemm.get_cublas_workspace_size_bytes = lambda: 1
    for cast in (mxfp8_tensor_storage._FromMXFP8Func, nvfp4_tensor_storage._FromNVFP4Func):
        # They would go over a GPU.
        cast.forward = staticmethod(lambda ctx, tensor, dtype: dequantize(tensor, dtype))
    for owner, method in (
        (TransformerEngineBaseModule, "prepare_forward"),
        (DotProductAttention, "forward"),
        (grouped_linear, "general_grouped_gemm_for_grouped_tensor"),
        (permutation, "moe_permute"),
        (permutation, "moe_permute_with_probs"),
    ):
        setattr(owner, method, _with_tensors_on_a_gpu(getattr(owner, method)))


def _with_tensors_on_a_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def pretending(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.Tensor, "is_cuda", property(lambda tensor: True)):
            return function(*args, **kwargs)

    return pretending
