"""Swaps the balanced layer, and other parts, into any Megatron layer spec.

A spec names its MoE layer either as `ModuleSpec(module=MoELayer, ...)` (megatron-core 0.16) or as
`functools.partial(MoELayer, ...)` (0.17 and later). Both are found wherever they stand in a layer,
block or multi-token-prediction spec. The given spec is left as it was.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.balance.strategies import get_strategy, of_methods
from megatron_ext.balance.strategies.strategy import ForcesEven, StaysMegatron
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore import process_hooks
from megatron_ext.mcore.limits import require_balance_config
from megatron_ext.mcore.moe_layer import BalancedMoELayer
from megatron_ext.mcore.stages import NamedMoELayer, ObservedMoELayer
from megatron_ext.mcore.transformer_layers import JoiningTransformerLayer, PassingTransformerLayer


def balance_spec(spec: Any, balance: BalanceConfig) -> Any:
    """Return `spec` with its MoE layers balanced.

    Megatron's transformer layers around them become `JoiningTransformerLayer`s. Classes that a
    program derives from Megatron's layers get ours as another base. If a derived transformer layer
    does not call `super().forward`, backward waits for the reduction inside the MoE layer.

    The first call also changes the whole process, as `process_hooks.py` lists. From then on the
    ranks of a model sum their failed waits for replicas. So all ranks of every model of this
    process must call `balance_spec` or `balance_models`, also those of pipeline stages without MoE
    layers.

    The layers exchange messages with their EP group when they are built and in their first forward.

    Args:
        spec: A Megatron layer spec, block spec, or anything that holds such.
        balance: The settings of balancing. With the strategies `none` and `sem_moe` the layers stay
            Megatron's own, and the process is not changed.

    Raises:
        TypeError: `balance` is no `BalanceConfig`.
        ValueError: The strategy is unknown; `spec` has no MoE layer (but for the block of a stage
            among others), is balanced already or has layers or experts that cannot be balanced; or
            the file `balance.placement` is not valid.
        FileNotFoundError: There is no such file of placed replicas.
    """
    balanced = with_balanced_layers(spec, balance)
    if not isinstance(get_strategy(balance.strategy).kind, StaysMegatron):
        process_hooks.install()
    return balanced


def with_balanced_layers(spec: Any, balance: BalanceConfig) -> Any:
    """Return what `balance_spec` returns, or raise what it raises. Changes nothing."""
    require_balance_config(balance)
    kind = get_strategy(balance.strategy).kind
    if isinstance(kind, StaysMegatron):
        return spec
    _check_parts(spec)
    layer_class = balanced_layer_class(balance)
    params = {"balance": balance, **layer_class.shared_by_layers(balance)}

    def balanced(part: Any) -> Any:
        return with_module(part, _beneath(_module_of(part), layer_class), params)

    spec = replace_parts(
        spec, lambda part: _makes(part, MoELayer), balanced, required(spec, "MoE layer")
    )
    joins = issubclass(layer_class, BalancedMoELayer)
    return _around(layer_class, JoiningTransformerLayer if joins else PassingTransformerLayer, spec)


def _around(layer_class: type, transformer_layer: type[PassingTransformerLayer], spec: Any) -> Any:
    """Return `spec` with `transformer_layer` around MoE layers of `layer_class`.

    Megatron's own transformer layer becomes that class. A derived one gets it as a further base, so
    that it calls ours where it called Megatron's.
    """
    if transformer_layer is PassingTransformerLayer and not PassingTransformerLayer.is_needed:
        return spec

    def is_around(part: Any) -> bool:
        if not isinstance(part, ModuleSpec) or not _makes(part, TransformerLayer):
            return False
        is_ours = _makes(part, PassingTransformerLayer)
        return not is_ours and _makes(getattr(part.submodules, "mlp", None), layer_class)

    def ours(layer: Any) -> Any:
        own = [] if layer.module is TransformerLayer else [layer.module]
        return dataclasses.replace(layer, module=_combined((*own, transformer_layer)))

    return replace_parts(spec, is_around, ours)


_STAGES = ("preprocess", "dispatch", "shared_experts_compute", "routed_experts_compute", "combine")


def _beneath(own: type[MoELayer], layer_class: type) -> Any:
    """Return `layer_class` as a base of a program's own class of MoE layers.

    Raises:
        ValueError: The own class replaces a stage that `layer_class` replaces, or its constructor
            cannot pass on the arguments of `layer_class`.
    """
    if own is MoELayer:
        return layer_class
    if replaced := [name for name in _STAGES if getattr(own, name) is not getattr(MoELayer, name)]:
        raise ValueError(
            f"MoE layers of class {own.__name__} cannot be balanced, for it has a "
            f"{' and a '.join(replaced)} of its own: leave these stages to Megatron's MoELayer"
        )
    kinds = {each.kind for each in inspect.signature(own).parameters.values()}
    if own.__init__ is not MoELayer.__init__ and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ValueError(
            f"MoE layers of class {own.__name__} cannot be balanced, for its constructor takes no "
            "**kwargs: let it pass on to Megatron's MoELayer what it does not know"
        )
    combined = _combined((own, layer_class))
    combined.is_derived = True
    return combined


def _check_parts(spec: Any) -> None:
    """Check that the spec is not balanced yet, and that its experts can be balanced."""
    observed = (each for each in modules_of(spec) if issubclass(each, ObservedMoELayer))
    if balanced := {each.__name__ for each in observed}:
        raise ValueError(f"the spec is balanced already: it has {', '.join(sorted(balanced))}")
    if unknown := grouped_by_megatron(module_names(spec) - {TEGroupedMLP.__name__}):
        raise ValueError(
            f"the spec has experts of {unknown}, which cannot be balanced: make it with "
            "Transformer Engine's TEGroupedMLP, or with moe_grouped_gemm=False; "
            "megatron_ext.grouped_mm_spec then groups them"
        )


def grouped_by_megatron(names: Collection[str]) -> str:
    """Name the modules that Megatron puts into a spec with `moe_grouped_gemm`."""
    return ", ".join(sorted(name for name in names if name.endswith("GroupedMLP")))


def balanced_layer_class(balance: BalanceConfig) -> type[ObservedMoELayer]:
    """Return the class of the layers that balance by these settings.

    A method of `methods/` adds a subclass of `BalancedMoELayer` for its strategy, or for a setting
    of `balance` that is true.
    """
    if isinstance(get_strategy(balance.strategy).kind, ForcesEven):
        from megatron_ext.mcore.even_layer import EvenMoELayer

        return EvenMoELayer
    return _combined((*of_methods("LAYERS", balance).values(),) or (BalancedMoELayer,))


@functools.cache
def _combined(classes: tuple[Any, ...]) -> Any:
    """Return a class with all of these bases and the name of the first; or the one that there is.

    Megatron-Bridge knows modules by the names of their classes.
    """
    return classes[0] if len(classes) == 1 else type(classes[0].__name__, classes, {})


def name_stages(spec: Any) -> Any:
    """Return `spec` with the stages of Megatron's own MoE layers named in profiles.

    Balanced and even layers have those names by themselves. A spec without MoE layers of
    Megatron's own comes back as it was.
    """
    process_hooks.show_stages_in_nvtx()
    named = replace_module(spec, MoELayer, NamedMoELayer)
    return _around(NamedMoELayer, PassingTransformerLayer, named)


def required(spec: Any, what: str) -> str | None:
    """Return `what` if the spec must have it: a pipeline stage's block may be all dense layers."""
    if not isinstance(spec, TransformerBlockSubmodules) or not dist.is_initialized():
        return what
    # A program may give groups to its models alone: then nothing here knows of other stages.
    is_known = parallel_state.model_parallel_is_initialized()
    is_whole = is_known and parallel_state.get_pipeline_model_parallel_world_size() == 1
    return what if is_whole else None


def replace_module(spec: Any, old: type, new: type, what: str | None = None) -> Any:
    """Return `spec` with modules of another class. `what` and errors as for `replace_parts`."""
    return replace_parts(
        spec, lambda part: _module_of(part) is old, lambda part: with_module(part, new), what
    )


def with_module(part: Any, module: type, params: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return a part that makes another module, which gets further arguments."""
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, module=module, params={**(part.params or {}), **params})
    return functools.partial(module, *part.args, **part.keywords, **params)


def _module_of(part: Any) -> Any:
    """The module that a part of a spec makes; None if the part is something else."""
    if isinstance(part, ModuleSpec):
        return part.module
    return part.func if isinstance(part, functools.partial) else None


def _makes(part: Any, kind: type) -> bool:
    """Whether a part makes a module of this class, or of one that is derived from it."""
    module = _module_of(part)
    return isinstance(module, type) and issubclass(module, kind)


def has_moe_layers(spec: Any) -> bool:
    """Whether an object, a spec or not, holds MoE layers that are not balanced yet."""
    layers = [each for each in modules_of(spec) if issubclass(each, MoELayer)]
    return any(not issubclass(each, ObservedMoELayer) for each in layers)


def modules_of(spec: Any) -> set[type]:
    """Return the classes of the modules that a spec makes."""
    modules: list[Any] = []

    def note(part: Any) -> bool:
        modules.append(_module_of(part))
        return False

    replace_parts(spec, note, lambda part: part)
    return {module for module in modules if isinstance(module, type)}


def module_names(spec: Any) -> set[str]:
    """Return the names of these classes."""
    return {module.__name__ for module in modules_of(spec)}


def replace_parts(
    spec: Any,
    is_wanted: Callable[[Any], bool],
    change: Callable[[Any], Any],
    what: str | None = None,
) -> Any:
    """Return a copy of `spec` with every wanted part changed; shared parts stay shared.

    The spec is one of a layer or a block, or anything that holds such. `what` names the wanted part
    in the error; without `what` it need not be there.

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
        if isinstance(part, list):  # Of a program's own class, too.
            clone = copy.copy(part)
            clone[:] = map(walk, part)
            return clone
        if type(part) is tuple:
            return tuple(map(walk, part))
        if isinstance(part, functools.partial):
            keywords = {name: walk(value) for name, value in part.keywords.items()}
            return functools.partial(part.func, *(walk(item) for item in part.args), **keywords)
        # A layer's parts are in one of Megatron's dataclasses `...Submodules`.
        holds = dataclasses.is_dataclass(part) and type(part).__name__.endswith("Submodules")
        if holds or isinstance(part, ModuleSpec):
            clone = copy.copy(part)
            for field in dataclasses.fields(part):
                setattr(clone, field.name, walk(getattr(part, field.name)))
            return clone
        return part

    changed = walk(spec)
    if num_changed == 0 and what is not None:
        has = ", ".join(sorted(module_names(spec))) or f"no modules: {spec!r:.60}"
        raise ValueError(f"the spec has no {what} in it; it has {has}")
    return changed
