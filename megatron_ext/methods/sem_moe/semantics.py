"""Ranks that Sem-MoE chose before a run for experts, samples and tokens.

`megatron-ext place sem_moe` makes the semantics. A run moves its samples and tokens by the
semantics, and `megatron-ext checkpoint relayout` a checkpoint's experts. A token's rank in a layer
is the rank that has most of the token's experts.
Legend: L layers, V vocabulary, E logical experts, R ranks of the EP group.

Files of semantics, `.npz`, hold what `Semantics` does: layer int64 [L], expert int64 [L, E],
affinity float32 [V, R], token_rank int16 [L, V], token_confidence float32 [L, V], transition
float32 [L - 2, R, R, R]. A file with layer and expert alone is a file of `files/relayout.py`: a
checkpoint needs no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_ext.balance.strategies.strategy import StaysMegatron, Strategy
from megatron_ext.files.arrays import write_arrays
from megatron_ext.files.relayout import check_layout
from megatron_ext.files.schema import Array, Schema


@dataclass(frozen=True, eq=False)
class Semantics:
    """Tables that were learned from routes: ranks of experts, samples and tokens."""

    layers: tuple[int, ...]
    """Number of each layer, counted from 1."""
    expert: np.ndarray
    """Logical expert at each position of each layer, rank by rank: int64 [L, E]. `relayout` makes
    the expert at position p expert p."""
    affinity: np.ndarray
    """Share of a token id's choices, over all layers, that go to each rank: float32 [V, R]; 1 / R
    everywhere for an id that was not seen."""
    token_rank: np.ndarray
    """Likeliest rank of a token id in each layer: int16 [L, V]."""
    token_confidence: np.ndarray
    """Chance that the likeliest rank is right: float32 [L, V]; 1 / R if the id was not seen."""
    transition: np.ndarray
    """Chance that a token goes to rank c if it went to rank a two layers ago, then to b: float32
    [L - 2, R (a), R (b), R (c)], from the third layer on; 1 / R where a and b were not seen."""

    def home(self) -> np.ndarray:
        """Return the rank of each logical expert: int64 [L, E]."""
        experts_per_rank = self.expert.shape[1] // self.affinity.shape[1]
        return np.argsort(self.expert, axis=1) // experts_per_rank


_SCHEMA = Schema(
    arrays={
        "expert": Array(dtype=np.int64, axes="L E"),
        "affinity": Array(dtype=np.float32, axes="V R", least=0),
        "layer": Array(dtype=np.int64, axes="L", all_differ=True),
        "token_rank": Array(dtype=np.int16, axes="L V", least=0, limit="R"),
        "token_confidence": Array(dtype=np.float32, axes="L V", least=0),
        "transition": Array(dtype=np.float32, axes="L-2 R R R", least=0),
    },
    multiple=("E", "R"),
)


def read_semantics(path: Path) -> Semantics:
    """Read and check a file of semantics.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file holds something else; the message names file, value and rule.
    """
    arrays = _SCHEMA.read(path)
    layer = arrays.pop("layer")
    check_layout(path, layer, arrays["expert"])
    return Semantics(tuple(layer.tolist()), **arrays)


def write_semantics(path: Path, semantics: Semantics, *, overwrite: bool = False) -> None:
    """Write a file of semantics, whole or not at all.

    Raises:
        FileExistsError: The file exists and is not to be replaced.
    """
    arrays = {"layer": np.array(semantics.layers, dtype=np.int64)} | vars(semantics)
    del arrays["layers"]
    write_arrays(path, arrays, overwrite=overwrite)


SEM_MOE = Strategy(
    name="sem_moe",
    summary="Sem-MoE: no replicas; samples or tokens go to the ranks that have their experts",
    kind=StaysMegatron(needs=("data.affinity", "data.rebatch")),
)
