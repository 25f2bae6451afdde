"""Stages 5 and 7: token dispatch and combine over physical experts, by Megatron's own dispatchers.

A dispatcher sends each token to the ranks that hold its experts and knows nothing else of them. So
Megatron's dispatchers do all that is needed: they are given M + S experts a rank instead of M, and
a routing map over physical experts. One thing is left out of the all-to-all dispatcher: it need not
ask how many tokens come, because the plan says so. This is the kind `megatron`. A method may bring
a kind of its own; the setting `balance.local_first` asks for the kind of that name.

Legend: N local tokens, N' tokens at this rank's experts, H hidden, R ranks of the EP group, M mains
and S slots per rank.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout

_METHODS = "megatron_ext.methods"


class Part(NamedTuple):
    """Tokens at this rank's physical experts that are computed together."""

    tokens: Tensor
    """[N', H], sorted by expert."""
    tokens_per_expert: Tensor
    """Tokens of each physical expert, int64 [M + S]."""
    probs: Tensor
    """Router probabilities of the tokens, [N']."""


@dataclass(frozen=True, kw_only=True)
class DispatcherKind:
    """How tokens come to the experts, in one part or in several, and how the outputs leave them."""

    class_for: Callable[[Any], type]
    """Class of the dispatcher over physical experts, from the dispatcher over logical experts."""
    parts: Callable[[Any, Any, Any], Iterator[Part]]
    """Yields the parts in the order of computing, from the dispatcher and the two values that its
    dispatch returned. A part is asked for when the parts before it have been computed."""
    outputs: Callable[[Any, list[Tensor]], Any]
    """Makes the argument of combine from the dispatcher and each part's outputs [N', H]."""


def dispatcher_kind(name: str) -> DispatcherKind:
    """Return the kind of dispatcher of that name; a kind of `methods/` is imported now.

    Raises:
        ValueError: There is no such kind; the message lists the known names.
    """
    of_methods = _of_methods()
    if name in of_methods:
        found: DispatcherKind = pkgutil.resolve_name(of_methods[name])
        return found
    if name not in _OWN:
        known = ", ".join(sorted({**_OWN, **of_methods}))
        raise ValueError(f"unknown kind of dispatcher {name!r}; known: {known}")
    return _OWN[name]


def _of_methods() -> Mapping[str, str]:
    """Return the modules of the dispatchers of `methods/`; none if the folder is absent."""
    if importlib.util.find_spec(_METHODS) is None:
        return {}
    table: Mapping[str, str] = getattr(importlib.import_module(_METHODS), "DISPATCHERS", {})
    return table


def physical_dispatcher(
    kind: DispatcherKind,
    dispatcher: Any,
    layout: ExpertLayout,
    config: Any,
    ep_rank: int,
    pg_collection: Any,
) -> Any:
    """Return a dispatcher for routing maps [N, P].

    Args:
        kind: Kind of the dispatcher that is returned.
        dispatcher: The dispatcher that Megatron's layer made for logical experts.
        layout: Experts and slots of the EP group.
        config: The layer's TransformerConfig.
        ep_rank: This rank in the EP group.
        pg_collection: Process groups of the layer.
    """
    per_rank = layout.physical_per_rank
    local_experts = list(range(ep_rank * per_rank, (ep_rank + 1) * per_rank))
    # A shallow copy keeps every other setting; __post_init__ must not run again on a finished
    # config.
    physical_config = copy.copy(config)
    physical_config.num_moe_experts = layout.num_physical
    physical: Any = kind.class_for(dispatcher)(
        per_rank, local_experts, config=physical_config, pg_collection=pg_collection
    )
    if dispatcher.shared_experts is not None:
        physical.set_shared_experts(dispatcher.shared_experts)
    return physical


def release_graph(dispatcher: Any) -> None:
    """Drop the autograd graph that a dispatcher holds through the probabilities it keeps.

    Megatron's dispatchers keep probabilities until the next microbatch, only to look at their
    dtype. After an aborted step they would keep the graph alive, and with it the plans of earlier
    layers.
    """
    for name in ("probs", "local_probs"):
        remembered = getattr(dispatcher, name, None)
        if isinstance(remembered, torch.Tensor):
            setattr(dispatcher, name, remembered.detach())


def release_maps(dispatcher: Any) -> None:
    """Drop the maps [N, P] that a dispatcher keeps until its next microbatch, once it is done.

    Megatron's dispatchers read them in a forward only; autograd keeps what a backward needs.
    """
    for name in ("routing_map", "local_map"):
        if hasattr(dispatcher, name):
            setattr(dispatcher, name, None)
    for name in ("probs", "local_probs"):
        if isinstance(kept := getattr(dispatcher, name, None), torch.Tensor):
            setattr(dispatcher, name, kept.new_empty(0))


class Planned(NamedTuple):
    """How many tokens an exchange sends, and from whom how many come."""

    leaving: Tensor
    """Tokens of this rank for the instance of expert e on rank t, int64 [E, R]."""
    arriving: Tensor
    """Tokens of each rank for each of this rank's physical experts, int64 [R, M + S]."""
    send_seal: Callable[[], None]
    """Tells the other ranks what this rank planned."""
    compare: Callable[[], None]
    """Raises if ranks have planned differently, where the host has waited for the sizes."""


class PlannedDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher, which gathers no counts where the plan says them.

    Relies on what `preprocess` of Megatron's leaves behind, in 0.16.1 as in 0.19.2. Where tokens
    are added after the plan was made, that method counts as ever.

    Attributes:
        planned: What the plan says of the next tokens; None if it says nothing.
    """

    planned: Planned | None = None
    _compare: Callable[[], None] | None = None
    num_out_tokens: Any
    input_splits: Any
    output_splits: Any
    output_splits_tp: Any
    num_global_tokens_per_local_expert: Any

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Say how many tokens go where, and how many come from where.

        Args:
            routing_map: Choices of physical experts, bool [N, R * (M + S)].

        Returns:
            Tokens for each of this rank's experts, int64 [M + S].
        """
        planned, self.planned = self.planned, None
        if planned is None or not self._sends_what_is_planned():
            counted: Tensor = super().preprocess(routing_map)
            return counted
        planned.send_seal()
        self._compare = planned.compare
        if self.config.moe_expert_capacity_factor is None:
            self.num_out_tokens = len(routing_map) * self.config.moe_router_topk
        else:
            # The host does not know how many tokens were dropped, and waits for it earlier.
            self.num_out_tokens = planned.leaving.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        self.input_splits = planned.leaving.sum(0)
        self.output_splits = planned.arriving.sum(1)
        self.output_splits_tp = None  # nobody shares this rank's tokens
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        if self.num_local_experts > 1:
            self.num_global_tokens_per_local_expert = planned.arriving
            if not self.config.moe_permute_fusion:
                self._maybe_update_cuda_sync_point("before_permutation_2")
        return planned.arriving.sum(0)

    def _maybe_dtoh_and_synchronize(self, point: str, *args: Any) -> Any:
        result = super()._maybe_dtoh_and_synchronize(point, *args)
        if point == self.cuda_sync_point and self._compare is not None:
            compare, self._compare = self._compare, None
            compare()
        return result

    def _sends_what_is_planned(self) -> bool:
        # What a router drops it drops before the plan is made; what is added comes after it.
        return not self.drop_and_pad and self.ep_size > 1


def _class_for(dispatcher: Any) -> type:
    kind = type(dispatcher)
    return PlannedDispatcher if kind is MoEAlltoAllTokenDispatcher else kind


def _all_at_once(dispatcher: Any, tokens: Any, probs: Any) -> Iterator[Part]:
    part = Part(*dispatcher.dispatch_postprocess(tokens, probs))
    release_graph(dispatcher)
    yield part


def _the_output(dispatcher: Any, outputs: list[Tensor]) -> Any:
    (output,) = outputs
    return dispatcher.combine_preprocess(output)


MEGATRON = DispatcherKind(class_for=_class_for, parts=_all_at_once, outputs=_the_output)

_OWN = {"megatron": MEGATRON}
"""Kinds of dispatchers by name, besides those of `methods/`."""
