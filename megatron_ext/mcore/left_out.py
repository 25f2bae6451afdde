"""Notices MoE layers that were left out when the rest of their model was balanced.

A program may make the spec of a part by itself, as that of multi-token prediction. Such a part
trains as it should, but its load stays as uneven as it was. A model is looked at while it is built:
when a part is put into it.
"""

from __future__ import annotations

import warnings

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from megatron_ext.mcore.stages import ObservedMoELayer


class LayersLeftOutWarning(UserWarning):
    """Some MoE layers of a model are balanced and others are not."""


def warn_of_layers_left_out(model: nn.Module, name: str, part: nn.Module | None) -> None:
    """Warn if the part that is put into a model makes it one of both kinds of layers.

    torch calls it for every module that is put into another one (`process_hooks.py`).
    """
    if not isinstance(model, LanguageModule) or part is None or not _layers(part):
        return
    balanced, left_out = [], {}
    for part_name, each in {**dict(model.named_children()), name: part}.items():
        layers = _layers(each)
        balanced += [layer for layer in layers if isinstance(layer, ObservedMoELayer)]
        if number := sum(not isinstance(layer, ObservedMoELayer) for layer in layers):
            left_out[part_name] = number
    if left_out and balanced and balanced[0].ep_group.rank() == 0:
        warnings.warn(
            f"{type(model).__name__} is balanced but for {sum(left_out.values())} MoE layer(s) of "
            f"{', '.join(left_out)}: make the spec of that part from the balanced block spec, or "
            "give it to megatron_ext.balance_spec too",
            LayersLeftOutWarning,
            stacklevel=2,
        )


def _layers(part: nn.Module) -> list[MoELayer]:
    return [module for module in part.modules() if isinstance(module, MoELayer)]
