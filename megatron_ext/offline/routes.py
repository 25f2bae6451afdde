"""Which experts each token chose, by token id and sample: a trace that tells more than loads do.

Files of routes, `.npz`:

token    int64 [N]         id of each token in the vocabulary
sample   int64 [N]         number of the sample that it belongs to, from 0, in the order of the data
layer    int64 [L]         number of each layer, counted from 1
choice   int16 [L, N, K]   logical experts that the token chose in the layer; most probable first
sizes    int64 [2]         tokens of the vocabulary (V), logical experts (E)

Legend: N tokens, L layers, K experts of a token, V vocabulary, E logical experts, Q samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_ext.arrays import check_dtype, read_arrays, write_arrays


@dataclass(frozen=True, eq=False)
class Routes:
    """The choices of some samples' tokens in all layers, as in the file."""

    token: np.ndarray
    """Id of each token, int64 [N]."""

    sample: np.ndarray
    """Sample of each token, int64 [N], from 0 to Q - 1."""

    layers: tuple[int, ...]
    """Number of each layer, counted from 1."""

    choice: np.ndarray
    """Logical experts that each token chose, int16 [L, N, K]."""

    vocab_size: int
    """Ids that a token can have (V)."""

    num_experts: int
    """Logical experts of a layer (E)."""

    @property
    def num_samples(self) -> int:
        """Samples (Q)."""
        return int(self.sample.max()) + 1

    def counts(self, layer: int, rows: np.ndarray, num_rows: int) -> np.ndarray:
        """Count how often each expert was chosen by the tokens of each row: int64 [rows, E].

        Args:
            layer: Place of the layer in `layers`.
            rows: The row of each token, int64 [N], such as `token` or `sample`.
            num_rows: Rows there are.
        """
        cells = rows[:, None] * self.num_experts + self.choice[layer]
        size = num_rows * self.num_experts
        return np.bincount(cells.ravel(), minlength=size).reshape(num_rows, -1)


def read_routes(path: Path) -> Routes:
    """Read and check a file of routes.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no routes; the message names file, value and rule.
    """
    names = ("token", "sample", "layer", "choice", "sizes")
    arrays = read_arrays(path, required=names, optional=())
    for name in names:
        check_dtype(path, name, arrays[name], np.int16 if name == "choice" else np.int64)
    token, sample, layer, choice, sizes = (arrays[name] for name in names)
    if choice.ndim != 3 or 0 in choice.shape:
        raise ValueError(f"{path}: choice must be [L, N, K] and not empty, got {choice.shape}")
    num_layers, num_tokens, _ = choice.shape
    for name, values, shape in (
        ("token", token, (num_tokens,)),
        ("sample", sample, (num_tokens,)),
        ("layer", layer, (num_layers,)),
        ("sizes", sizes, (2,)),
    ):
        if values.shape != shape:
            raise ValueError(f"{path}: {name} must be {list(shape)}, got shape {values.shape}")
    vocab_size, num_experts = sizes.tolist()
    for name, values, limit in (
        ("token", token, vocab_size),
        ("choice", choice, num_experts),
        ("sample", sample, num_tokens),
    ):
        if int(values.min()) < 0 or int(values.max()) >= limit:
            raise ValueError(
                f"{path}: {name} must be from 0 to {limit - 1}, is from {values.min()} to "
                f"{values.max()}"
            )
    if len(set(layer.tolist())) != num_layers:
        raise ValueError(f"{path}: layers must differ, got {layer.tolist()}")
    if len(np.unique(sample)) != int(sample.max()) + 1:
        raise ValueError(f"{path}: samples must be numbered from 0 without gaps")
    return Routes(token, sample, tuple(layer.tolist()), choice, vocab_size, num_experts)


def write_routes(path: Path, routes: Routes, *, overwrite: bool = False) -> None:
    """Write a file of routes, whole or not at all.

    Raises:
        FileExistsError: The file exists and is not to be replaced.
    """
    arrays = {
        "token": routes.token,
        "sample": routes.sample,
        "layer": np.array(routes.layers, dtype=np.int64),
        "choice": routes.choice,
        "sizes": np.array([routes.vocab_size, routes.num_experts], dtype=np.int64),
    }
    tensors = {name: torch.from_numpy(values) for name, values in arrays.items()}
    write_arrays(path, tensors, overwrite=overwrite)
