"""Hugging Face models to checkpoints and back, tensor by tensor: no model is whole in memory."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoints_tools.folder import (
    COMMON_FILE,
    TABLE_FILE,
    Hasher,
    check_whole,
    making,
    newest_of,
    seal,
)
from checkpoints_tools.tensors import Tensors
from megatron_ext.files.arrays import check_folders
from megatron_ext.files.whole import sync
from megatron_ext.trainer.hugging_face.files import HubTensors, HubWriter
from megatron_ext.trainer.hugging_face.model import HubModel, described, names_in, sizes_of
from megatron_ext.trainer.hugging_face.settings import recipe_text

OnBytes = Callable[[int], object]
"""Called with the number of bytes that were written since the last call."""

CHECKPOINT = Path("checkpoints", "step_00000000")
RECIPE = "recipe.yaml"
"""What an import makes, in the folder it makes."""

_DATA_FILE = "__0_0.distcp"
_FREQUENCIES = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")
_COPIES = {
    re.compile(r"layers\.\d+\.embed_tokens\.weight$"): "model.embed_tokens.weight",
    re.compile(r"layers\.\d+\.shared_head\.head\.weight$"): "lm_head.weight",
}
"""What a layer that predicts a further token has again, and of what it is a copy."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """A conversion that is checked, and not written yet.

    Attributes:
        out: The folder that `write` makes.
        settings: The sections `model` and `megatron` of a run that trains the model.
        num_tensors: Tensors of Hugging Face's that are converted.
        left_out: Names of the tensors in the folder that the model does not have.
        num_bytes: Of the tensors that `write` writes.
    """

    out: Path
    settings: dict[str, Any]
    num_tensors: int
    left_out: list[str]
    num_bytes: int
    _fill: Callable[[Path, OnBytes], None]

    def write(self, on_bytes: OnBytes) -> None:
        """Write the folder; if that raises OSError or ValueError, nothing is left."""
        with making(self.out, self.num_bytes) as partial:
            self._fill(partial, on_bytes)


@contextmanager
def importing(source: Path, out: Path) -> Iterator[Conversion]:
    """Check that the checkpoint of a Hugging Face model can be written, and the recipe for it.

    This process is the one rank of a process group meanwhile.

    Args:
        source: A folder with `config.json` and `*.safetensors`.
        out: Folder to make, with `recipe.yaml` and a checkpoint, which has no optimizer.

    Raises:
        FileNotFoundError, FileExistsError: A folder or file is not there, or `out` is.
        ModuleNotFoundError: Bridge is not installed.
        ValueError: The trainer cannot make the model, or a tensor is missing or damaged.
    """
    _check_new(out)
    with HubTensors(source) as tensors, described(source, tensors.precision, len(tensors)) as model:
        tasks = model.tasks(tensors.sizes)
        model.check_scales(tensors.scaled)

        def write(folder: Path, on_bytes: OnBytes) -> None:
            checkpoint = folder / CHECKPOINT
            checkpoint.mkdir(parents=True)
            with _CheckpointFile(checkpoint) as file:
                for task in tasks:
                    on_bytes(file.add(model.pieces(task.param_name, model.imported(task, tensors))))
                file.add_objects(model.objects)
                file.finish(model.settings["megatron"].get("moe_router_num_groups"))
            text = recipe_text(
                model.settings,
                checkpoint=str((out / CHECKPOINT).absolute()),
                run_dir=str(out / "run"),
                source=source.name,
            )
            (folder / RECIPE).write_text(text)

        yield _conversion(out, write, model, tasks, _left_out(source, tensors, tasks))


@contextmanager
def exporting(path: Path, like: Path, out: Path) -> Iterator[Conversion]:
    """Check, as `importing`, that a checkpoint's model can be written as a Hugging Face folder.

    Args:
        path: The checkpoint, or where it is (`newest_of`).
        like: A Hugging Face folder of the same model, as the one that was imported: its
            configuration and tokenizer are copied, and its tensors' names are taken.
        out: Folder to make.

    Raises:
        ValueError: The checkpoint is of another model, or damaged. Others are those of `importing`.
    """
    _check_new(out)
    saved = Tensors(newest_of(path))
    with HubTensors(like) as tensors, described(like, _precision(saved), len(tensors)) as model:
        tasks = model.tasks(tensors.sizes)
        model.check_saved(saved)

        def write(folder: Path, on_bytes: OnBytes) -> None:
            check_whole(saved.folder)
            writer = HubWriter(folder, like)
            filled = (
                dataclasses.replace(task, param_weight=model.saved(task.param_name, saved))
                for task in tasks
            )
            for name, tensor in model.exported(filled):
                on_bytes(writer.add(name, tensor))
            writer.finish()

        yield _conversion(out, write, model, tasks, _left_out(like, tensors, tasks))


def _conversion(
    out: Path,
    fill: Callable[[Path, OnBytes], None],
    model: HubModel,
    tasks: list[Any],
    left_out: list[str],
) -> Conversion:
    return Conversion(
        out=out,
        settings=model.settings,
        num_tensors=len({name for task in tasks for name in names_in(task)}),
        left_out=left_out,
        num_bytes=sum(model.num_bytes(task.param_name) for task in tasks),
        _fill=fill,
    )


def _left_out(source: Path, tensors: HubTensors, tasks: list[Any]) -> list[str]:
    """Return the tensors that are not converted, sorted.

    Raises:
        ValueError: One is neither a copy nor computed: the model would lose it.
    """
    names = tensors.names - {name for task in tasks for name in names_in(task)}

    def is_dispensable(name: str) -> bool:
        if _FREQUENCIES.search(name):
            return True
        of = next((of for copy, of in _COPIES.items() if copy.search(name)), None)
        if of not in tensors:
            return False
        copy, own = tensors[name], tensors[str(of)]
        return copy.dtype == own.dtype and torch.equal(copy, own)

    if lost := [name for name in sorted(names) if not is_dispensable(name)]:
        raise ValueError(
            f"{source} has {len(lost)} tensors that the model of its config.json has not, such as "
            f"{lost[0]}"
        )
    return sorted(names)


def _check_new(out: Path) -> None:
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    check_folders(out)


def _precision(saved: Tensors) -> str:
    """Return `model.precision` of a run that saved a checkpoint."""
    key = "embedding.word_embeddings.weight"
    if key not in saved.keys:
        raise ValueError(f"{saved.folder} holds no model of Megatron's: it has no {key}")
    return "fp32" if saved.dtype(key) == "float32" else "bf16"


class _CheckpointFile:
    """A checkpoint's one file of tensors, written piece by piece, and what stands beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hasher = Hasher()
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._objects: dict[str, BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def __enter__(self) -> _CheckpointFile:
        self._file = (self._folder / _DATA_FILE).open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, pieces: Iterable[ShardedTensor]) -> int:
        """Write pieces of tensors, and return the bytes of their values."""
        num_bytes = 0
        for piece in pieces:
            offset, sizes = torch.Size(piece.global_offset), torch.Size(sizes_of(piece))
            whole = self._tensors.setdefault(
                piece.key,
                TensorStorageMetadata(
                    TensorProperties(dtype=piece.data.dtype), torch.Size(piece.global_shape), []
                ),
            )
            whole.chunks.append(ChunkStorageMetadata(offset, sizes))
            # A view would be saved with all that it is a view of.
            values = piece.data.reshape(sizes).clone()
            self._places[MetadataIndex(piece.key, offset)] = self._saved(values)
            num_bytes += piece.data.nbytes
        return num_bytes

    def add_objects(self, objects: Iterable[ShardedObject]) -> None:
        """Write what is no tensor: as Megatron does, in a list of its own."""
        for each in objects:
            self._objects[each.unique_key] = BytesStorageMetadata()
            self._places[MetadataIndex(each.unique_key)] = self._saved([each.data])

    def _saved(self, value: Any) -> _StorageInfo:
        begin = self._file.tell()
        torch.save(value, cast("IO[bytes]", self))
        return _StorageInfo(_DATA_FILE, begin, self._file.tell() - begin)

    def write(self, data: memoryview | bytes) -> int:
        """Take what `torch.save` writes."""
        self._hasher.add(data)
        return self._file.write(data)

    def flush(self) -> None:
        """See `write`."""

    def finish(self, router_groups: int | None) -> None:
        """Write everything else of a checkpoint of step 0, and have it all on the disk."""
        self._file.close()
        table = Metadata({**self._tensors, **self._objects}, storage_data=self._places)
        (self._folder / TABLE_FILE).write_bytes(pickle.dumps(table))
        common = {"iteration": 0, "router_groups": router_groups}
        torch.save(common, self._folder / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
        sync(self._folder / _DATA_FILE)
        seal(self._folder, {_DATA_FILE: self._hasher.checksum()})
