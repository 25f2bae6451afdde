"""The parts of a training step, each run alone: `doctor --calibrate` measures their times.

They are the objects of a run's own model, as Megatron makes them, so each part takes as long as in
the run: its unfused attention, its permutations, its DDP hooks, its optimizer. Legend: N tokens of
a rank, H hidden, E logical experts, M mains per rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megatron_ext.config import TrainConfig
from megatron_ext.trainer.model import build


class StepBlocks:
    """One rank's model, and one of its layers run in parts. Made on all ranks of a launch.

    Args:
        config: The run, without balancing and with one choice a token; its data are not read.
        vocab_size: Size of the tokenizer's vocabulary.
    """

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        build.start_parallelism(config)
        self._chunks = build.build_model(config, vocab_size)
        self._optimizer = build.build_optimizer(config, self._chunks)
        model = self._chunks[0].module
        self._layer: Any = next(m for m in model.modules() if isinstance(m, TransformerLayer))
        self._moe: Any = self._layer.mlp
        self._layer.mlp = _RouterAlone(self._moe)
        data, hidden = config.data, config.model.hidden_size
        self._rotary = model.rotary_pos_emb(data.sequence_length)
        self._hidden = torch.randn(
            data.sequence_length, data.micro_batch_size, hidden, requires_grad=True
        )
        num_tokens, experts = data.sequence_length * data.micro_batch_size, config.model.num_experts
        self._routing = nn.functional.one_hot(torch.arange(num_tokens) % experts, experts).bool()
        self._probs = torch.rand(num_tokens, experts).mul(self._routing).requires_grad_()

    @property
    def optimizer_params(self) -> int:
        """Weights whose optimizer state this rank has."""
        groups = self._optimizer.param_groups
        return sum(parameter.numel() for group in groups for parameter in group["params"])

    def run_dense(self) -> None:
        """Run a layer without its experts forward and backward: attention, norms, sums, router."""
        output, _ = self._layer(self._hidden, attention_mask=None, rotary_pos_emb=self._rotary)
        output.backward(output.detach())

    def run_tokens(self) -> None:
        """Dispatch and combine evenly routed tokens, with their probabilities, and back."""
        dispatcher = self._moe.token_dispatcher
        tokens, probs = dispatcher.dispatch_preprocess(self._hidden, self._routing, self._probs)
        tokens, probs = dispatcher.token_dispatch(tokens, probs)
        tokens, _, probs = dispatcher.dispatch_postprocess(tokens, probs)
        output = dispatcher.token_combine(dispatcher.combine_preprocess(tokens))
        output = dispatcher.combine_postprocess(output)
        torch.autograd.backward([output, probs], [output.detach(), probs.detach()])

    def run_experts(self, tokens_per_expert: Tensor) -> None:
        """Run this rank's experts forward and backward.

        Args:
            tokens_per_expert: Tokens of each main, int64 [M].
        """
        num_tokens = int(tokens_per_expert.sum())
        tokens = torch.ones(num_tokens, self._hidden.shape[-1], requires_grad=True)
        probs = torch.ones(num_tokens, requires_grad=True)
        output, _ = self._moe.experts(tokens, tokens_per_expert, probs)
        output.backward(output.detach())

    def run_optimizer(self) -> None:
        """Clip the gradients, make an optimizer step, and clear the gradients."""
        self._optimizer.step()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()


class _RouterAlone(nn.Module):
    """Replaces a MoE layer by its router, whose probabilities scale the tokens."""

    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        self._moe = moe

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        probs, _ = self._moe.route(hidden)
        return hidden * probs.sum(-1).view(*hidden.shape[:-1], 1), None
