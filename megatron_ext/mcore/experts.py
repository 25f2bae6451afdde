"""Stage 6: experts over main weights and slot weights.

Tokens arrive sorted by this rank's physical experts, mains first, then slots. For each kind of
experts module, a class of `ExpertWeights` finds the weights, and lets the module run mains and
slots. Each kind is one file and one line of `EXPERT_KINDS`.

Legend: M mains per rank, S slots per rank, H hidden.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

from megatron.core.distributed import distributed_data_parallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment, is_sharded
from megatron_ext.mcore.limits import quantization_of

_num_parts = 0
"""Modules, parameters and buffers that modules of this process have got so far."""


def count_part(module: nn.Module, name: str, part: Any) -> None:
    """Count a part that a module gets: for PyTorch to call.

    A tensor in the place of another is no new part: a router with `expert_bias` sets one in each
    forward.
    """
    global _num_parts
    is_there = name in module._parameters or name in module._buffers
    _num_parts += isinstance(part, nn.Module) or not is_there


class ExpertWeights:
    """How one kind of experts module keeps and uses its weights; made by `expert_weights`."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self._num_parts = -1

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Return what an expert's state is made of; asked for in the layer's first forward."""
        raise NotImplementedError

    def mains(self) -> MainWeights:
        """Return this rank's main weights, anew in each forward: a wrapper may move weights."""
        raise NotImplementedError

    @cached_property
    def take_sums_apart(self) -> bool:
        """Whether the mains take the replicas' sums from another backward than their own."""
        mains = self.mains()
        return mains.fused and mains.stay

    def require_plain(self) -> None:
        """Check that a program has added nothing to the experts that replicas would not have.

        Raises:
            ValueError: It has.
        """
        raise NotImplementedError

    def require_still_plain(self) -> None:
        """Call `require_plain` if some module may have got a part since the last call.

        Not in each forward, as it takes the host too long: so hooks of single experts are found in
        the first forward only.
        """
        if self._num_parts != _num_parts:
            self.require_plain()
            self._num_parts = _num_parts

    def lent(self, slots: Sequence[Any]) -> AbstractContextManager[None]:
        """Let the experts' module run the S >= 1 slots behind the mains, for the block."""
        raise NotImplementedError

    def run(
        self, slots: Sequence[Any], tokens: Tensor, counts: Tensor, probs: Tensor, **buffers: Tensor
    ) -> Tensor:
        """Run the mains and the slots, if there are any.

        Args:
            slots: Their weights, an entry a segment, stacked [S, *shape] or a list of S tensors,
                like the mains. The products get these very tensors, which may have a `main_grad`.
            tokens: [N', H], sorted by this rank's physical experts.
            counts: Tokens of each of these experts, [M + S], on the host or the device.
            probs: Router probabilities of the tokens, [N'].
            buffers: Memory of the dispatcher that the experts write to; see `expert_buffers`.

        Returns:
            Expert outputs, [N', H], in the order of `tokens`.
        """
        with self.lent(slots) if len(slots[0]) > 0 else nullcontext():
            output, bias = self.experts(tokens, counts, probs, **buffers)
        assert bias is None, "Megatron adds expert biases inside the experts"
        return output

    def run_delayed(self, compute: Callable[[], None], num_slots: int) -> list[Any]:
        """Compute the delayed weight gradients of one backward, by Megatron's `backward_dw`.

        Returns the gradients of all slots by segment; None if fused products have added them, and
        where a kind delays none.
        """
        compute()
        return [None] * len(self.segments)

    def forget_step(self) -> None:
        """Drop what an aborted step has left for delayed weight gradients."""


_MEGATRON, _OURS = "megatron.core.transformer.moe.experts", "megatron_ext.mcore"

EXPERT_KINDS = {
    f"{_MEGATRON}.SequentialMLP": f"{_OURS}.sequential_experts:SequentialWeights",
    f"{_MEGATRON}.TEGroupedMLP": f"{_OURS}.te_experts:TEGroupedWeights",
    f"{_OURS}.grouped_experts.GroupedExperts": f"{_OURS}.grouped_experts:GroupedWeights",
}
"""Module and class of the `ExpertWeights`, by the class of the experts; imported when needed."""


def _name_of(module_class: type) -> str:
    """Return the name of a class as in `EXPERT_KINDS`."""
    return f"{module_class.__module__}.{module_class.__name__}"


def kind_of(module_class: type) -> type | None:
    """Return the class of `EXPERT_KINDS` that a module's class is, or is derived from, or None."""
    return next((each for each in module_class.__mro__ if _name_of(each) in EXPERT_KINDS), None)


def expert_weights(experts: nn.Module) -> ExpertWeights:
    """Return how `experts` keeps and uses its weights.

    Raises:
        ValueError: Experts of this kind cannot be balanced.
    """
    let_all_microbatches_accumulate(experts)
    kind = kind_of(type(experts))
    if kind is None:
        raise ValueError(
            f"experts of type {type(experts).__name__} cannot be balanced; use TEGroupedMLP "
            "(moe_grouped_gemm=True with Transformer Engine), SequentialMLP "
            "(moe_grouped_gemm=False) or GroupedExperts (megatron_ext.grouped_mm_spec)"
        )
    if problem := quantization_problem(experts.config, kind):
        raise ValueError(problem)
    if kind is not TEGroupedMLP and any(map(is_sharded, experts.parameters())):
        raise ValueError(
            f"expert_gtp_weight_remat_size must be 1 with {kind.__name__}: of sharded experts, "
            "only TEGroupedMLP's have replicas (give --moe-grouped-gemm)"
        )
    made: ExpertWeights = pkgutil.resolve_name(EXPERT_KINDS[_name_of(kind)])(experts)
    return made


def let_all_microbatches_accumulate(experts: nn.Module) -> None:
    """Let fused weight gradients be added to `main_grad` from the first microbatch on.

    Transformer Engine's linears treat their first forward as the first microbatch of a step: the
    gradient overwrites `main_grad`. Experts that run in parts would lose the gradients of the parts
    whose backward came before. DDP has zeroed `main_grad` already, so adding is right. Megatron
    sets "first" again only in models that quantize; there quantized.py takes it away.
    """
    module: Any
    for module in experts.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False


def quantization_problem(config: Any, experts_class: type[nn.Module]) -> str | None:
    """Return why quantized experts of a class of `EXPERT_KINDS` have no replicas, or None."""
    setting = quantization_of(config)
    if setting is None or experts_class is TEGroupedMLP:
        return None
    return (
        f"{setting} must not be set with {experts_class.__name__}: of quantized experts, only "
        "TEGroupedMLP's have replicas (give --moe-grouped-gemm)"
    )


@contextmanager
def lent_to(module: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Let a module have these attributes for the block.

    They are set in `vars`, past nn.Module, which would register tensors as parameters. There they
    hide parameters of the same names. One that stayed would keep the microbatch's graph alive.
    """
    own = {name: vars(module)[name] for name in attributes if name in vars(module)}
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(module)[name]
        vars(module).update(own)


def finish_parameter_gather(module: nn.Module) -> None:
    """Finish the all-gather of the module's parameters, by DDP or Megatron-FSDP.

    With `overlap_param_gather`, Megatron's DDP finishes the all-gather of a module's parameters in
    a forward pre-hook of the module; so does Megatron-FSDP where it gathers for each module alone.
    Replicas read the mains before the experts run, so this function calls the hooks now. The hooks
    do nothing the second time.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            # Only these hooks, found as in Megatron's CUDA graphs: others may read the inputs.
            if inspect.getmodule(hook) in (distributed_data_parallel, megatron_fsdp):
                hook(part)
