"""Training with quantized experts, balanced, equals training without balancing.

Layer 2, for every pair of options; `quantized.py` says what is compared.
"""

from __future__ import annotations

import pytest
import torch

from tests.mcore.covering import (
    OPTIONS,
    Combination,
    Options,
    Settings,
    assert_each_version_has_each_value,
    combinations,
    covering,
)
from tests.te.quantized import Case, assert_training_is_the_same
from tests.te.test_combinations import TE_OPTIONS

FUSED = OPTIONS["gradients"]["fused"]

QUANTIZED_OPTIONS: Options = {
    "format": {
        "mxfp8": dict(format="mxfp8"),
        "blockwise": dict(format="blockwise", number="hybrid"),
        "mxfp8 parameters": dict(format="mxfp8", number="hybrid", native=True),
        "blockwise parameters": dict(format="blockwise", native=True),
    },
    "layout": TE_OPTIONS["layout"],
    "recompute": TE_OPTIONS["recompute"],
    "experts": {
        "gated": {},
        "biased": dict(add_bias_linear=True),
        "latent": dict(moe_latent_size=32),
        "shared": dict(shared_ffn=32),
    },
    "layers": {
        "all": {},
        "mtp": OPTIONS["layers"]["mtp"],
        "some": dict(
            # In float32, a layer's rounding would reach the next steps' quantized numbers.
            dtype=torch.bfloat16,
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=1,
            num_layers_at_end_in_bf16=0,
        ),
    },
    "strategy": {
        **{name: OPTIONS["strategy"][name] for name in ("quota", "libra")},
        "time": dict(balance=dict(objective="time")),
    },
    "padding": {  # Of each expert's rows: behind the exchange, or before it.
        "behind": {},
        "before": dict(moe_router_padding_for_quantization=True),
    },
    "gradients": {"autograd": {}, "fused": FUSED},
    "optimizer": {
        "plain": {},
        "distributed": OPTIONS["optimizer"]["distributed"] | dict(overlap_param_gather=True),
    },
    "start": {"trained": {}, "evaluated": dict(evaluates=True)},
    **{name: OPTIONS[name] for name in ("transport", "exchange")},
    "schedule": TE_OPTIONS["schedule"],
}

SHOWN = {
    "mxfp8": "mxfp8",
    "blockwise": "blockwise",
    "mxfp8 parameters": "quantized_parameters",
    "blockwise parameters": "quantized_parameters",
    "some": "bf16_layers",
    "before": "quantized_padding",
}
"""Rows of the compatibility page, by value."""

IMPOSSIBLE = (
    *({"etp2", other} for other in ("biased", "own first")),
    # With sequence parallelism Transformer Engine gathers data and scales in one call, which gloo
    # has not.
    *({"etp2", other} for other in ("mxfp8", "mxfp8 parameters")),
    *({"delayed", other} for other in ("moe", "full", "pp2", "libra", "own first")),
    {"some", "libra"},
    # Gradients that are not set, with and without balancing; of 0.16.1's latent MoE, too.
    *({"delayed", other} for other in ("autograd", "latent")),
)
"""What Megatron, or the plug-in, or gloo, does not take together."""


def test_each_version_trains_each_value() -> None:
    trainings = covering(QUANTIZED_OPTIONS, IMPOSSIBLE)
    assert_each_version_has_each_value(QUANTIZED_OPTIONS, trainings)


@pytest.mark.parametrize("combination", combinations(QUANTIZED_OPTIONS, IMPOSSIBLE, SHOWN))
def test_training_equals_unbalanced_megatron(combination: Combination) -> None:
    assert_training_is_the_same(_case(combination))


def _case(combination: Combination) -> Case:
    settings: Settings = {}
    balance: Settings = {}
    for option, value in combination.items():
        chosen = dict(QUANTIZED_OPTIONS[option][value])
        balance |= chosen.pop("balance", {})
        settings |= chosen
    of_case = ("format", "number", "native", "evaluates", "world_size")
    given = {name: settings.pop(name) for name in of_case if name in settings}
    return Case(settings=settings, balance=balance, num_microbatches=2, **given)
