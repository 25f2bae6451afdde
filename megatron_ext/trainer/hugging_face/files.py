"""The tensors of a Hugging Face folder: `*.safetensors`, with an index where there are several."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.files.json_files import read_json
from megatron_ext.files.opening import look_at, open_regular
from megatron_ext.files.whole import sync

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
SHARD_BYTES = 1 << 30
"""Most bytes of tensors in a file that is written; until it is, they are in memory."""

_SCALE = "_scale_inv"
"""Ends the name of the scales of a tensor in FP8, behind that tensor's own name."""

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json")


class HubTensors(Mapping[str, Tensor]):
    """The tensors of a folder by name, read when they are asked for.

    Used as a context: it keeps one file open. All files are looked at when it is made.

    Attributes:
        names: Of all its tensors, without the scales of those in FP8.
        scaled: Names of the tensors in FP8 that have scales, sorted.
        sizes: How many numbers each has, by name.
        precision: That of a run which trains them, as in `ModelConfig`: `fp32` or `bf16`.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, or is not what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: tuple[str, Any] | None = None
        self._exits = ExitStack()
        files = _files(folder)
        self._file_of: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        dtypes = Counter[str]()
        for file in sorted(set(files.values()) if files else [_SINGLE]):
            reader = self._reader(file)
            names = reader.keys()
            for name in names:
                tensor = reader.get_slice(name)
                self._file_of[name] = file
                self.sizes[name] = math.prod(tensor.get_shape())
                dtype = tensor.get_dtype()
                if "F" not in dtype:  # Whole numbers would be taken for weights.
                    raise ValueError(f"{folder / file}: {name} is of {dtype}, not floating point")
                dtypes[dtype] += self.sizes[name]
        for name, file in files.items():
            if self._file_of.get(name) != file:
                raise ValueError(f"{folder / file} lacks the tensor {name} that {_INDEX} names")
        self.scaled = sorted(name for name in self._file_of if name + _SCALE in self._file_of)
        self.names = self._file_of.keys() - {name + _SCALE for name in self.scaled}
        # By numbers: beside each matrix in FP8 there is a small tensor of scales in float32.
        self.precision = "fp32" if 2 * dtypes["F32"] > dtypes.total() else "bf16"

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._reader(self._file_of[name]).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __enter__(self) -> HubTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _reader(self, file: str) -> Any:
        if self._open is None or self._open[0] != file:
            self._exits.close()
            path = self._folder / file
            try:
                look_at(path, follow=True)
                self._open = file, self._exits.enter_context(safe_open(path, "pt"))
            except FileNotFoundError:
                raise FileNotFoundError(f"{path} is missing") from None
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is cut off or damaged ({error})") from None
        return self._open[1]


class HubWriter:
    """Writes a model's folder tensor by tensor, beside the other files of the folder `like`."""

    def __init__(self, folder: Path, like: Path) -> None:
        self._folder = folder
        self._part: dict[str, Tensor] = {}
        self._part_bytes = 0
        self._parts: list[list[str]] = []
        self._total_bytes = 0
        self._dtypes = Counter[str]()
        others = [path for path in like.iterdir() if path.is_file()]
        for path in others:
            if not path.name.startswith(".") and not any(map(path.match, _WEIGHTS)):
                with (
                    open_regular(path, follow=True) as file,
                    (folder / path.name).open("xb") as out,
                ):
                    shutil.copyfileobj(file, out)

    def add(self, name: str, tensor: Tensor) -> int:
        """Take the next tensor, and return its bytes."""
        if self._part and self._part_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._part[name] = tensor.contiguous()
        self._dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
        self._part_bytes += tensor.nbytes
        return tensor.nbytes

    def finish(self) -> None:
        """Write what is left, and the index, and have it all on the disk."""
        self._write()
        self._say_dtype()
        count = len(self._parts)
        files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        files = files if count > 1 else [_SINGLE]
        for number, file in enumerate(files):
            self._unfinished(number).rename(self._folder / file)
        if count > 1:
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": {
                    name: file
                    for part, file in zip(self._parts, files, strict=True)
                    for name in part
                },
            }
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
        for path in (*self._folder.iterdir(), self._folder):
            sync(path)

    def _say_dtype(self) -> None:
        """Let the configuration say how the tensors are written: in one dtype, never in FP8."""
        path = self._folder / _CONFIG
        config = read_json(path)
        (dtype, _), *_ = self._dtypes.most_common(1)
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        said = {key: value for key, value in config.items() if key != "quantization_config"}
        if (said := said | {name: dtype}) != config:
            path.write_text(json.dumps(said, indent=2) + "\n")

    def _write(self) -> None:
        save_file(self._part, self._unfinished(len(self._parts)), {"format": "pt"})
        self._parts.append(list(self._part))
        self._total_bytes += self._part_bytes
        self._part, self._part_bytes = {}, 0

    def _unfinished(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def _files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; empty without one."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    index = read_json(path, follow=True)
    try:
        files: dict[str, str] = index["weight_map"]
        for file in files.values():
            if Path(file).name != file:
                raise ValueError(f"{file} is not the name of a file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return files
