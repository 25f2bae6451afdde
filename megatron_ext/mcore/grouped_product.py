"""Multiplies groups of rows by their weights, with right weight gradients for empty groups.

Experts without tokens are common with uneven loads. On some GPUs PyTorch's grouped product leaves
the weight gradients of such experts unwritten (pytorch issue 172439, for Blackwell), so that the
optimizer would get arbitrary bytes. So a small trial runs before the first product on a device, and
if the trial fails, a hook sets these gradients to zero.

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
    """Multiply rows [N', K], sorted by group, by the weights [G, K, F] of their groups.

    `ends` has the index behind each group's last row, int32 [G], on the device of the rows. In
    backward, the weights of a group without rows get zeros.
    """
    if len(rows) == 0 or rows.is_meta:
        # Without values a product of this size keeps the same tensors for backward; PyTorch's
        # grouped product takes bfloat16 only on the meta device.
        return rows @ weights[0]
    needs_grad = torch.is_grad_enabled() and weights.requires_grad
    if needs_grad and not writes_empty_groups(weights.device, weights.dtype):
        has_rows = ends.diff(prepend=ends.new_zeros(1)) > 0
        weights = weights.view_as(weights)  # The hook changes this product's part only.
        weights.register_hook(lambda grad: torch.where(has_rows[:, None, None], grad, 0))
    return grouped_mm(rows, weights, offs=ends)


@functools.cache
def writes_empty_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Try whether a grouped product writes gradients of zero for groups without rows.

    In the trial the host waits for the device, once for each device and dtype.
    """
    counts, width = [0, 16, 0, 0, 8, 0], 32
    values = torch.arange(sum(counts) * width, device=device).view(-1, width) % 5 - 2.0
    rows = values.to(dtype)
    weights = rows.new_ones(len(counts), width, width).requires_grad_()
    ends = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    # Fills memory with NaN and frees it, because fresh memory is often zero.
    used = [torch.full_like(weights, torch.nan) for _ in range(4)]
    del used
    with torch.enable_grad():
        product = grouped_mm(rows, weights, offs=ends)
        (found,) = torch.autograd.grad(product, weights, torch.ones_like(product))
    # Sums of small whole numbers are exact in every order.
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
