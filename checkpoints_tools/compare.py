"""Compares two Megatron checkpoints, tensor by tensor, up to the order of experts.

Experts have no order of their own (relayout.py), so a checkpoint whose experts were moved holds the
same. The rows of a layer's router tell which expert became which. Nothing that is in a checkpoint
is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_tools.contents import is_of_optimizer
from checkpoints_tools.folder import newest_of
from checkpoints_tools.relayout import PARTS
from checkpoints_tools.tensors import Tensors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two checkpoints differ.

    Attributes:
        differences: A sentence for each tensor that only one has, or that is another.
        num_tensors: Tensors that both have.
        moved_layers: Layers, counted from 1, whose experts have another order.
    """

    differences: list[str]
    num_tensors: int
    moved_layers: list[int]


def compare(path: str | Path, other: str | Path) -> Comparison:
    """Compare the tensors of two checkpoints; objects that are no tensors are not compared.

    Raises:
        ValueError: A checkpoint is not complete or not of this kind.
    """
    import torch

    one, two = (Tensors(newest_of(Path(each))) for each in (path, other))
    differences = [f"{key} is only in {one.folder}" for key in one.keys - two.keys]
    differences += [f"{key} is only in {two.folder}" for key in two.keys - one.keys]
    orders = dict(_orders(one, two))
    both = sorted(one.keys & two.keys)
    for key in both:
        if one.shape(key) != two.shape(key) or one.dtype(key) != two.dtype(key):
            sides = (f"{each.shape(key)} of {each.dtype(key)}" for each in (one, two))
            differences.append(f"{key} is {' and '.join(sides)}")
        elif not torch.equal(_bits(_reordered(one, key, orders)), _bits(two.read(key))):
            differences.append(f"{key} has other values")
    moved = [layer for layer, order in orders.items() if order != sorted(order)]
    return Comparison(
        differences=sorted(differences), num_tensors=len(both), moved_layers=sorted(moved)
    )


def _orders(one: Tensors, two: Tensors) -> Iterator[tuple[int, list[int]]]:
    """Yield for each layer with a router, counted from 1: which expert became expert 0, 1, ...

    Layers whose routers are not the same rows in some order are left out.
    """
    for key in one.keys & two.keys:
        match = PARTS.fullmatch(key)
        if match is None or match["router"] != "weight" or is_of_optimizer(key):
            continue
        if one.shape(key) != two.shape(key) or one.dtype(key) != two.dtype(key):
            continue
        before, after = one.read(key), two.read(key)
        if match["layer"] is not None:
            before, after = before[None], after[None]
        for place, (rows, others) in enumerate(zip(before, after, strict=True)):
            number = place + 1 if match["layer"] is None else int(match["layer"]) + 1
            old = {bytes(_bits(row).numpy()): expert for expert, row in enumerate(rows)}
            order = [old.get(bytes(_bits(row).numpy()), -1) for row in others]
            if sorted(order) == list(range(len(order))):
                yield number, order


def _reordered(tensors: Tensors, key: str, orders: Mapping[int, list[int]]) -> torch.Tensor:
    """Return a tensor of the first checkpoint with its experts in the order of the other one."""
    match = PARTS.fullmatch(key)
    value = tensors.read(key)
    if match is None:
        return value
    in_name = match["layer"] is not None
    layers = [int(match["layer"])] if in_name else range(len(value))
    for place, layer in enumerate(layers):
        order = orders.get(layer + 1)
        if order is None:
            continue
        if match["expert"] is None:
            rows = value if in_name else value[place]
            rows.copy_(rows[order])
            continue
        expert = str(order[int(match["expert"])])
        source = key[: match.start("expert")] + expert + key[match.end("expert") :]
        if source != key and source in tensors.keys:
            moved = tensors.read(source)
            value = moved if in_name else value
            if not in_name:
                value[place] = moved[place]
    return value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, uint8: so values that are not finite are compared, too."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)
