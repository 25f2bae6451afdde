"""Records the tokens' chosen experts, with the tokens' ids, to `routes/` in the run directory.

`megatron-ext place sem_moe` reads these files. One rank of each pipeline stage records the first of
its own samples in every step: ranks send each other nothing. A forward without gradients does not
count (evaluation, the first pass of recompute).

Legend: b samples of a microbatch, s tokens of a sample, K experts of a token, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ext.balance.layer_report import number_of
from megatron_ext.balance.reroute import as_map
from megatron_ext.files.routes import Routes, read_routes, write_routes
from megatron_ext.telemetry.step_files import StepFiles

ROUTES_FOLDER = "routes"


class RouteRecorder:
    """Watches a rank's model from its construction until `close()`.

    If a run continues from the checkpoint of `start_step`, the recorder drops every file that has a
    later step, as a whole. The file's steps before the checkpoint are lost; no step is recorded
    twice.

    A chunk's first argument is tokens [b, s]. The chunks have at least one MoE layer, of any kind.
    The recorder takes the first `samples` of a step, or all if there are fewer. `bytes_per_token`
    is the memory of a token and the token's choices, equal on all stages, so that the files of all
    stages end with the same steps.
    """

    def __init__(
        self,
        files: StepFiles,
        *,
        chunks: Sequence[nn.Module],
        layers: Sequence[Any],
        samples: int,
        start_step: int,
        vocab_size: int,
        bytes_per_token: int,
    ) -> None:
        self._files = files
        self._samples = samples
        self._vocab_size = vocab_size
        self._num_experts = int(layers[0].config.num_moe_experts)
        self._bytes_per_token = bytes_per_token
        # This step's tokens and choices, by microbatch. All chunks have the same tokens; the first
        # chunk's are recorded.
        self._tokens: list[Tensor] = []
        self._layers = tuple(sorted(map(number_of, layers)))
        self._choices: dict[int, list[Tensor]] = {number: [] for number in self._layers}
        # Tokens and choices of the steps since the last file.
        self._step_tokens: list[Tensor] = []
        self._step_choices: list[Tensor] = []
        for last_step, path in files.existing():
            drop = path.unlink if last_step > start_step else partial(read_routes, path)
            files.change(path, drop)
        self._hooks = [chunks[0].register_forward_pre_hook(self._see_tokens)]
        self._hooks += [
            layer.router.register_forward_hook(partial(self._see_choices, number_of(layer)))
            for layer in layers
        ]

    def write(self, step: int, computed: Sequence[Any] = ()) -> None:
        """Take the choices of a step; write a file if one is due. Loads are `TraceWriter`'s."""
        self._last_step = step
        self._step_tokens.append(torch.cat(self._tokens))
        choices = [torch.cat(self._choices[number]) for number in self._layers]
        self._step_choices.append(torch.stack(choices))
        self._tokens = []
        self._choices = {number: [] for number in self._layers}
        num_tokens = sum(tokens.numel() for tokens in self._step_tokens)
        if self._files.is_due(len(self._step_tokens), num_tokens * self._bytes_per_token):
            self._start_file()

    def flush(self) -> None:
        """Write the steps collected so far, and wait for the end of all writes."""
        if self._step_tokens:
            self._start_file()
        self._files.wait()

    def close(self) -> None:
        """Stop watching, write the steps collected so far, and end."""
        for hook in self._hooks:
            hook.remove()
        self.flush()
        self._files.close()

    def _kept(self, microbatch: int, size: int) -> int:
        """Return the number of samples to record of a microbatch of this size."""
        return min(size, max(self._samples - microbatch * size, 0))

    def _see_tokens(self, chunk: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled() and chunk.training:
            tokens = inputs[0]
            kept = self._kept(len(self._tokens), len(tokens))
            self._tokens.append(tokens[:kept].cpu())

    def _see_choices(
        self, layer: int, router: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor]
    ) -> None:
        if not (torch.is_grad_enabled() and router.training):
            return
        probs, choices = outputs
        seq_length, size = inputs[0].shape[:2]
        kept = self._kept(len(self._choices[layer]), size)
        with torch.no_grad():
            chosen = as_map(choices, self._num_experts)
            if choices.dtype != torch.bool:  # Ids have a probability each; -1 is no choice.
                columns = probs.new_zeros(len(probs), self._num_experts + 1)
                experts = choices.where(choices >= 0, self._num_experts).long()
                probs = columns.scatter(1, experts, probs)[:, :-1]
            # Sample by sample: the router's tokens are [s, b].
            mine = [one.view(seq_length, size, -1)[:, :kept] for one in (probs, chosen)]
            ordered = mine[0].masked_fill(~mine[1], -1).topk(router.topk).indices
        self._choices[layer].append(ordered.transpose(0, 1).to(torch.int16).cpu())

    def _start_file(self) -> None:
        tokens, choices = torch.cat(self._step_tokens), torch.cat(self._step_choices, 1)
        self._step_tokens, self._step_choices = [], []
        num_samples, seq_length = tokens.shape
        routes = Routes(
            tokens.flatten().numpy(),
            np.repeat(np.arange(num_samples), seq_length),
            self._layers,
            choices.flatten(1, 2).numpy(),
            self._vocab_size,
            self._num_experts,
        )
        path = self._files.path(self._last_step)
        self._files.start(path, partial(write_routes, routes=routes, overwrite=True))
