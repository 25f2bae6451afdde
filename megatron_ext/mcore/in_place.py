"""Refuses, at a layer's first forward, expert weights that are sharded, offloaded or freed.

Home ranks copy replicas from the memory of a parameter, at any time between forward and backward. A
program that shards, offloads or frees parameters moves that memory, or leaves other bytes there.

Of Megatron-FSDP a rank keeps shards, too, but the mains are whole while their layer runs, and a
push reads them as any others. Their gradients are those of one microbatch: fused products overwrite
`main_grad`, the replicas' sums are added to it, and behind the join Megatron-FSDP scatters it.
Unfused, autograd adds the sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_ext.balance.main_weights import MainWeights, is_fsdp
from megatron_ext.balance.strategies import of_methods
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.limits import DELAYS


def check_in_place(experts: nn.Module, device: torch.device, layer: int | None) -> None:
    """Check that the device of a layer's input has all weights of its experts whole.

    Raises:
        ValueError: A parameter is sharded, elsewhere, or without memory.
    """
    for name, parameter in experts.named_parameters():
        if reason := _obstacle(parameter, device):
            raise ValueError(
                f"layer {layer}: experts.{name} {reason}; replicas are copied from where a weight "
                "lies, so experts must stay whole on the device that computes"
            )


def check_beside_fsdp(config: Any, balance: BalanceConfig) -> None:
    """Check that nothing needs mains, or writes their gradients, at another time.

    Raises:
        ValueError: A setting does.
    """
    fields = (*DELAYS, "overlap_moe_expert_parallel_comm")
    met = [name for name in fields if getattr(config, name, None)]
    if config.gradient_accumulation_fusion and config.add_bias_linear:
        # It takes a bias's gradient from autograd, without what is in `main_grad`.
        met.append("add_bias_linear and gradient_accumulation_fusion")
    met += of_methods("LAYERS", balance)
    met += ["balance.objective=time with costs to measure"] * bool(balance.costs_to_measure)
    if met:
        raise ValueError(
            f"{' and '.join(met)} must not be set with Megatron-FSDP (--use-megatron-fsdp), which "
            "gathers a layer's weights, and takes their gradients, in the layer's own time"
        )


def check_main_grads(mains: MainWeights) -> None:
    """Check that the mains have the `main_grad` that fused weight gradients are added to."""
    if not mains.fused:
        return
    trained = (main for main in mains.parameters() if main.requires_grad)
    if not all(hasattr(main, "main_grad") or is_fsdp(main) for main in trained):
        raise ValueError(
            "gradient_accumulation_fusion (True) adds to `main_grad`, which the experts' weights "
            "do not have: wrap the model in Megatron's DistributedDataParallel before it trains, "
            "or give --no-gradient-accumulation-fusion"
        )


def memory_of(parameter: Tensor) -> Tensor:
    """Return the tensor with a parameter's values.

    A `GroupedTensor` of Transformer Engine, such as the single weight of all experts, keeps its
    values in another tensor, and so do quantized tensors. Megatron's DDP puts that other tensor
    into its buffer.
    """
    for name in ("rowwise_data", "_rowwise_data", "_data"):
        held = getattr(parameter, name, None)
        if isinstance(held, Tensor):
            return held
    return parameter


def _obstacle(parameter: Tensor, device: torch.device) -> str | None:
    """Return why replicas cannot be copied from a parameter's memory, or None."""
    if isinstance(parameter, DTensor):
        return "is a DTensor, of which a rank holds a part (leave out --use-torch-fsdp2)"
    if parameter.device != device:
        return f"is on {parameter.device} and the layer's input on {device}: is it offloaded?"
    held = memory_of(parameter)
    num_bytes = held.untyped_storage().nbytes()
    if num_bytes < held.nbytes:
        return f"has {num_bytes} of its {held.nbytes} bytes of memory: something has freed them"
    return None
