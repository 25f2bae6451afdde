"""Token re-batching: tokens move to the ranks of their probable experts ahead of the router.

With sequence parallelism each tensor-parallel rank brings a slice of the sequence to an MoE layer.
Where the tensor-parallel group is also the EP group, the ranks can deal the tokens by their experts
instead. The layer computes token by token, so its result does not depend on the rank that brings a
token.

    model's input    keep the microbatch's token ids
    MoE layer        1 predict each token's rank, 2 rebatch, all-to-all of hidden states
      router         note which rank each token goes to, for the layers after
      output         3 resume: all-to-all back

In backward each all-to-all is the adjoint of the other, in reverse order. Module hooks attach
re-batching: a model without the hooks is stock Megatron, and any kind of MoE layer works.
Re-batching excludes strategies by which a layer predicts the next layer's load, because dealing
gives the two layers different tokens.

If Megatron recomputes MoE layers alone, the all-to-all is outside of what is recomputed. If
Megatron recomputes whole layers, each layer repeats the all-to-all with the ids and ranks of the
last microbatch that came in, which is the right microbatch only without a pipeline.

Legend: N tokens of a rank, R ranks, H hidden, s tokens of a sample, b samples of a microbatch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megatron_ext.balance.reroute import as_map
from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.limits import Demand, broken
from megatron_ext.methods.sem_moe.semantics import Semantics
from megatron_ext.methods.sem_moe.tokens import LayerTables, predict, rebatch, resume


class Dealing:
    """Brings tokens to the ranks of a permutation, and back.

    The permutation has the token at each position, int64 [R N], equal on all ranks. The backward of
    each way is the other way. Lives from a layer's input to the layer's output.
    """

    def __init__(self, permutation: Tensor, group: dist.ProcessGroup) -> None:
        self.permutation = permutation
        self._group = group
        ranks, rank = group.size(), group.rank()
        num_tokens = len(permutation) // ranks
        source = permutation // num_tokens
        place_rank = torch.arange(ranks, device=permutation.device).repeat_interleave(num_tokens)
        counts = torch.bincount(place_rank * ranks + source, minlength=ranks**2)
        by_place = counts.view(ranks, ranks).tolist()
        # Rank by rank: this rank's tokens in the order of sending, and how many go to each rank;
        # the position of each token in the order of arrival, and how many come from each rank.
        self._own = (
            permutation[source == rank] - rank * num_tokens,
            [of_place[rank] for of_place in by_place],
        )
        self._dealt = source.view(ranks, -1)[rank].argsort(stable=True), by_place[rank]

    def deal(self, hidden_states: Tensor) -> Tensor:
        """Send this rank's tokens [s / R, b, H]; return the tokens dealt to this rank."""
        return self._exchange(hidden_states, self._own, self._dealt)

    def put_back(self, outputs: Tensor) -> Tensor:
        """Send the outputs of the tokens dealt to this rank; return those of its own tokens."""
        return self._exchange(outputs, self._dealt, self._own)

    def _exchange(
        self, rows: Tensor, send: tuple[Tensor, list[int]], receive: tuple[Tensor, list[int]]
    ) -> Tensor:
        arrived = all_to_all(self._group, rows.flatten(0, 1)[send[0]], receive[1], send[1])
        return arrived[receive[0].argsort()].view_as(rows)


class TokenRebatcher:
    """Re-batches the tokens of one model chunk; made by `rebatch_tokens`, lives as long as it.

    The chunk's first argument, or `input_ids`, is token ids [b, s]. `layers` are the chunk's MoE
    layers by their position in `semantics.layers`.
    """

    def __init__(self, chunk: nn.Module, layers: dict[int, MoELayer], semantics: Semantics) -> None:
        first = next(iter(layers.values()))
        self._group: dist.ProcessGroup = first.attn_tp_group
        self._num_experts = int(first.config.num_moe_experts)
        device = next(chunk.parameters()).device
        self._tables = {layer: LayerTables.of(semantics, layer, device) for layer in layers}
        looks_back = [layer for layer in layers if {layer - 1, layer - 2} <= layers.keys()]
        self._noted = {layer - back for layer in looks_back for back in (1, 2)}
        # Ids of the last microbatch that came in; recompute needs them until the next microbatch.
        self._ids: Tensor | None = None
        self._went: dict[int, Tensor] = {}
        # From a layer's input to the layer's output; None outside of the layer's forward.
        self._dealt: tuple[int, Dealing] | None = None
        chunk.register_forward_pre_hook(self._keep_ids, with_kwargs=True)
        for layer, module in layers.items():
            module.register_forward_pre_hook(partial(self._deal, layer), with_kwargs=True)
            module.register_forward_hook(self._put_back)
            if layer in self._noted:
                module.router.register_forward_hook(partial(self._note, layer))

    def _keep_ids(self, chunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids is None:
            raise ValueError(
                "input_ids (None) must be given to every model chunk with token re-batching, also "
                "where there is no embedding"
            )
        self._ids = ids.t().flatten()  # As hidden states are, [s, b].
        self._went.clear()

    def _deal(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace a layer's input by the tokens dealt to this rank."""
        if kwargs.get("padding_mask") is not None:
            raise ValueError("padding_mask must be None with token re-batching")
        assert self._ids is not None, "an MoE layer ran before its model"
        went = None
        if {layer - 1, layer - 2} <= self._went.keys():
            went = self._went[layer - 2], self._went[layer - 1]
        ranks = self._group.size()
        guess = predict(self._tables[layer], self._ids, ranks, went)
        dealing = Dealing(rebatch(guess, ranks), self._group)
        self._dealt = layer, dealing
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": dealing.deal(kwargs["hidden_states"])}
        return (dealing.deal(args[0]), *args[1:]), kwargs

    def _note(
        self, layer: int, router: nn.Module, args: tuple[Any, ...], outputs: tuple[Tensor, Tensor]
    ) -> None:
        """Gather on all ranks in sequence order the rank that each of a layer's tokens went to."""
        if self._dealt is None or self._dealt[0] != layer:
            return  # The MoE layer alone is recomputed: its first forward noted the ranks.
        permutation = self._dealt[1].permutation
        ranks = self._group.size()
        _, choices = outputs
        of_ranks = as_map(choices, self._num_experts).view(-1, ranks, self._num_experts // ranks)
        mine = of_ranks.sum(-1).argmax(1)
        together = mine.new_empty(len(permutation))
        dist.all_gather_into_tensor(together, mine, group=self._group)
        self._went[layer] = together[resume(permutation)]

    def _put_back(
        self, module: nn.Module, args: tuple[Any, ...], outputs: tuple[Tensor, Any]
    ) -> tuple[Tensor, Any]:
        """Replace a layer's output by the outputs of this rank's slice of the sequence."""
        dealt, self._dealt = self._dealt, None
        assert dealt is not None, "an MoE layer ended that had not begun"
        output, bias = outputs
        return dealt[1].put_back(output), bias


def rebatch_tokens(chunk: nn.Module, semantics: Semantics) -> TokenRebatcher | None:
    """Deal the tokens of every MoE layer of a model chunk by where their experts probably are.

    The model must start with its experts placed by the same semantics (`megatron-ext checkpoint
    relayout`). Otherwise tokens go to the wrong ranks: training stays right, but nothing is saved.

    The chunk, or model, is not yet wrapped by DDP. Every forward needs the microbatch's ids. A
    chunk without MoE layers gets no rebatcher.

    Raises:
        ValueError: A setting of Megatron or the strategy excludes re-batching, the tensor-parallel
            group is not the EP group, or the semantics are of another model.
    """
    modules = [module for module in chunk.modules() if isinstance(module, MoELayer)]
    if not modules:
        return None
    config, group = modules[0].config, modules[0].attn_tp_group
    problems = validate_for_rebatching(config, getattr(modules[0], "balance", None))
    if not problems:
        tp_ranks, ep_ranks = map(dist.get_process_group_ranks, (group, modules[0].ep_group))
        if tp_ranks != ep_ranks:
            problems.append(f"tensor-parallel ranks {tp_ranks} must be the EP ranks {ep_ranks}")
        sizes = semantics.expert.shape[1], semantics.affinity.shape[1]
        if sizes != (config.num_moe_experts, group.size()):
            problems.append(
                f"semantics of {sizes[0]} experts on {sizes[1]} ranks do not fit "
                f"{config.num_moe_experts} experts on {group.size()} ranks"
            )
        numbers = [module.layer_number for module in modules]
        if unknown := [number for number in numbers if number not in semantics.layers]:
            problems.append(f"semantics know layers {semantics.layers}, not {unknown}")
    if problems:
        raise ValueError("; ".join(problems))
    layers = {semantics.layers.index(module.layer_number): module for module in modules}
    return TokenRebatcher(chunk, layers, semantics)


def validate_for_rebatching(config: Any, balance: BalanceConfig | None) -> list[str]:
    """Return every reason why tokens cannot be dealt to ranks by their experts.

    `config` is a TransformerConfig; Megatron's own layers have no `balance`.
    """
    tp_size, ep_size = config.tensor_model_parallel_size, config.expert_model_parallel_size
    problems = []
    sequence_parallel = getattr(config, "sequence_parallel", False)
    if tp_size == 1 or tp_size != ep_size or not sequence_parallel:
        problems.append(
            "token re-batching needs a tensor-parallel group that is the EP group, with sequence "
            f"parallelism: tensor_model_parallel_size ({tp_size}) must be "
            f"expert_model_parallel_size ({ep_size}) and > 1, sequence_parallel "
            f"({sequence_parallel}) must be True"
        )
    recompute = getattr(config, "recompute_granularity", None)
    if recompute == "full" and config.pipeline_model_parallel_size > 1:
        problems.append(
            "recompute_granularity ('full') must not be 'full' with token re-batching and "
            f"pipeline_model_parallel_size ({config.pipeline_model_parallel_size}) > 1: a layer "
            "that is recomputed does not know its microbatch's token ids"
        )
    strategy = STRATEGIES.get(balance.strategy) if balance is not None else None
    if strategy is not None and strategy.predicts:
        problems.append(
            f"balance.strategy ({strategy.name}) must not predict with token re-batching: a "
            "layer's tokens are not those of the layer before it, whose routing would be compared"
        )
    return problems + broken(_FOR_REBATCHING, config, "token re-batching")


_FOR_REBATCHING = (
    Demand(
        "expert_tensor_parallel_size",
        (1,),
        "a rank must have whole experts",
        "set --expert-tensor-parallel-size 1",
    ),
    Demand(
        "moe_router_load_balancing_type",
        ("none", "aux_loss", "global_aux_loss"),
        "others look at tokens of one sample, or of one rank, together",
    ),
    Demand("moe_expert_capacity_factor", (None,), "which tokens are dropped would change"),
    Demand("moe_enable_routing_replay", (False,), "choices are replayed by place, not by token"),
    Demand("overlap_moe_expert_parallel_comm", (False,), "it runs the parts of a layer alone"),
    Demand("cuda_graph_impl", ("none",), "the all-to-all is decided on the host"),
)
