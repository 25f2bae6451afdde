"""Stand-ins for Transformer Engine's kernels of routing and permutation: see `te_on_cpu.py`.

Legend: N tokens, E experts, K choices of a token, T rows of permuted tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# --- routing: probabilities and scores are computed in float32, as the kernels do


@torch.no_grad()
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int,
    topk_indices: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [N, E], map bool [N, E], and what backward needs: the logits."""
    if topk_indices is not None or routing_map_format != 0:
        raise NotImplementedError("only maps of bytes have a twin")
    wide = logits.float()
    scores = wide if score_function == "softmax" else _score(wide, score_function)
    if expert_bias is not None:
        scores = scores + expert_bias
    if group_topk:
        assert num_groups is not None
        scores = scores.masked_fill(~_best_groups(scores, topk, num_groups, group_topk), -torch.inf)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)
    probs = _probs(wide, chosen, topk, use_pre_softmax, scaling_factor, score_function)
    return probs.to(logits.dtype), chosen, wide


def _best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """Experts [N, E] of the groups whose best ones score most together."""
    of_groups = scores.unflatten(1, (num_groups, -1)).topk(topk // group_topk).values.sum(2)
    best = torch.zeros_like(of_groups, dtype=torch.bool)
    best.scatter_(1, of_groups.topk(group_topk).indices, True)
    return best.repeat_interleave(scores.shape[1] // num_groups, 1)


def _score(logits: Tensor, score_function: str) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if score_function == "sigmoid" else F.softplus(logits).sqrt()


def _probs(
    logits: Tensor,
    chosen: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
) -> Tensor:
    if score_function == "softmax" and not use_pre_softmax:
        probs = logits.masked_fill(~chosen, -torch.inf).softmax(1)
    else:
        probs = _score(logits, score_function) * chosen
        if score_function != "softmax" and topk > 1:
            probs = probs / (probs.sum(1, keepdim=True) + 1e-20)
    return probs * (scaling_factor or 1.0)


def fused_topk_with_score_function_bwd(
    chosen: Tensor,
    logits: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool,
    routing_map_format: int,
) -> None:
    """Write the gradient of the logits into `grad_logits`."""
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        probs = _probs(logits, chosen, topk, use_pre_softmax, scaling_factor, score_function)
    grad_logits.copy_(torch.autograd.grad(probs, logits, grad_probs.float())[0])


def fused_score_for_moe_aux_loss_fwd(
    *, logits: Tensor, topk: int, score_function: str, routing_map_format: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores float32 [N, E], map of the best K, and what backward needs: the logits."""
    wide = logits.detach().float()
    scores = _scores_that_add_to_one(wide, score_function)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)
    return scores, chosen, wide


def _scores_that_add_to_one(logits: Tensor, score_function: str) -> Tensor:
    scores = _score(logits, score_function)
    return scores if score_function == "softmax" else scores / (scores.sum(1, keepdim=True) + 1e-20)


def fused_score_for_moe_aux_loss_bwd(
    *,
    intermediate_output: Tensor,
    grad_scores: Tensor,
    grad_logits: Tensor,
    topk: int,
    score_function: str,
) -> None:
    """Write the gradient of the logits into `grad_logits`."""
    with torch.enable_grad():
        logits = intermediate_output.detach().requires_grad_()
        scores = _scores_that_add_to_one(logits, score_function)
    grad_logits.copy_(torch.autograd.grad(scores, logits, grad_scores)[0])


@torch.no_grad()
def fused_moe_aux_loss_fwd(
    *,
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Any,
    num_experts: int,
    num_rows: int,
    num_cols: int,
    topk: int,
    coeff: float,
) -> tuple[Tensor, Tensor]:
    """The loss, and the factor that it has in common with its gradient."""
    factor = num_experts * coeff / (topk * torch.as_tensor(total_num_tokens).double() ** 2)
    loss = (probs.float().sum(0) * tokens_per_expert.float()).sum() * factor
    return loss.to(probs.dtype), factor.float()


def fused_moe_aux_loss_bwd(
    *,
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: int,
    num_cols: int,
    grad_aux_loss: Tensor,
) -> Tensor:
    """The gradient of the probabilities, [N, E]."""
    of_expert = tokens_per_expert.float() * Const_buf * grad_aux_loss.float()
    return of_expert.to(grad_aux_loss.dtype).expand(num_rows, num_cols).contiguous()


ROUTING_TWINS = {
    "fused_moe_aux_loss_bwd": fused_moe_aux_loss_bwd,
    "fused_moe_aux_loss_fwd": fused_moe_aux_loss_fwd,
    "fused_moe_aux_loss_fwd_graph_safe": fused_moe_aux_loss_fwd,
    "fused_score_for_moe_aux_loss_bwd": fused_score_for_moe_aux_loss_bwd,
    "fused_score_for_moe_aux_loss_fwd": fused_score_for_moe_aux_loss_fwd,
    "fused_topk_with_score_function_bwd": fused_topk_with_score_function_bwd,
    "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
}
"""Functions of `transformer_engine_torch`."""

# --- permutation: kernels in Triton


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """The row of each choice, int32 [N, 2E + 1], of which the first E columns count; else -1."""
    by_expert = routing_map.bool().T.reshape(-1)
    rows = (by_expert.cumsum(0) - 1).masked_fill(~by_expert, -1)
    return F.pad(rows.view(num_experts, num_tokens).T.int(), (0, num_experts + 1))


def _choices(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token, expert and row of each choice, by token."""
    rows = row_id_map[:, :num_experts]
    tokens, experts = (rows >= 0).nonzero(as_tuple=True)
    return tokens, experts, rows[tokens, experts].long()


def permute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, scale: Any, pad_offsets: Any,
    num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int,
    scale_hidden_dim: Any,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    """Rows [T, H], and their probabilities [T]."""
    _check_plain(scale, pad_offsets)
    tokens, experts, rows = _choices(row_id_map, num_experts)
    output = inp.new_empty(num_out_tokens, hidden_size)
    output[rows] = inp[tokens]
    if probs is None:
        return output, None, None
    permuted = probs.new_empty(num_out_tokens)
    permuted[rows] = probs[tokens, experts]
    return output, None, permuted


def unpermute_with_mask_map(
    inp: Tensor, row_id_map: Tensor, merging_probs: Tensor | None, permuted_probs: Tensor | None,
    pad_offsets: Any, num_tokens: int, num_experts: int, hidden_size: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Tokens [N, H] as sums of their rows, and probabilities [N, E]."""
    _check_plain(pad_offsets)
    tokens, experts, rows = _choices(row_id_map, num_experts)
    values = inp[rows].to(torch.promote_types(inp.dtype, torch.float32))
    if merging_probs is not None:
        values = values * merging_probs[tokens, experts].unsqueeze(1)
    output = values.new_zeros(num_tokens, hidden_size).index_add(0, tokens, values).to(inp.dtype)
    if permuted_probs is None:
        return output, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    grad: Tensor, row_id_map: Tensor, inp: Tensor, merging_probs: Tensor, pad_offsets: Any,
    num_tokens: int, num_experts: int, num_out_tokens: int, hidden_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the rows [T, H] and of the probabilities [N, E]."""
    _check_plain(pad_offsets)
    tokens, experts, rows = _choices(row_id_map, num_experts)
    of_rows = grad.new_empty(num_out_tokens, hidden_size)
    of_rows[rows] = (grad[tokens] * merging_probs[tokens, experts].unsqueeze(1)).to(grad.dtype)
    of_probs = torch.zeros_like(merging_probs)
    of_probs[tokens, experts] = (inp[rows] * grad[tokens]).sum(1).to(merging_probs.dtype)
    return of_rows, of_probs


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """Where each row goes, int32 [T]."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_indices.tolist()]).argsort().int()


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, num_tokens: int, hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Rows [T, H] and their probabilities [T], sent to their places or, backward, fetched."""
    order = row_id_map.argsort() if is_forward else row_id_map.long()
    return inp[order], None if probs is None else probs[order]


def _check_plain(*of_quantized: Any) -> None:
    if any(each is not None for each in of_quantized):
        raise NotImplementedError("scales and padding of quantized tokens have no twin")


PERMUTATION_TWINS = {
    each.__name__: each
    for each in (
        *(make_row_id_map, permute_with_mask_map, unpermute_with_mask_map),
        *(unpermute_with_mask_map_bwd_with_merging_probs, make_chunk_sort_map, sort_chunks_by_map),
    )
}
"""Functions of `transformer_engine.pytorch.triton.permutation`."""
