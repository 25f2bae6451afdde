"""Norms of the experts of a Megatron checkpoint, read piece by piece."""

from __future__ import annotations

import math
from pathlib import Path

from checkpoints_tools.contents import is_of_optimizer, read_metadata, sizes_of_pieces
from checkpoints_tools.folder import check_whole, newest_of
from checkpoints_tools.relayout import PARTS
from checkpoints_tools.tensors import read_piece


def expert_norms(path: str | Path) -> dict[int, list[float]]:
    """Return the Frobenius norm of each expert: all its weights and biases, without the optimizer.

    Returns:
        By layer, counted from 1, the norm of expert 0, 1, ...

    Raises:
        ValueError: The checkpoint is not complete, not of this kind, or was changed.
    """
    folder = newest_of(Path(path))
    check_whole(folder)
    squares: dict[int, dict[int, float]] = {}
    table = read_metadata(folder)
    sizes = sizes_of_pieces(table)
    for index in table.storage_data:
        match = PARTS.fullmatch(index.fqn)
        if match is None or match["router"] is not None or is_of_optimizer(index.fqn):
            continue
        place = index.fqn, tuple(index.offset or ())
        if place not in sizes:
            raise ValueError(f"{folder}: the table of contents has no place for {index.fqn}")
        piece = read_piece(folder, table, index, sizes[place])
        offset = list(index.offset)
        # Layers and experts that the name does not say are the first axes.
        if match["layer"] is not None:
            piece, offset = piece[None], [int(match["layer"]), *offset]
        if match["expert"] is not None:
            piece, offset = piece[:, None], [offset[0], int(match["expert"]), *offset[1:]]
        for layer, experts in enumerate(piece, offset[0] + 1):
            of_layer = squares.setdefault(layer, {})
            for expert, weights in enumerate(experts, offset[1]):
                square = float(weights.double().square().sum())
                of_layer[expert] = of_layer.get(expert, 0.0) + square
    return {
        layer: [math.sqrt(of_layer[expert]) for expert in sorted(of_layer)]
        for layer, of_layer in sorted(squares.items())
    }
