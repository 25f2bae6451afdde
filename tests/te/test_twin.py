"""Transformer Engine on the CPU computes what PyTorch and Megatron's own modules compute.

Everything else in this folder rests on that. Layers 1 and 2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.gpt import build_gpt  # first: it puts Transformer Engine's twin in place
from tests.ranks import run_ranks
from tests.te_on_cpu import whole

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
SPLITS = [4, 0, 6]


def _linears(dtype: torch.dtype, **settings: Any) -> Any:
    from transformer_engine.pytorch import GroupedLinear

    torch.manual_seed(0)
    return GroupedLinear(len(SPLITS), 8, 6, params_dtype=dtype, device="cpu", **settings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_linear_is_a_linear_for_each_group(dtype: torch.dtype) -> None:
    grouped = _linears(dtype)
    tokens = torch.randn(sum(SPLITS), 8, dtype=dtype, requires_grad=True)
    upstream = torch.randn(sum(SPLITS), 6, dtype=dtype)
    grouped(tokens, SPLITS).backward(upstream)
    found = {name: each.grad for name, each in grouped.named_parameters()} | {"": tokens.grad}
    tokens.grad = None
    names = [(f"weight{index}", f"bias{index}") for index in range(len(SPLITS))]
    copies = {
        name: each.detach().clone().requires_grad_() for name, each in grouped.named_parameters()
    }
    outputs = [
        F.linear(part, copies[weight], copies[bias])
        for part, (weight, bias) in zip(tokens.split(SPLITS), names, strict=True)
    ]
    assert torch.equal(grouped(tokens, SPLITS), torch.cat(outputs))
    torch.cat(outputs).backward(upstream)
    for name, expected in [*((n, c.grad) for n, c in copies.items()), ("", tokens.grad)]:
        assert torch.equal(found[name], expected), name


def test_fused_weight_gradients_are_added_to_main_grad() -> None:
    grouped = _linears(torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    for weight in grouped.parameters():
        weight.main_grad = torch.full(weight.shape, 3.0)
    tokens = torch.randn(sum(SPLITS), 8, dtype=torch.bfloat16)
    upstream = torch.randn(sum(SPLITS), 6, dtype=torch.bfloat16)
    grouped(tokens, SPLITS).backward(upstream)
    parts = zip(tokens.split(SPLITS), upstream.split(SPLITS), strict=True)
    for weight, (part, gradient) in zip(grouped.parameters(), parts, strict=True):
        assert weight.grad is None
        assert torch.equal(weight.main_grad, 3.0 + gradient.float().T @ part.float())


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_norm_and_linear_in_one(normalization: str, dtype: torch.dtype) -> None:
    from transformer_engine.pytorch import LayerNormLinear

    torch.manual_seed(0)
    both = LayerNormLinear(
        8, 6, normalization=normalization, params_dtype=dtype, device="cpu", eps=1e-5
    )
    norm = getattr(torch.nn, normalization)(8, eps=1e-5, dtype=dtype)
    tokens, expected = torch.randn(5, 8, dtype=dtype, requires_grad=True), {}
    upstream = torch.randn(5, 6, dtype=dtype)
    output = F.linear(norm(tokens), both.weight, both.bias)
    output.backward(upstream)
    expected = {f"layer_norm_{name}": each.grad for name, each in norm.named_parameters()}
    expected |= {"weight": both.weight.grad, "bias": both.bias.grad, "": tokens.grad}
    both.weight.grad = both.bias.grad = tokens.grad = None
    found = both(tokens)
    torch.testing.assert_close(found, output)
    found.backward(upstream)
    gradients = {name: each.grad for name, each in both.named_parameters()} | {"": tokens.grad}
    torch.testing.assert_close(gradients, expected)


def test_steps_of_adam() -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(0)
    settings = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)
    start = torch.randn(3, 4)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    optimizers = FusedAdam([theirs], **settings), torch.optim.AdamW([ours], **settings)
    for _ in range(3):
        gradient = torch.randn(3, 4)
        for parameter, optimizer in zip((theirs, ours), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(theirs, ours)


LOGITS = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))


def _with_gradient(function: Any, inputs: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Outputs of a function, and the inputs' gradients of all that is differentiable in it."""
    inputs = [value.clone().requires_grad_() for value in inputs]
    outputs = [each for each in function(*inputs, *args, **kwargs) if each is not None]
    upstream = torch.Generator().manual_seed(1)
    sum(
        (each * torch.randn(each.shape, generator=upstream, dtype=each.dtype)).sum()
        for each in outputs
        if each.requires_grad
    ).backward()
    return [each.detach() for each in outputs], [value.grad for value in inputs]


@pytest.mark.parametrize(
    "settings",
    [
        dict(topk=2, scaling_factor=2.5),
        dict(topk=1, use_pre_softmax=True),
        dict(topk=2, score_function="sigmoid", expert_bias=LOGITS[0]),
        dict(topk=2, score_function="sigmoid", num_groups=4, group_topk=2),
    ],
)
def test_fused_routing(settings: dict[str, Any]) -> None:
    from megatron.core.transformer.moe import moe_utils

    score = settings.get("score_function", "softmax")
    for function, args in (
        (moe_utils.topk_routing_with_score_function, settings),
        (
            moe_utils.compute_routing_scores_for_aux_loss,
            dict(topk=settings["topk"], score_function=score),
        ),
    ):
        expected, found = (
            _with_gradient(function, [LOGITS], **args, fused=fused) for fused in (False, True)
        )
        assert expected[1][0].any()
        torch.testing.assert_close(found, expected)


def test_fused_balancing_loss() -> None:
    from megatron.core.transformer.moe import moe_utils

    def loss(probs: torch.Tensor, fused: bool) -> list[torch.Tensor]:
        counts = torch.arange(8)
        return [moe_utils.switch_load_balancing_loss_func(probs, counts, 14, 2, 8, 0.1, fused)]

    expected, found = (_with_gradient(loss, [LOGITS], fused) for fused in (False, True))
    assert expected[1][0].any()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_fused_permutation(dtype: torch.dtype) -> None:
    from megatron.core.transformer.moe import moe_utils

    logits = LOGITS.to(dtype)
    routing_map = logits > 0.3
    splits, order = torch.tensor([3, 0, 4]), torch.tensor([2, 0, 1])

    def there(fused: bool, tokens: Any, probs: Any) -> Any:
        return moe_utils.permute(tokens, routing_map, probs, int(routing_map.sum()), fused)

    def there_and_back(fused: bool, probs: Any, tokens: Any, merging: Any) -> Any:
        permuted, permuted_probs, rows, *_ = there(fused, tokens, probs)
        permuted = permuted * (1 if permuted_probs is None else permuted_probs.unsqueeze(1))
        shape = tokens.shape
        return [moe_utils.unpermute(permuted, rows, shape, merging, routing_map, fused)]

    def sorted_chunks(fused: bool, tokens: Any, probs: Any) -> Any:
        return moe_utils.sort_chunks_by_idxs(tokens, splits, order, probs, fused)

    tokens, other = logits[:, :5], logits.flip(1)
    for function, inputs in (
        (lambda fused, *args: there(fused, *args)[:2], [tokens, logits]),
        (lambda fused, *args: there_and_back(fused, None, *args), [tokens, other]),
        (lambda fused, *args: there_and_back(fused, logits, *args, None), [tokens]),
        (sorted_chunks, [tokens, logits[:, 0]]),
        (lambda fused, *args: sorted_chunks(fused, *args, None), [tokens]),
    ):
        outcomes = [_with_gradient(partial(function, fused), inputs) for fused in (False, True)]
        torch.testing.assert_close(outcomes[1], outcomes[0])
        assert all(gradient.any() for gradient in outcomes[0][1])


def test_what_bfloat16_parameters_round_is_kept_beside_them() -> None:
    from transformer_engine.pytorch.optimizers import FusedAdam

    torch.manual_seed(0)
    settings = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)
    start = torch.randn(30, 40).bfloat16()
    exact, rounded = start.float().requires_grad_(), start.clone().requires_grad_()
    kept = dict(master_weights=True, store_param_remainders=True, use_decoupled_grad=True)
    optimizers = FusedAdam([exact], **settings), FusedAdam([rounded], **settings, **kept)
    for _ in range(3):
        gradient = torch.randn(30, 40).bfloat16()
        exact.grad, rounded.decoupled_grad = gradient.float(), gradient
        for optimizer in optimizers:
            optimizer.step()
    remainders = optimizers[1].state[rounded]["master_param"]
    assert remainders.dtype == torch.int16
    assert torch.equal(whole(rounded, remainders), exact)
    # Half way between two it is rounded away from zero, and to even elsewhere.
    assert (rounded == exact.bfloat16()).float().mean() > 0.99


def test_a_group_has_outputs_of_one_dtype() -> None:
    grouped = _linears(torch.bfloat16, bias=False, fuse_wgrad_accumulation=True)
    for index, weight in enumerate(grouped.parameters()):
        weight.main_grad = torch.zeros(weight.shape, dtype=DTYPES[min(index, 1)])
    output = grouped(torch.randn(sum(SPLITS), 8, dtype=torch.bfloat16), SPLITS)
    with pytest.raises(TypeError, match="several dtypes"):
        output.sum().backward()


def _train(rank: int) -> list[float]:
    """Relative distances of losses and experts after training."""
    settings: dict[str, Any] = dict(ep=2, overlap_grad_reduce=True)
    plain = build_gpt(**settings)
    gpt = build_gpt(**settings, transformer_engine=True, moe_grouped_gemm=True)
    kinds = {type(layer.mlp.experts).__name__ for layer in gpt.chunks[0].module.decoder.layers}
    assert kinds == {"TEGroupedMLP"}
    expected = [plain.train_step(step, num_microbatches=2) for step in range(3)]
    found = [gpt.train_step(step, num_microbatches=2) for step in range(3)]
    distances = [abs(a - b) for a, b in zip(expected, found, strict=True)]
    parameters = gpt.parameters()
    experts = {name: value for name, value in plain.parameters().items() if "experts" in name}
    assert experts
    distances += [
        float((parameters[n] - value).norm() / value.norm()) for n, value in experts.items()
    ]
    return distances


def test_a_model_of_its_modules_trains_like_one_of_megatrons_own() -> None:
    for distances in run_ranks(_train, 2):
        assert max(distances) <= 1e-5
