"""Grouped matrix products whose weight gradients are right for experts without tokens as well.

Experts without tokens are common where loads are uneven. PyTorch's grouped product leaves the
gradients of their weights unwritten on some GPUs, as pytorch issue 172439 tells of Blackwell: the
optimizer would get whatever the memory held. So the first product on a device is preceded by a
small trial, and where that fails, these gradients are set to zero.

Legend: G groups, N' rows of all groups, K and F widths.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

logger = logging.getLogger(__name__)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group's rows by its weights.

    Args:
        rows: [N', K], sorted by group.
        weights: [G, K, F].
        ends: Where each group ends, int32 [G], on the device of `rows`.

    Returns:
        [N', F]. In backward, the weights of a group without rows get zeros.
    """
    if len(rows) == 0:
        return rows @ weights[0]
    needs_grad = torch.is_grad_enabled() and weights.requires_grad
    # Without values there is nothing to leave unwritten.
    has_values = not weights.is_meta
    if needs_grad and has_values and not writes_empty_groups(weights.device, weights.dtype):
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        weights = weights.view_as(weights)  # Of whose gradient only this product's part is changed.
        weights.register_hook(lambda grad: torch.where(has_rows[:, None, None], grad, 0))
    return grouped_mm(rows, weights, offs=ends)


@functools.cache
def writes_empty_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Try whether a grouped product writes gradients of zero for groups without rows.

    The trial waits for the device, once for each device and dtype.
    """
    counts, width = [0, 16, 0, 0, 8, 0], 32
    values = torch.arange(sum(counts) * width, device=device).view(-1, width) % 5 - 2.0
    rows = values.to(dtype)
    weights = rows.new_ones(len(counts), width, width).requires_grad_()
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    # Memory that was used before is not zero, as fresh memory often is.
    used = [torch.full_like(weights, torch.nan) for _ in range(4)]
    del used
    with torch.enable_grad():
        product = grouped_mm(rows, weights, offs=ends)
        (found,) = torch.autograd.grad(product, weights, torch.ones_like(product))
    # Small whole numbers: sums of them are exact in every order.
    expected = torch.stack([part.sum(0) for part in values.split(counts)])[:, :, None]
    is_right = torch.equal(found.float(), expected.expand_as(found))
    if not is_right:
        logger.warning(
            "grouped products on %s leave weight gradients of experts without tokens unwritten in "
            "%s (pytorch issue 172439): they are set to zero here",
            device,
            dtype,
        )
    return is_right
