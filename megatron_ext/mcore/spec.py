"""Swaps the balanced layer, and other parts, into any Megatron layer spec.

A spec names its MoE layer either as `ModuleSpec(module=MoELayer, ...)` (megatron-core 0.16) or as
`functools.partial(MoELayer, ...)` (0.17 and later). Both are found wherever they stand in a layer,
block or multi-token-prediction spec. The given spec is left as it was.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.balance.strategies import get_strategy
from megatron_ext.balance.strategies.strategy import ForcesEven, StaysMegatron
from megatron_ext.config import BalanceConfig
from megatron_ext.files.placement import read_placement
from megatron_ext.mcore import failures
from megatron_ext.mcore.backward import JoiningTransformerLayer
from megatron_ext.mcore.even_layer import EvenMoELayer
from megatron_ext.mcore.experts import EXPERT_KINDS
from megatron_ext.mcore.grouped_experts import GroupedExperts
from megatron_ext.mcore.left_out import warn_of_layers_left_out
from megatron_ext.mcore.limits import require_balance_config
from megatron_ext.mcore.lines import BalanceLines
from megatron_ext.mcore.lookahead import LayerOrder
from megatron_ext.mcore.moe_layer import BalancedMoELayer
from megatron_ext.mcore.stages import NamedMoELayer


def balance_spec(spec: Any, balance: BalanceConfig) -> Any:
    """Return `spec` with its MoE layers balanced.

    Megatron's transformer layers around them become `JoiningTransformerLayer`s. A transformer layer
    of another class stays as it is; backward then waits for the reduction inside the MoE layer.

    Args:
        spec: A Megatron layer spec, block spec, or anything that holds such.
        balance: What the balancer may do. With `none` and `sem_moe` the layers stay Megatron's own.

    Raises:
        TypeError: `balance` is no `BalanceConfig`.
        ValueError: Unknown strategy, there is no MoE layer in `spec`, it is balanced already or has
            experts that cannot be, or the file of placed replicas holds none.
        FileNotFoundError: There is no such file of placed replicas.
    """
    require_balance_config(balance)
    kind = get_strategy(balance.strategy).kind
    if isinstance(kind, StaysMegatron):
        return spec
    _check_parts(spec)
    is_even = isinstance(kind, ForcesEven)
    layer_class: Any = EvenMoELayer if is_even else BalancedMoELayer
    params = {"balance": balance} if is_even else _shared_by_layers(balance)

    def balanced(layer: Any) -> Any:
        if isinstance(layer, ModuleSpec):
            return dataclasses.replace(
                layer, module=layer_class, params={**(layer.params or {}), **params}
            )
        return functools.partial(layer_class, *layer.args, **layer.keywords, **params)

    warn_of_layers_left_out()
    failures.stop_before_weights_change()
    spec = replace_parts(
        spec, lambda part: _is_spec_of(part, MoELayer), balanced, _required(spec, "MoE layer")
    )
    if layer_class is not BalancedMoELayer:
        return spec
    return replace_parts(
        spec,
        lambda part: (
            _is_spec_of(part, TransformerLayer)
            and _is_spec_of(part.submodules.mlp, BalancedMoELayer)
        ),
        lambda layer: dataclasses.replace(layer, module=JoiningTransformerLayer),
    )


def _check_parts(spec: Any) -> None:
    """Check that the spec is not balanced, and that its experts can be."""
    names = _module_names(spec)
    if balanced := names & {BalancedMoELayer.__name__, EvenMoELayer.__name__}:
        raise ValueError(f"the spec is balanced already: it has {', '.join(sorted(balanced))}")
    if unknown := _grouped_by_megatron(names - {kind.__name__ for kind in EXPERT_KINDS}):
        raise ValueError(
            f"the spec has experts of {unknown}, which cannot be balanced: make it with "
            "Transformer Engine's TEGroupedMLP, or with moe_grouped_gemm=False; "
            "megatron_ext.grouped_mm_spec then groups them"
        )


def _grouped_by_megatron(names: Collection[str]) -> str:
    """Of a spec's modules, those that Megatron puts there with `moe_grouped_gemm`."""
    return ", ".join(sorted(name for name in names if name.endswith("GroupedMLP")))


def _shared_by_layers(balance: BalanceConfig) -> dict[str, Any]:
    """Arguments that all balanced layers of a model share."""
    placement = read_placement(Path(balance.placement)) if balance.placement else None
    lines = BalanceLines(balance.lines_every) if balance.lines_every else None
    return {"balance": balance, "placement": placement, "order": LayerOrder(), "lines": lines}


def name_stages(spec: Any) -> Any:
    """Return `spec` with the stages of Megatron's own MoE layers named in profiles.

    Balanced and even layers have those names by themselves. A spec without MoE layers of
    Megatron's own comes back as it was.

    Args:
        spec: A Megatron layer spec, block spec, or anything that holds such.
    """

    def named(layer: Any) -> Any:
        if isinstance(layer, ModuleSpec):
            return dataclasses.replace(layer, module=NamedMoELayer)
        return functools.partial(NamedMoELayer, *layer.args, **layer.keywords)

    return replace_parts(spec, lambda part: _is_spec_of(part, MoELayer), named)


def grouped_mm_spec(spec: Any) -> Any:
    """Return `spec` with `GroupedExperts` for its `SequentialMLP` (same checkpoint keys).

    Raises:
        ValueError: There are no `SequentialMLP` experts in `spec`.
    """
    if by_megatron := _grouped_by_megatron(_module_names(spec)):
        raise ValueError(
            f"the spec has experts of {by_megatron}: make it with moe_grouped_gemm=False, which "
            "has the SequentialMLP that GroupedExperts replace"
        )

    def grouped(experts: Any) -> Any:
        if isinstance(experts, ModuleSpec):
            return dataclasses.replace(experts, module=GroupedExperts)
        return functools.partial(GroupedExperts, *experts.args, **experts.keywords)

    return replace_parts(
        spec,
        lambda part: _is_spec_of(part, SequentialMLP),
        grouped,
        _required(spec, "SequentialMLP"),
    )


def _required(spec: Any, what: str) -> str | None:
    """Return `what` if the spec must have it: a pipeline stage's block may be all dense layers."""
    is_a_stage = (
        isinstance(spec, TransformerBlockSubmodules)
        and parallel_state.model_parallel_is_initialized()
        and parallel_state.get_pipeline_model_parallel_world_size() > 1
    )
    return None if is_a_stage else what


def _is_spec_of(part: Any, module: type) -> bool:
    return _module_of(part) is module


def _module_of(part: Any) -> Any:
    """The module that a part of a spec makes; None if the part is something else."""
    if isinstance(part, ModuleSpec):
        return part.module
    return part.func if isinstance(part, functools.partial) else None


def has_moe_layers(spec: Any) -> bool:
    """Whether there are MoE layers in anything, a spec or not, that are not balanced yet."""
    return MoELayer.__name__ in _module_names(spec)


def _module_names(spec: Any) -> set[str]:
    """Names of the modules that a spec makes."""
    modules: list[Any] = []

    def note(part: Any) -> bool:
        modules.append(_module_of(part))
        return False

    replace_parts(spec, note, lambda part: part)
    return {module.__name__ for module in modules if isinstance(module, type)}


def replace_parts(
    spec: Any,
    is_wanted: Callable[[Any], bool],
    change: Callable[[Any], Any],
    what: str | None = None,
) -> Any:
    """Return a copy of `spec` with every wanted part changed; shared parts stay shared.

    Args:
        spec: A Megatron layer spec, block spec, or anything that holds such.
        is_wanted: Whether a part is to be changed.
        change: Returns the replacement of a part.
        what: Name of the wanted part for the error; None if it need not be there.

    Raises:
        ValueError: There is no wanted part, and `what` is given.
    """
    done: dict[int, Any] = {}
    num_changed = 0

    def walk(part: Any) -> Any:
        nonlocal num_changed
        if id(part) not in done:
            if is_wanted(part):
                done[id(part)] = change(part)
                num_changed += 1
            else:
                done[id(part)] = walk_inside(part)
        return done[id(part)]

    def walk_inside(part: Any) -> Any:
        if isinstance(part, (list, tuple)) and type(part) in (list, tuple):
            return type(part)(walk(item) for item in part)
        if isinstance(part, functools.partial):
            keywords = {name: walk(value) for name, value in part.keywords.items()}
            return functools.partial(part.func, *(walk(item) for item in part.args), **keywords)
        if isinstance(part, (ModuleSpec, MoESubmodules)) or _is_submodules(part):
            clone = copy.copy(part)
            for field in dataclasses.fields(part):
                setattr(clone, field.name, walk(getattr(part, field.name)))
            return clone
        return part

    changed = walk(spec)
    if num_changed == 0 and what is not None:
        has = ", ".join(sorted(_module_names(spec))) or f"no modules: {spec!r:.60}"
        raise ValueError(f"the spec has no {what} in it; it has {has}")
    return changed


def _is_submodules(part: Any) -> bool:
    """Whether this is one of Megatron's dataclasses `...Submodules`, which hold a layer's parts."""
    return dataclasses.is_dataclass(part) and type(part).__name__.endswith("Submodules")
