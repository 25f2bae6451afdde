"""Stages 5 and 7: token dispatch and combine over physical experts, by Megatron's own dispatchers.

A dispatcher sends each token to the ranks that hold its experts, and does not use the experts
themselves. So Megatron's dispatchers suffice, with M + S experts a rank instead of M, and with a
routing map over physical experts. The all-to-all dispatcher does not gather the counts of arriving
tokens, because the plan has these counts.

Legend: N local tokens, R ranks of the EP group, M mains and S slots per rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_ext.balance.forward import Forward


def physical_dispatcher(layer: Any, pg_collection: Any) -> Any:
    """Return a dispatcher for routing maps [N, P], of the layer's `dispatcher_class`.

    The layer still has the one for logical experts that Megatron's constructor has made.
    """
    logical, per_rank = layer.token_dispatcher, layer.layout.physical_per_rank
    first = layer.ep_group.rank() * per_rank
    local_experts = list(range(first, first + per_rank))
    # A shallow copy keeps every other setting; __post_init__ must not run again on a finished
    # config.
    config = copy.copy(layer.config)
    config.num_moe_experts = layer.layout.num_physical
    config.cuda_graph_impl = "none"  # The dispatcher is in no graph: partial_graphs.py.
    physical: Any = layer.dispatcher_class(logical)(
        per_rank, local_experts, config=config, pg_collection=pg_collection
    )
    if logical.shared_experts is not None:
        physical.set_shared_experts(logical.shared_experts)
    return physical


def expert_buffers(dispatcher: Any) -> dict[str, Tensor]:
    """Return the memory of a dispatcher that experts write to, as arguments of their module.

    Peers read it in place: of NCCL EP without copies, the outputs and the inputs' gradients.
    """
    find = getattr(dispatcher, "get_expert_zero_copy_buffers", None)  # since Megatron-Core 0.19
    buffers = zip(("output_buffer", "grad_input_buffer"), find() if find else (), strict=False)
    return {name: buffer for name, buffer in buffers if buffer is not None}


class SetUpForAll:
    """Lets NCCL EP's set-up, which Megatron calls before a dispatch, refuse other layers' experts.

    NCCL EP is set up once in a process, by the first dispatch of any layer, and Megatron ignores
    what later layers ask for. Tokens of a layer with another number of physical experts would go to
    wrong ranks.
    """

    _num_experts: int | str = "an unknown number of"  # before balancing was installed

    def __call__(self, set_up: Callable[[Any], None], manager: Any) -> None:
        """Set up, by the method of Megatron's manager, or refuse."""
        if not fused_a2a.te_ep._BOOTSTRAPPED:
            self._num_experts = manager.num_experts
        if manager.num_experts != self._num_experts:
            raise ValueError(
                f"NCCL EP is set up for {self._num_experts} experts in this process, and a MoE "
                f"layer has {manager.num_experts} (each rank's slots count): balance all MoE "
                "layers, with equal balance.slots, or set --moe-flex-dispatcher-backend deepep"
            )
        set_up(manager)


def release_graph(dispatcher: Any) -> None:
    """Drop the autograd graph that a dispatcher holds through the probabilities it keeps.

    Megatron's dispatchers keep probabilities until the next microbatch, only to look at their
    dtype. After an aborted step they would keep the graph alive, and with it the plans of earlier
    layers.
    """
    _change(dispatcher, ("probs", "local_probs"), Tensor.detach)


def release_maps(dispatcher: Any) -> None:
    """Drop the maps [N, P] that a dispatcher keeps until its next microbatch, once it is done.

    Megatron's dispatchers read them in a forward only; autograd keeps what a backward needs.
    """
    for name in ("routing_map", "local_map"):
        if hasattr(dispatcher, name):
            setattr(dispatcher, name, None)
    _change(dispatcher, ("probs", "local_probs"), lambda kept: kept.new_empty(0))
    # The flex dispatcher's manager keeps probabilities with their graph as well.
    manager = getattr(dispatcher, "_comm_manager", None)
    _change(manager, ("token_probs", "dispatched_probs"), Tensor.detach)


def _change(owner: Any, names: Sequence[str], change: Callable[[Tensor], Tensor]) -> None:
    """Change those attributes that are tensors."""
    for name in names:
        if isinstance(kept := getattr(owner, name, None), Tensor):
            setattr(owner, name, change(kept))


class PlannedDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, with the counts of tokens from the plan.

    `preprocess` sets the attributes that Megatron's method sets, in 0.16.1 as in 0.19.2. Megatron's
    method counts if the plan has no counts, and if padding adds tokens after the plan.

    Attributes:
        forward_under_way: The forward whose tokens come next; set by the layer. Sizes must fit on
            all ranks, so the ranks compare their plans before the exchange.
    """

    forward_under_way: Forward | None = None
    num_out_tokens: Any
    input_splits: Any
    output_splits: Any
    output_splits_tp: Any
    num_global_tokens_per_local_expert: Any

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Set the numbers of tokens that this rank sends to each rank, and gets from each rank.

        Takes the choices of physical experts, bool [N, R * (M + S)]. Returns the tokens for each of
        this rank's experts, int64 [M + S].
        """
        forward = self.forward_under_way
        arriving = forward.shares.arriving if forward is not None else None
        # A router drops tokens before the plan is made; padding adds tokens after the plan.
        adds = self.drop_and_pad or self.config.moe_router_padding_for_quantization
        if forward is None or arriving is None or adds or self.ep_size == 1:
            return super().preprocess(routing_map)
        forward.send_seal()
        leaving = forward.shares.split
        if self.config.moe_expert_capacity_factor is None:
            self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
        else:
            # Only the device knows how many tokens were dropped, so the host waits earlier.
            self.num_out_tokens = leaving.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        self.input_splits = leaving.sum(0)
        assert forward.shares.arrivals is not None
        self.output_splits, tokens_per_expert = forward.shares.arrivals.split(list(arriving.shape))
        self.output_splits_tp = None  # nobody shares this rank's tokens
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = arriving
            if not self.config.moe_permute_fusion:
                self._maybe_update_cuda_sync_point("before_permutation_2")
        return tokens_per_expert

    def _maybe_dtoh_and_synchronize(self, point: str, *args: Any) -> Any:
        result = super()._maybe_dtoh_and_synchronize(point, *args)
        if point == self.cuda_sync_point and self.forward_under_way is not None:
            self.forward_under_way.compare_seals()
        return result
