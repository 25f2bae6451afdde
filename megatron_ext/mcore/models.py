"""Balances all models that a program builds, in the constructors of Megatron's model classes.

A program may make its specs from its command line, a pipeline chunk or a file of the user's: all
specs end in the constructor of one of these classes, those of the decoder, of multi-token
prediction and of hybrid stacks.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.config import BalanceConfig
from megatron_ext.mcore import process_hooks
from megatron_ext.mcore.check import check
from megatron_ext.mcore.spec import balance_spec, has_moe_layers

MODELS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel"),
    ("megatron.core.models.mamba.mamba_model", "MambaModel"),
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),  # since 0.18
)
"""Megatron's model classes with MoE layers: module and name."""


def balance_models(balance: BalanceConfig, attend: Callable[[Any], None]) -> None:
    """Let all models that this process builds from now on have balanced MoE layers.

    Building a model with experts raises what `check` raises if something excludes balancing, and
    then calls `attend` with each MoE layer. Dense models stay as they are.
    """

    def build_balanced(build: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(build).bind(*args, **kwargs)
        config = given.arguments["config"]
        if config.num_moe_experts:
            check(config, balance)
        for name, value in given.arguments.items():
            if has_moe_layers(value):
                given.arguments[name] = balance_spec(value, balance)
        build(*given.args, **given.kwargs)
        model = args[0]
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                attend(layer)

    # `balance_spec` does the same, but a pipeline stage without MoE layers never calls it.
    process_hooks.install()
    classes = {
        getattr(importlib.import_module(home), name)
        for home, name in MODELS
        if importlib.util.find_spec(home.rpartition(".")[0]) is not None
    }
    for model_class in classes:
        # A subclass calls the constructor of its base: in 0.19, MambaModel is a HybridModel.
        if classes.isdisjoint(model_class.__mro__[1:]):
            process_hooks.replace(model_class, "__init__", build_balanced)
