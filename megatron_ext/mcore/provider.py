"""Specs for programs that hold a function which makes them: Megatron-Bridge, NeMo."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.moe_layer import JoiningTransformerLayer
from megatron_ext.mcore.spec import balance_spec


@dataclass(frozen=True)
class ProviderSpec:
    """Makes balanced specs; see `balanced_provider_spec`. Pickles, and compares by its fields."""

    spec_function: Callable[..., Any]
    balance: BalanceConfig

    def __call__(self, config: Any, vp_stage: int | None = None) -> Any:
        """Return the spec of a pipeline chunk, with its MoE layers balanced.

        Args:
            config: The provider, or a TransformerConfig.
            vp_stage: Which of the rank's chunks; None if it has one.
        """
        takes_stage = "vp_stage" in inspect.signature(self.spec_function).parameters
        stage = {"vp_stage": vp_stage} if takes_stage else {}
        spec = balance_spec(self.spec_function(config, **stage), self.balance)
        # Of a layer of another class Megatron makes no spec for multi-token prediction. Backward
        # then waits for the reduction inside the MoE layer.
        is_joining = isinstance(spec, ModuleSpec) and spec.module is JoiningTransformerLayer
        if is_joining and config.mtp_num_layers:
            spec = dataclasses.replace(spec, module=TransformerLayer)
        return spec


def balanced_provider_spec(spec_function: Callable[..., Any], balance: BalanceConfig) -> Any:
    """Return what makes the specs that `spec_function` makes, with their MoE layers balanced.

        provider.transformer_layer_spec = balanced_provider_spec(
            provider.transformer_layer_spec, BalanceConfig(slots=2)
        )

    The provider makes the specs of multi-token prediction of it as well.

    Args:
        spec_function: Takes a config, and may take `vp_stage`; returns a layer or block spec. It
            must pickle where the provider is pickled.
        balance: What the balancer may do.

    Returns:
        A callable of `config` and `vp_stage`, which pickles.

    Raises:
        TypeError: `spec_function` is a spec already: give it to `balance_spec`.
    """
    if isinstance(spec_function, ModuleSpec) or not callable(spec_function):
        raise TypeError(
            f"spec_function ({type(spec_function).__name__}) must be a function of a config; a "
            "spec goes to balance_spec"
        )
    return ProviderSpec(spec_function, balance)
