"""Megatron-Bridge, which knows where each tensor of a Hugging Face model belongs in Megatron's.

Imported here with what Bridge lacks: a machine without Transformer Engine, the names of
`SequentialMLP`'s experts in all families, and the families at the end.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import platform
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ext.files.json_files import read_json

INSTALL = "pip install 'megatron-ext[hf]', then pip install --no-deps megatron-bridge==0.6.2"

_OF_MEGATRON = (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.post_training.modelopt.gpt.model_specs",
)
"""What Bridge imports of Megatron that looks for Transformer Engine."""


def check_source(folder: Path) -> None:
    """Check that a folder looks like a Hugging Face model, before anything is imported for it.

    Raises:
        FileNotFoundError: It does not.
        ValueError: Its `config.json` is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no Hugging Face model: it has no config.json")
    read_json(path, follow=True)


@cache
def import_bridge() -> Any:
    """Return Bridge's class `AutoBridge`, ready for the families that this project converts.

    Raises:
        ModuleNotFoundError: Bridge, or what it needs, is not installed; it needs Python 3.12.
    """
    if (here := ".".join(platform.python_version_tuple()[:2])) != "3.12":
        raise ModuleNotFoundError(
            f"Hugging Face models need Megatron-Bridge, which needs Python 3.12; this is {here}. "
            "What was imported there can be trained here"
        )
    for package in ("transformers", "megatron-bridge"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError(f"Hugging Face models need {package}: {INSTALL}") from None
    # Megatron looks for Transformer Engine when it is imported, and must not find a stand-in.
    for module in _OF_MEGATRON:
        importlib.import_module(module)
    logging.disable(logging.WARNING)
    try:
        with _transformer_engine():
            from megatron.bridge import AutoBridge
    finally:
        logging.disable(logging.NOTSET)
    for name in ("megatron.bridge", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _name_sequential_experts()
    _add_kimi()
    _add_mixtral()
    return AutoBridge


def open_bridge(folder: Path) -> Any:
    """Return the bridge of the model in a Hugging Face folder; no weight is read.

    Raises:
        ValueError: The configuration is damaged, or Bridge does not know the model's family.
    """
    check_source(folder)
    bridge = import_bridge()
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(folder), trust_remote_code=False)  # Bridge tries it 4 times.
        return bridge.from_hf_pretrained(str(folder), trust_remote_code=False)
    # What Bridge and transformers raise here is of many kinds, and of many lines.
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip("= ")]
        said = lines[0] if lines else type(error).__name__
        raise ValueError(f"{folder / 'config.json'}: {said}") from None


@contextmanager
def _transformer_engine() -> Iterator[None]:
    """Let Bridge import Transformer Engine where it is not installed; only names are asked for."""
    names = "transformer_engine", "transformer_engine.pytorch"
    if importlib.util.find_spec(names[0]):
        yield
        return
    for name in names:
        module = _Names(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _made(owner: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(owner, name, _Named(name, (), {}))
    return vars(owner)[name]


class _Names(types.ModuleType):
    """A module in which every name is a class."""

    __path__: list[str] = []  # noqa: RUF012
    __getattr__ = _made


class _Named(type):
    """A class in which every name is a class."""

    __getattr__ = _made


def _name_sequential_experts() -> None:
    """Let every bridge know experts of `SequentialMLP` where it knows those of `TEGroupedMLP`.

    Both are saved under the same keys.
    """
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry

    make = MegatronMappingRegistry.__init__

    def make_with_both(self: Any, *mappings: Any) -> None:
        names = {mapping.megatron_param for mapping in mappings}
        others = []
        for mapping in mappings:
            name = mapping.megatron_param
            for part in ("linear_fc1", "linear_fc2"):
                end = f".experts.{part}.weight*"
                other = name.removesuffix(end) + f".experts.local_experts.*.{part}.weight"
                if name.endswith(end) and other not in names:
                    others.append(copy.copy(mapping))
                    others[-1].megatron_param = other
        make(self, *mappings, *others)

    MegatronMappingRegistry.__init__ = make_with_both


def _add_kimi() -> None:
    """Register Kimi K2's configuration, which is DeepSeek-V3's."""
    import transformers

    class KimiConfig(transformers.DeepseekV3Config):
        """That of a Kimi K2 folder is code of that folder, which nothing here runs."""

        model_type = "kimi_k2"

    transformers.AutoConfig.register("kimi_k2", KimiConfig)


def _add_mixtral() -> None:
    """Register Mixtral, which Bridge lacks."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.bridge.models.conversion.param_mapping import (
        AutoMapping,
        GatedMLPMapping,
        QKVMapping,
    )
    from megatron.core.models.gpt import GPTModel

    @MegatronModelBridge.register_bridge(
        source="MixtralForCausalLM", target=GPTModel, model_type="mixtral"
    )
    class MixtralBridge(MegatronModelBridge):
        """Softmax over the chosen experts' scores, and no normalized queries and keys."""

        def provider_bridge(self, hf_pretrained: Any) -> Any:
            provider, config = super().provider_bridge(hf_pretrained), hf_pretrained.config
            provider.normalization = "RMSNorm"
            provider.gated_linear_unit = True
            provider.add_bias_linear = provider.add_qkv_bias = False
            provider.hidden_dropout = 0.0
            provider.kv_channels = config.head_dim or (
                config.hidden_size // config.num_attention_heads
            )
            provider.moe_ffn_hidden_size = config.intermediate_size
            provider.moe_router_load_balancing_type = "aux_loss"
            provider.moe_aux_loss_coeff = config.router_aux_loss_coef
            return provider

        def mapping_registry(self) -> Any:
            here, there = "decoder.layers.*", "model.layers.*"
            experts = f"{there}.block_sparse_moe.experts.*"
            same = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "decoder.final_layernorm.weight": "model.norm.weight",
                "output_layer.weight": "lm_head.weight",
                f"{here}.self_attention.linear_qkv.layer_norm_weight": (
                    f"{there}.input_layernorm.weight"
                ),
                f"{here}.self_attention.linear_proj.weight": f"{there}.self_attn.o_proj.weight",
                f"{here}.pre_mlp_layernorm.weight": f"{there}.post_attention_layernorm.weight",
                f"{here}.mlp.router.weight": f"{there}.block_sparse_moe.gate.weight",
                f"{here}.mlp.experts.linear_fc2.weight*": f"{experts}.w2.weight",
            }
            return MegatronMappingRegistry(
                *(AutoMapping(megatron, hugging_face) for megatron, hugging_face in same.items()),
                QKVMapping(
                    f"{here}.self_attention.linear_qkv.weight",
                    **{name: f"{there}.self_attn.{name}_proj.weight" for name in "qkv"},
                ),
                GatedMLPMapping(
                    f"{here}.mlp.experts.linear_fc1.weight*",
                    gate=f"{experts}.w1.weight",
                    up=f"{experts}.w3.weight",
                ),
            )
