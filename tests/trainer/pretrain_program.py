"""A program of Megatron's training loop, as `pretrain_gpt.py` is one.

It knows nothing of balancing. Its tokens are random, so no data and no tokenizer are needed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class RandomTokens(torch.utils.data.Dataset):
    """Samples as a GPT dataset gives them; the first tokens of the vocabulary are the most used."""

    def __init__(self, num_samples: int, length: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(num_samples, length + 1, generator=generator) ** 3 * vocabulary
        self._tokens = drawn.long()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index]
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(len(tokens) - 1),
            "position_ids": torch.arange(len(tokens) - 1),
        }


def datasets(num_samples: tuple[int, int, int], vp_stage: int | None = None) -> list[RandomTokens]:
    args = get_args()
    return [
        RandomTokens(number or 1, args.seq_length, args.vocab_size, seed)
        for seed, number in enumerate(num_samples)
    ]


datasets.is_distributed = True  # type: ignore[attr-defined]


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss, batch["loss_mask"])


def loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    total, number = (losses * mask).sum(), mask.sum().int()
    return total, number, {"lm loss": torch.stack([total.detach(), number])}


if __name__ == "__main__":
    args = parse_and_validate_args()
    settings = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(settings, datasets, ModelType.encoder_or_decoder, forward_step)
