"""Ends the CUDA graphs that Megatron captures of a layer at the router's choices, before the plan.

A partial graph of Megatron (scopes `moe_router` and `moe_preprocess`) holds a layer's forward up to
the end of `MoELayer.preprocess`; expert computation and dispatch run without the graph. A plan
depends on the loads of all ranks, and the host reads it. So here the graph holds attention, router
and shared experts, and the whole of `preprocess` runs behind it, in every replay.

Megatron hands the graph's results over in two ways, and both take the choices along:

- Transformer Engine's graphs end with a signal that `MoELayer.forward` catches. A replay writes
  back the dispatcher's attributes that `cudagraph_attrs` names, and calls the layer again, whose
  `cudagraph_tensor_store` then has probabilities and no routing map.
- Megatron's own graphs (`local`, of hybrid models) hold a call of the layer that runs `route` and
  `preprocess` alone; another call, with the same attributes, begins with `dispatch`.

Legend: N local tokens, E logical experts, K choices per token.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoECudaGraphPartialCaptureSignal
from torch import Tensor

_CHOSEN = "chosen_in_graph"
"""The dispatcher's attribute for a graph's choices: a map bool [N, E], or ids [N, K]."""


class GraphsEndBeforePlan(MoELayer):
    """Megatron's MoE layer, whose `preprocess` runs behind the graph of its router.

    Subclasses override `preprocess_behind_graph` in the place of `preprocess`.
    """

    token_dispatcher: Any

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """End the graph that is captured, or preprocess what the graph or the router has chosen.

        Raises:
            MoECudaGraphPartialCaptureSignal: Transformer Engine's graph ends here.
        """
        # It also runs the layer to warm up for the capture.
        is_te = self.config.cuda_graph_impl == "transformer_engine"
        if is_te and self.training and is_graph_capturing():
            self._hand_over(routing_map)
            raise MoECudaGraphPartialCaptureSignal(
                self, "preprocess", hidden_states=hidden_states, probs=probs
            )
        if self.fwd_execution_map == "route":
            self._hand_over(routing_map)
            return hidden_states, probs
        if routing_map is None:
            routing_map = getattr(self.token_dispatcher, _CHOSEN)
            assert routing_map is not None, "a graph hands over the router's choices"
            setattr(self.token_dispatcher, _CHOSEN, None)
        # With what a replay left in the store, Megatron would take the preprocessing for done, and
        # after an error the next forward's routing as well.
        self.cudagraph_tensor_store.clear()
        return self.preprocess_behind_graph(hidden_states, probs, routing_map)

    def preprocess_behind_graph(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Preprocess the router's choices as Megatron does."""
        return super().preprocess(hidden_states, probs, routing_map)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Stage 5 (Megatron), behind the preprocessing that Megatron's own graph has left out."""
        if self.fwd_execution_map == "expert_compute":
            hidden_states, probs = self.preprocess(hidden_states, probs, None)
        return super().dispatch(hidden_states, probs)

    def _hand_over(self, routing_map: Tensor | None) -> None:
        """Make the choices the only result of the graph besides the stage's own."""
        self.token_dispatcher.cudagraph_attrs = [_CHOSEN]
        setattr(self.token_dispatcher, _CHOSEN, routing_map)
