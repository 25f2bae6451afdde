"""Computes a layer's shared experts where nothing waits for them: behind the push of replicas.

Megatron computes them before the router. Plan and replicas come behind the router, and would run
beside nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from megatron_ext.balance.beside import beside
from megatron_ext.mcore.stages import ObservedMoELayer


class SharedExpertsLater(ObservedMoELayer):
    """An MoE layer that may compute its shared experts within `preprocess`.

    A subclass has a `layout`, and in its forwards a `balancer`.
    """

    is_derived = False
    """Whether a program's class stands before this one: it may add shared experts by itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of a forward under way whose shared experts come later: their input, then their output.
        self._shared: Tensor | None = None

    @property
    def has_shared_later(self) -> bool:
        """Whether shared experts are computed behind the push, beside plan and replicas.

        With the combined schedule the push comes later, and Megatron's graphs of a part of a layer
        hold the shared experts with the router.
        """
        is_in_parts = self.config.cuda_graph_impl == "transformer_engine" or isinstance(
            self.fwd_execution_map, str
        )
        is_overlapped = self.config.overlap_moe_expert_parallel_comm
        has_shared = self.use_shared_expert and not self.shared_expert_overlap
        is_kept = is_overlapped or is_in_parts or self.is_derived
        return has_shared and self.layout.slots > 0 and not is_kept

    def beside_shared(self) -> AbstractContextManager[None]:
        """Run beside the shared experts, if they come later."""
        return beside(self.balancer.device) if self.has_shared_later else nullcontext()

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """Compute the shared experts (Megatron), or keep their input for `compute_shared`."""
        if self.has_shared_later:
            self._shared = hidden_states.view_as(hidden_states)
            return None
        return super().shared_experts_compute(hidden_states)

    def compute_shared(self) -> None:
        """Compute the shared experts; their backward comes where it always does.

        Autograd begins with what was computed last. In front of the router's, their backward would
        change the order of a sum, and overwrite Megatron's global buffer, in which the backward of
        an all-gather dispatcher leaves its gradient.
        """
        hidden_states = self._shared
        if hidden_states is None:  # A program calls the stages itself, without that of these.
            return
        output: Any = super().shared_experts_compute(hidden_states)
        if hidden_states.grad_fn is not None:
            output = output.view_as(output)
            output.grad_fn._set_sequence_nr(hidden_states.grad_fn._sequence_nr())
        self._shared = output

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Add the shared experts' output (Megatron)."""
        if shared_expert_output is None:
            shared_expert_output, self._shared = self._shared, None
        return super().postprocess(output, shared_expert_output)
