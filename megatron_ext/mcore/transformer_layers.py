"""Transformer layers around MoE layers: backward waits at their input for replicas' gradients."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.mcore.moe_layer import BalancedMoELayer


class PassingTransformerLayer(TransformerLayer):
    """Megatron's transformer layer that gives its process groups to any MoE layer.

    Megatron-Core 0.16 gives them to classes that it knows, and warns of others on every rank.
    """

    is_needed = not hasattr(MLP, "as_mlp_submodule")
    """From 0.17 on, Megatron gives them to all classes."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        given = submodules
        if self.is_needed:
            known = inspect.signature(TransformerLayer).bind(
                config, submodules, layer_number, *args, **kwargs
            )
            groups = {"pg_collection": known.arguments.get("pg_collection")}
            params = {**(submodules.mlp.params or {}), **groups}
            # Megatron builds all that has the attributes of a ModuleSpec, and looks into that only.
            mlp = SimpleNamespace(**(vars(submodules.mlp) | {"params": params}))
            submodules = dataclasses.replace(submodules, mlp=mlp)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.submodules_config = given


class JoiningTransformerLayer(PassingTransformerLayer):
    """A transformer layer at whose input backward waits for the replicas' gradients.

    So the reduction runs beside the backward of router and attention.
    """

    _is_behind_join = False

    def __init__(
        self, config: Any, submodules: Any, layer_number: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        # Layers of multi-token prediction are numbered behind the model's; their input is not the
        # output of the layer before.
        is_balanced = isinstance(self.mlp, BalancedMoELayer)
        # Since Megatron-Core 0.17, hybrid models give the number in the model.
        counts_in_chunk = kwargs.get("add_layer_offset", True)
        if is_balanced and counts_in_chunk and self.mlp.layer_number <= config.num_layers:
            # The argument counts from the chunk's first layer, the attribute from the model's.
            self.mlp.set_chunk(self.layer_number - layer_number)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's forward behind the point where backward will wait for the reduction."""
        return self._joined(super().forward, args, kwargs)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        """Run a layer's attention, with which Megatron's combined schedule begins, likewise."""
        is_begin = self.config.overlap_moe_expert_parallel_comm and not self._is_behind_join
        if not is_begin or is_graph_capturing():
            return super()._forward_attention(*args, **kwargs)
        return self._joined(super()._forward_attention, args, kwargs)

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the layer's graph, which Megatron calls in place of `forward`, behind that point.

        The point is no part of the graph, because its backward waits for a reduction.
        """
        return self._joined(super()._te_cuda_graph_replay, args, kwargs)

    def _joined(self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the layer behind the point where backward will wait."""
        # A hybrid model's layer with graphs of parts recomputes the experts together with the rest.
        recomputes_itself = getattr(self, "moe_layer_recompute", False)
        if not isinstance(self.mlp, BalancedMoELayer) or recomputes_itself:
            return run(*args, **kwargs)
        self._is_behind_join = True
        try:
            if "hidden_states" in kwargs:
                kwargs["hidden_states"] = self.mlp.join_reduction(kwargs["hidden_states"])
            else:
                args = (self.mlp.join_reduction(args[0]), *args[1:])
            return run(*args, **kwargs)
        except BaseException:
            self.mlp.abandon_forward()
            raise
        finally:
            self._is_behind_join = False
