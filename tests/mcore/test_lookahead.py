"""What a layer predicts of the next one, when replicas are sent ahead, and that nothing is left.

Layer 2 (2 gloo ranks). Predictions are compared with the next router's choices counted here;
transfers are noted as they happen. That gradients are right is tested by `test_parity.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import TransformerConfig, build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron_ext.mcore.validate import validate_for_balancing  # isort: skip

LIBRA = BalanceConfig(strategy="libra", tolerance=0.0)
LAYERS = 3


def _predictions(rank: int, perturb: bool) -> list[Any]:
    """Of one microbatch: reports, and the same counted from the routers' inputs."""
    gpt = balanced_gpt(dict(ep=2, num_layers=LAYERS), LIBRA, dtype=torch.float64)
    layers = balanced_layers(gpt)
    gpt.forward_backward(num_microbatches=1)  # Layers get to know each other.
    reports: list[Any] = []
    inputs: dict[int, torch.Tensor] = {}
    chosen: dict[int, torch.Tensor] = {}

    def note(layer: Any, router: Any, arguments: Any, outputs: Any) -> None:
        inputs[layer.layer_number] = arguments[0].detach()
        chosen[layer.layer_number] = outputs[1]

    for layer in layers:
        layer.observers.append(reports.append)
        layer.router.register_forward_hook(partial(note, layer))
    gpt.forward_backward(num_microbatches=1)
    found = []
    for before, layer, report in zip(layers[:-1], layers[1:], reports[1:], strict=True):
        with torch.no_grad():
            predicted = layer.router(inputs[before.layer_number])[1]
        load = torch.stack([torch.zeros_like(predicted.sum(0))] * 2)
        torch.distributed.all_gather(list(load), predicted.sum(0), group=layer.ep_group)
        assert torch.equal(report.prediction.load, load)
        right = int((predicted & chosen[layer.layer_number]).sum())
        assert report.prediction.choice_accuracy == right / int(predicted.sum())
        both = torch.minimum(load.sum(0), report.load.sum(0))
        assert report.prediction.load_accuracy == int(both.sum()) / int(load.sum())
        use = report.prediction
        assert use.hit_replicas + use.topped_up_replicas == report.num_replicas
        found.append((report.layer_number, use.choice_accuracy, use.load_accuracy))
    assert reports[0].prediction is None
    return found


def test_a_prediction_is_the_next_routers_choice_for_this_layers_input() -> None:
    for found in run_ranks(_predictions, 2, False):
        assert [layer for layer, _, _ in found] == [2, 3]
        # By chance 2 of 4 experts are right half of the time.
        assert all(choice > 0.5 for _, choice, _ in found), found
