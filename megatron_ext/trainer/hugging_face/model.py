"""A Hugging Face model as the trainer builds it: on the meta device, for one rank.

It says under which key, and in which pieces, each parameter is saved. Bridge says which tensors of
Hugging Face a parameter is made of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from checkpoints_tools.contents import is_of_optimizer
from checkpoints_tools.tensors import Tensors
from megatron_ext.arguments import one_line
from megatron_ext.trainer.checkpoints.state import METADATA, model_state
from megatron_ext.trainer.hugging_face.bridge import open_bridge
from megatron_ext.trainer.hugging_face.settings import model_settings, run_config
from megatron_ext.trainer.model.build import build_model, start_parallelism
from megatron_ext.trainer.model.meta_model import OnMeta


class HubModel:
    """A Hugging Face model as the trainer builds it on one rank, without values.

    Attributes:
        settings: The sections `model` and `megatron` of a run that trains it.
        objects: What Megatron saves beside tensors: states of quantization, which are None.
    """

    def __init__(self, source: Path, bridge: Any, settings: dict[str, Any], chunk: Any) -> None:
        self.settings = settings
        self._source = source
        self._bridge = bridge
        self._model = unwrap_model(chunk)
        state = model_state([chunk], dict(METADATA))["model"]
        self.objects = [entry for entry in state.values() if isinstance(entry, ShardedObject)]
        self._entries = {
            name: entry for name, entry in state.items() if not isinstance(entry, ShardedObject)
        }

    def tasks(self, sizes: Mapping[str, int]) -> list[Any]:
        """Return Bridge's work: one piece for each parameter, with the tensors it is made of.

        Raises:
            ValueError: The folder lacks a tensor of the model, or has one of another size. `sizes`
                has those that are there, by name, with how many numbers they are.
        """
        tasks = [
            task
            for task in self._bridge._model_bridge.build_conversion_tasks(
                self._bridge.hf_pretrained, [self._model]
            )
            if task is not None
        ]
        for task in tasks:
            lacking = sorted({*names_in(task)} - sizes.keys())
            if lacking or task.megatron_module is None:
                lacked = [*lacking, *names_in(task)][0]
                raise ValueError(f"{self._source} lacks the tensor {lacked}")
            given = sum(sizes[name] for name in names_in(task))
            if given != (wanted := math.prod(self._wanted(task))):
                raise ValueError(
                    f"{self._source}: {', '.join(names_in(task))} have {given:,} numbers, by "
                    f"config.json {task.param_name} has {wanted:,}"
                )
        if unknown := sorted(self._entries.keys() - {task.param_name for task in tasks}):
            raise ValueError(f"Megatron-Bridge does not know {unknown[0]} of {self._source}")
        return tasks

    def check_scales(self, scaled: list[str]) -> None:
        """Check that Bridge applies the scales of tensors in FP8: it does in some families only.

        Raises:
            ValueError: It would take what is in the tensors for their values.
        """
        from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

        kind = type(self._bridge._model_bridge)
        name = "maybe_modify_loaded_hf_weight"
        if scaled and getattr(kind, name) is getattr(MegatronModelBridge, name):
            raise ValueError(
                f"{self._source}: {scaled[0]} is in FP8, and Megatron-Bridge does not apply the "
                "scales of this family: take the model's folder in BF16"
            )

    def imported(self, task: Any, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the values of a parameter."""
        given = self._bridge._model_bridge.maybe_modify_loaded_hf_weight(
            task.mapping.hf_param, tensors
        )
        try:
            value: Tensor = task.mapping.hf_to_megatron(given, task.megatron_module)
        # A tensor of another size fails in Bridge, or in PyTorch, in many ways.
        except Exception as error:
            said = one_line(error)[:200]
            raise ValueError(
                f"{self._source}: {', '.join(names_in(task))} do not fit {task.param_name}: {said}"
            ) from None
        wanted = self._wanted(task)
        if list(value.shape) != wanted:
            raise ValueError(
                f"{self._source}: {', '.join(names_in(task))} give {list(value.shape)}, by "
                f"config.json {task.param_name} is {wanted}"
            )
        # Rows that pad a vocabulary stand for no word.
        padding = value.new_zeros(task.param_weight.shape[0] - wanted[0], *wanted[1:])
        value = torch.cat([value, padding]) if len(padding) else value
        return value.to(task.param_weight.dtype)

    def _wanted(self, task: Any) -> list[int]:
        """The shape of a parameter, without rows that pad a vocabulary."""
        shape = list(task.param_weight.shape)
        if getattr(self._entries[task.param_name], "allow_shape_mismatch", False):
            shape[0] = self.settings["model"]["vocab_size"]
        return shape

    def exported(self, tasks: Iterator[Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of Hugging Face that filled tasks give, with their names."""
        yield from self._bridge._model_bridge.stream_weights_megatron_to_hf(
            [self._model],
            self._bridge.hf_pretrained,
            show_progress=False,
            conversion_tasks=tasks,
            merge_adapter_weights=False,
        )

    def pieces(self, name: str, value: Tensor | None = None) -> list[ShardedTensor]:
        """Return the pieces that a parameter is saved in."""
        entry = self._entries[name]
        if value is not None:
            entry = dataclasses.replace(entry, data=value)
        is_split = isinstance(entry, ShardedTensorFactory)
        return list(nested_values([entry.build()])) if is_split else [entry]

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a parameter."""
        return int(self._entries[name].data.nbytes)

    def saved(self, name: str, checkpoint: Tensors) -> Tensor:
        """Read the values of a parameter; of a vocabulary, without the rows that pad it."""
        entry = self._entries[name]
        parts = []
        for piece in self.pieces(name):
            sizes = list(sizes_of(piece))
            if piece.allow_shape_mismatch:
                sizes[0] = self.settings["model"]["vocab_size"]
            part = checkpoint.read(piece.key, piece.global_offset, sizes)
            parts.append(part.reshape(*sizes[piece.prepend_axis_num :]))
        value: Tensor = (
            entry.merge_fn(parts) if isinstance(entry, ShardedTensorFactory) else parts[0]
        )
        return value

    def check_saved(self, checkpoint: Tensors) -> None:
        """Raise a ValueError unless a checkpoint has the tensors of the model, in their shapes."""
        vocab_size = self.settings["model"]["vocab_size"]
        is_other = f"{checkpoint.folder} is not of the model of {self._source}"
        pieces = [piece for name in self._entries for piece in self.pieces(name)]
        more = checkpoint.keys - {piece.key for piece in pieces}
        if more := {key for key in more if not is_of_optimizer(key)}:
            raise ValueError(f"{is_other}: it has {min(more)}")
        for piece in pieces:
            if piece.key not in checkpoint.keys:
                raise ValueError(f"{is_other}: it has no {piece.key}")
            shape, wanted = checkpoint.shape(piece.key), list(piece.global_shape)
            is_padded = piece.allow_shape_mismatch and shape[0] >= vocab_size
            if shape[is_padded:] != wanted[is_padded:]:
                raise ValueError(f"{is_other}: {piece.key} is {shape}, not {wanted}")


@contextmanager
def described(source: Path, precision: str, num_tensors: int) -> Iterator[HubModel]:
    """Make the model of a folder; this process is the one rank of a group meanwhile.

    Raises:
        ValueError: Bridge does not know the model, or the trainer cannot make it.
    """
    bridge = open_bridge(source)
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
    # On values that make no sense Bridge fails in ways of its own.
    except Exception as error:
        raise ValueError(f"{source}: config.json describes no model ({one_line(error)})") from None
    try:
        settings = model_settings(bridge.hf_pretrained.config, provider, precision)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {one_line(error)}") from None
    sizes = settings["model"]
    for name in ("num_layers", "num_experts"):  # Before a model of that many is built.
        if not 1 <= sizes[name] <= num_tensors:
            raise ValueError(
                f"{source}: by config.json {name} is {sizes[name]}, and there are {num_tensors} "
                "tensors"
            )
    config = run_config(settings)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        start_parallelism(config)
        with OnMeta():
            (chunk,) = build_model(config, config.model.vocab_size)
        _stand_in(chunk)
        of_model = unwrap_model(chunk).config
        # Bridge reads them of a provider; Megatron's own configuration lacks them.
        of_model.share_embeddings_and_output_weights = False
        of_model.vocab_size = config.model.vocab_size
        yield HubModel(source, bridge, settings, chunk)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _stand_in(chunk: nn.Module) -> None:
    """Give parameters and buffers of the meta device one number of memory each, on the CPU.

    Bridge puts tensors where the parameter is that they are for.
    """
    for module in chunk.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                value = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
                module._buffers[name] = value


def sizes_of(piece: ShardedTensor) -> tuple[int, ...]:
    """The shape of a piece with the axes of layers and experts in front."""
    return (1,) * piece.prepend_axis_num + tuple(piece.local_shape)


def names_in(task: Any) -> list[str]:
    """Return the names of the Hugging Face tensors that a parameter is made of."""
    hf_param = task.mapping.hf_param
    return [hf_param] if isinstance(hf_param, str) else list(hf_param.values())
