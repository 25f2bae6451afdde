"""Balances the specs of Megatron-Bridge and NeMo, which hold a function that makes specs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.spec import balance_spec
from megatron_ext.mcore.transformer_layers import JoiningTransformerLayer, PassingTransformerLayer


# With slots: Bridge sets the attributes of all that has a `__dict__` in a provider.
@dataclass(frozen=True, slots=True)
class ProviderSpec:
    """Makes balanced specs; see `balanced_provider_spec`. Pickles, and compares by its fields."""

    spec_function: Callable[..., Any] | None
    balance: BalanceConfig

    def __call__(self, config: Any, vp_stage: int | None = None) -> Any:
        """Return the spec of a pipeline chunk, with its MoE layers balanced.

        The config is the provider or a TransformerConfig; `vp_stage` is which of the rank's chunks,
        None if it has one.
        """
        spec_function = self.spec_function or _default_of(config)
        takes = inspect.signature(spec_function).parameters
        stage = {"vp_stage": vp_stage} if "vp_stage" in takes else {}
        first = [config] if len(takes) > len(stage) else []
        spec = balance_spec(spec_function(*first, **stage), self.balance)
        # Megatron makes the spec of multi-token prediction from a `TransformerLayer` only. With
        # that class, backward waits for the reduction inside the MoE layer.
        is_ours = getattr(spec, "module", None) in (
            JoiningTransformerLayer,
            PassingTransformerLayer,
        )
        if is_ours and config.mtp_num_layers:
            spec = dataclasses.replace(spec, module=TransformerLayer)
        return spec

    def to_cfg_dict(self) -> Callable[..., Any] | None:
        """Return what a saved configuration has: the function that was given.

        So Bridge and Megatron load the configuration, and the checkpoint beside it, without this
        package.
        """
        return self.spec_function


def _default_of(config: Any) -> Callable[..., Any]:
    """Return the function that Bridge, or Megatron's builder, takes where there is none."""
    if hasattr(config, "hybrid_stack_spec"):
        from megatron.bridge.models.hybrid.hybrid_provider import get_default_hybrid_stack_spec

        return get_default_hybrid_stack_spec
    from megatron.training.models.gpt import default_layer_spec

    return default_layer_spec


def balanced_provider_spec(spec_function: Callable[..., Any] | None, balance: BalanceConfig) -> Any:
    """Return a function that makes the specs of `spec_function` with balanced MoE layers.

        provider.transformer_layer_spec = balanced_provider_spec(
            provider.transformer_layer_spec, BalanceConfig(slots=2)
        )

    Also for a `hybrid_stack_spec` of Bridge's providers, and for the `transformer_layer_spec` of a
    `GPTModelConfig`. A saved configuration has `spec_function` in its place.

    The provider makes the spec of multi-token prediction from the balanced spec. With multi-token
    prediction a layer spec gets Megatron's plain `TransformerLayer`, so backward waits for the
    reduction where the reduction starts.

    Args:
        spec_function: May take a config, and `vp_stage`; returns a spec of a layer, a block or a
            stack. The result pickles if this function does. None for the function that the provider
            takes where it has none.
        balance: The settings of balancing.

    Raises:
        TypeError: `spec_function` is a spec already: give it to `balance_spec`.
    """
    if isinstance(spec_function, ModuleSpec) or not (
        spec_function is None or callable(spec_function)
    ):
        raise TypeError(
            f"spec_function ({type(spec_function).__name__}) must be a function of a config; a "
            "spec goes to balance_spec"
        )
    return ProviderSpec(spec_function, balance)
