"""Which experts each token chose, with its id and sample: a trace that tells more than loads do.

Files of routes, `.npz`; a folder of them, as a run records it, is read as one:

token    int64 [N]         id of each token in the vocabulary
sample   int64 [N]         number of the sample that it belongs to, from 0, in the order of the data
layer    int64 [L]         number of each layer, counted from 1
choice   int16 [L, N, K]   logical experts that the token chose in the layer; most probable first
sizes    int64 [2]         tokens of the vocabulary (V), logical experts (E)

Legend: N tokens, L layers, K experts of a token, V vocabulary, E logical experts, Q samples.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.files.arrays import find_arrays, write_arrays
from megatron_ext.files.schema import Array, Schema

_MOST_COUNTS = 2**28
"""Counts of a layer, by id and expert: twice those of 262,144 ids and 512 experts."""

_SCHEMA = Schema(
    arrays={
        "choice": Array(dtype=np.int16, axes="L N K", least=0, limit="E"),
        "token": Array(dtype=np.int64, axes="N", least=0, limit="V"),
        "sample": Array(dtype=np.int64, axes="N", least=0, limit="N"),
        "layer": Array(dtype=np.int64, axes="L", all_differ=True, least=0),
        "sizes": Array(dtype=np.int64, axes="2", entries="V E", least=1),
    }
)


@dataclass(frozen=True, eq=False)
class Routes:
    """The choices of some samples' tokens in all layers; arrays are those of the file."""

    token: np.ndarray
    sample: np.ndarray
    layers: tuple[int, ...]
    choice: np.ndarray
    vocab_size: int
    num_experts: int

    def sizes(self) -> tuple[int, int, int]:
        """Ids of the vocabulary (V), logical experts (E), experts of a token (K)."""
        return self.vocab_size, self.num_experts, self.choice.shape[2]

    @property
    def num_samples(self) -> int:
        """Samples (Q)."""
        return int(self.sample.max()) + 1

    def counts(self, layer: int, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Count how often each expert was chosen by the tokens of each row: int64 [rows, E].

        Args:
            layer: Position of the layer in `layers`.
            rows: The row of each token, int64 [N], such as `token` or `sample`.
            num_rows: Number of rows.
        """
        cells = rows[:, None] * self.num_experts + self.choice[layer]
        size = num_rows * self.num_experts
        return np.bincount(cells.ravel(), minlength=size).reshape(num_rows, -1)


def read_routes(path: Path) -> Routes:
    """Read and check a file of routes, or a run's folder of them.

    From a folder, layers of all pipeline stages are put together. If only some stages wrote the
    last steps of a killed run, these steps are dropped. Errors are those of `find_arrays` and
    `Schema.read`.
    """
    return _read_folder(path) if path.is_dir() else _read_file(path)


def _read_folder(path: Path) -> Routes:
    by_steps: dict[str, list[Path]] = {}
    for file in find_arrays(path):
        by_steps.setdefault(file.name.partition("_stage_")[0], []).append(file)
    joined = [(stages[0], _join_stages(stages)) for stages in by_steps.values()]
    # Not stages: a run may go on with another number of them.
    num_layers = max(len(part.layers) for _, part in joined)
    whole = [(file, part) for file, part in joined if len(part.layers) == num_layers]
    first_file, first = whole[0]
    for file, part in whole:
        if (part.sizes(), part.layers) != (first.sizes(), first.layers):
            raise ValueError(
                f"{file}: vocabulary, experts, choices {part.sizes()} and layers "
                f"{part.layers} must be those of {first_file}: {first.sizes()}, {first.layers}"
            )
    parts = [part for _, part in whole]
    first_samples = np.cumsum([0, *(part.num_samples for part in parts[:-1])])
    return dataclasses.replace(
        first,
        token=np.concatenate([part.token for part in parts]),
        sample=np.concatenate(
            [part.sample + start for part, start in zip(parts, first_samples, strict=True)]
        ),
        choice=np.concatenate([part.choice for part in parts], axis=1),
    )


def _join_stages(files: list[Path]) -> Routes:
    parts = [_read_file(file) for file in files]
    first_file, first = files[0], parts[0]
    for file, part in zip(files, parts, strict=True):
        same = all(
            np.array_equal(*pair)
            for pair in ((part.token, first.token), (part.sample, first.sample))
        )
        if not same or part.sizes() != first.sizes():
            raise ValueError(f"{file}: token, sample and sizes must be those of {first_file}")
    layers = [layer for part in parts for layer in part.layers]
    if len(set(layers)) != len(layers):
        raise ValueError(f"{first_file}: layers of the stages beside it must differ, got {layers}")
    choice = np.concatenate([part.choice for part in parts])
    order = np.argsort(layers)
    return dataclasses.replace(first, layers=tuple(sorted(layers)), choice=choice[order])


def _read_file(path: Path) -> Routes:
    arrays = _SCHEMA.read(path)
    sample, (vocab_size, experts) = arrays["sample"], arrays["sizes"].tolist()
    if vocab_size * experts > _MOST_COUNTS:
        raise ValueError(
            f"{path}: vocabulary x experts ({vocab_size} x {experts}) must be <= {_MOST_COUNTS}"
        )
    if len(np.unique(sample)) != int(sample.max()) + 1:
        raise ValueError(f"{path}: samples must be numbered from 0 without gaps")
    layers = tuple(arrays["layer"].tolist())
    return Routes(arrays["token"], sample, layers, arrays["choice"], vocab_size, experts)


def write_routes(path: Path, routes: Routes, *, overwrite: bool = False) -> None:
    """Write a file of routes: see `write_arrays`."""
    arrays = {
        "token": routes.token,
        "sample": routes.sample,
        "layer": np.array(routes.layers, dtype=np.int64),
        "choice": routes.choice,
        "sizes": np.array([routes.vocab_size, routes.num_experts], dtype=np.int64),
    }
    write_arrays(path, arrays, overwrite=overwrite)
