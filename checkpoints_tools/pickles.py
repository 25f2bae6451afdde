"""Pickles read without running what is in them.

A pickle may name any function and have it called. Here it may name only the classes that a
checkpoint needs; another one is refused by its name before anything is made of it. What is stored
beside tensors may name, too, what Megatron itself writes and loads: the arguments of a run, numpy's
random generator, and other plain values.
"""

from __future__ import annotations

import mmap
import os
import pickle
import pickletools
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from megatron_ext.arguments import one_line
from megatron_ext.files.opening import open_regular

_CLASSES = {
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    },
}
"""What a table of contents is made of, by module; the names of dtypes are allowed besides."""


_MOST_LETTERS, _MOST_AXES, _MOST_SIZE = 4096, 16, 2**48
"""Of a name, of a tensor, and of an axis or a file: more than in any checkpoint."""


class ForeignClassError(ValueError):
    """A pickle names a class or function that a checkpoint does not need."""


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if name not in _CLASSES.get(module, ()):
            raise ForeignClassError(f"names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


@cache
def _plain_opcodes() -> re.Pattern[bytes]:
    """Return what matches many opcodes of a fixed length in a row: most of a pickle is of them."""
    codes: dict[int, bytes] = {}
    for opcode in pickletools.opcodes:
        length = opcode.arg.n if opcode.arg else 0
        if length >= 0 and opcode.name not in ("STOP", "FRAME", "LONG_BINPUT"):
            codes[length] = codes.get(length, b"") + re.escape(opcode.code.encode("latin1"))
    of_lengths = (b"[%b].{%d}" % (some, length) for length, some in sorted(codes.items()))
    return re.compile(b"(?:%b){1,1000}+" % b"|".join(of_lengths), re.DOTALL)


def _check_memo(pickled: mmap.mmap) -> None:
    """Check that a pickle names no place of its memo beyond its own length.

    The unpickler makes all places before, so that few bytes would take all memory.

    Raises:
        ValueError: It does, or it is damaged. An opcode that begins in a frame ends there, else the
            unpickler would take other bytes for the rest.
    """
    opcodes: dict[bytes, Any] = {each.code.encode("latin1"): each for each in pickletools.opcodes}
    plain, end, end_of_frame = _plain_opcodes(), len(pickled), 0
    while (at := pickled.tell()) < end:
        in_frame = at < end_of_frame
        limit = end_of_frame if in_frame else end
        if run := plain.match(pickled, at, limit):
            pickled.seek(run.end())
            continue
        opcode = opcodes.get(pickled.read(1))
        if opcode is None or opcode.name == "STOP":  # The unpickler reads nothing behind it.
            return
        try:
            argument: Any = opcode.arg.reader(pickled) if opcode.arg else None
            is_within = pickled.tell() <= limit and not (in_frame and opcode.name == "FRAME")
        except ValueError:
            if not in_frame:
                raise
            is_within = False
        if not is_within:
            raise ValueError("an opcode does not end in its frame")
        if opcode.name == "FRAME":
            end_of_frame = pickled.tell() + argument
        elif opcode.name in ("PUT", "LONG_BINPUT") and not 0 <= argument <= end:
            raise ValueError(f"it names place {argument} of its memo")


def read_table(file: Path) -> Any:
    """Read a checkpoint's table of contents, torch's `Metadata`, from its `.metadata`.

    Raises:
        ForeignClassError: It names a class that a table does not need.
        ValueError: It is cut off or damaged.
    """
    with open_regular(file, follow=True) as stream:
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as pickled:
                _check_memo(pickled)
            table = _TableUnpickler(stream).load()
            _check_places(table)
        except ForeignClassError as error:
            raise ForeignClassError(f"{file.name} {error}") from None
        # A damaged pickle can call its classes with anything, so anything can be raised.
        except Exception as error:
            raise ValueError(f"{file.name} is cut off or damaged ({one_line(error)})") from error
    for stored in table.storage_data.values():
        name = stored.relative_path
        # Else a stranger's table could have any file of this machine read.
        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{file.name} names a file outside of its folder: {name!r}")
    return table


def _check_places(table: Any) -> None:
    """Check types and sizes of what every reader of a table uses; anything can be raised.

    What is no text is not quoted: written out, a list of lists of the same can be endless.
    """
    from torch import dtype
    from torch.distributed.checkpoint.metadata import Metadata

    if not isinstance(table, Metadata):
        raise ValueError("it is no table of contents")
    for index, stored in table.storage_data.items():
        places = (stored.offset, stored.length)
        if not (
            _is_name(index.fqn)
            and _is_name(getattr(stored, "relative_path", 0))
            and _are_sizes(places)
        ):
            raise ValueError("a part has no name, no file or no place there")
    entries: dict[Any, Any] = table.state_dict_metadata
    for key, entry in entries.items():
        if not _is_name(key):
            raise ValueError("a part has no name")
        if not hasattr(entry, "chunks"):
            continue
        sizes = [entry.size, *(each for c in entry.chunks for each in (c.offsets, c.sizes))]
        if not isinstance(entry.properties.dtype, dtype) or not all(map(_are_sizes, sizes)):
            raise ValueError(f"it has no dtype or no sizes of {key}")
        for chunk in entry.chunks:
            axes = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
            if any(offset + size > whole for offset, size, whole in axes):
                raise ValueError(f"a part of {key} is not within it")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_LETTERS


def _are_sizes(value: Any) -> bool:
    """Whether these are sizes, or places, of a tensor or a file that a machine can hold."""
    return (
        isinstance(value, tuple | list)
        and len(value) <= _MOST_AXES
        and all(isinstance(one, int) and 0 <= one < _MOST_SIZE for one in value)
    )


def read_object(stream: BinaryIO) -> Any:
    """Read what `torch.save` wrote, if it is made of tensors and what Megatron writes.

    Raises:
        ForeignClassError: It names other classes.
        ValueError: It is cut off or damaged.
    """
    import torch

    _check_sizes(stream)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        stream.seek(0)
    except Exception as error:
        raise ValueError(f"is cut off or damaged ({one_line(error)})") from error
    with torch.serialization.safe_globals(_of_megatron()):
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise ForeignClassError(_foreign_classes(stream)) from None
        except Exception as error:
            raise ValueError(f"is cut off or damaged ({one_line(error)})") from error


def _check_sizes(stream: BinaryIO) -> None:
    """Check that what is stored is no larger than the file: `torch.save` compresses nothing.

    Compressed, or told of several times, a few bytes would be more than any memory holds.

    Raises:
        ValueError: It is larger.
    """
    end = stream.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            num_bytes = sum(member.file_size for member in archive.infolist())
    except Exception:  # No archive, as of older Torch, or a damaged one, which Torch refuses.
        num_bytes = 0
    stream.seek(0)
    if num_bytes > end:
        raise ValueError(f"is damaged (it has {end} bytes, and {num_bytes} when it is unpacked)")


def _of_megatron() -> list[Any]:
    """Return what Megatron's own checkpoints name beside tensors, by Megatron's own list."""
    # Imported for checkpoints that need it: it takes seconds.
    from megatron.core.safe_globals import SAFE_GLOBALS

    older = [
        (one, f"numpy.core.multiarray.{one.__name__}")  # Its name in NumPy 1.
        for one in SAFE_GLOBALS
        if one.__name__ == "_reconstruct"
    ]
    return [*SAFE_GLOBALS, *older]


def _foreign_classes(stream: BinaryIO) -> str:
    from torch.serialization import get_unsafe_globals_in_checkpoint

    stream.seek(0)
    try:
        names = sorted(get_unsafe_globals_in_checkpoint(stream))
    except Exception:  # It lists the names of well-formed files only.
        names = []
    if names:
        return f"names {', '.join(names)}, which no checkpoint needs"
    return "is a pickle that holds more than tensors and plain values"
