"""What tests of quantized experts share: small models in each format, and how two are compared.

Balanced and unbalanced training are alike where a row's blocks do not depend on other rows: MXFP8,
and blockwise with its scales that are powers of two. There forward's numbers are equal bit for bit,
and the gradients of weights differ by the order of sums in float32. With tensorwise scales and with
NVFP4 a number's scale depends on all rows of its expert on a rank, which balancing splits.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore import inside
from tests.mcore.clock import DEAR_EXPERTS_MS, rounds_take
from tests.mcore.parity import balanced_gpt, balanced_layers, relative_distance
from tests.ranks import run_ranks
from tests.te.test_combinations import GATED, TE
from tests.te_quantized_on_cpu import GPU, answer_like, gather_one_by_one

Settings = dict[str, Any]

EXACT = BalanceConfig(tolerance=0.0)

FORMATS = tuple(GPU)

GRADIENTS_OF_FLOAT32 = 2e-6
"""Sums over some hundred tokens in another order, each rounded by up to 6e-8."""
GRADIENTS_OF_BFLOAT16 = 1e-2
"""Gradients are rounded to bfloat16, by up to 4e-3, before the parts of an expert are added."""
LOSSES = 1e-6

SIZES: Settings = dict(hidden=64, ffn=96, micro_batch_size=4, lr=2e-3)
"""Multiples of MXFP8's 32; and a rate at which rounding seldom changes a number of the next step.
"""
EXPERTS: Settings = TE | GATED | SIZES | dict(ep=2, bias_activation_fusion=False)


def in_format(name: str, *, native: bool = False, number: str = "e4m3") -> Settings:
    """Fields of TransformerConfig; native parameters are quantized tensors themselves."""
    if name == "nvfp4":
        return dict(fp4="e2m1", fp4_recipe=name, fp4_param=native)
    return dict(fp8=number, fp8_recipe=name, fp8_param=native)


@dataclass(frozen=True)
class Case:
    """A training in a format in which balancing changes nothing."""

    format: str
    settings: Settings = field(default_factory=dict)
    native: bool = False
    number: str = "e4m3"
    balance: Settings = field(default_factory=dict)
    world_size: int = 2
    num_microbatches: int = 2
    evaluates: bool = False
    """Whether the first forward is an evaluation's."""
    gpu: str = ""
    """Where another one is meant than the format's in `GPU`."""

    @property
    def model(self) -> Settings:
        """Arguments of `build_gpt`."""
        precision = in_format(self.format, native=self.native, number=self.number)
        settings = EXPERTS | precision | self.settings
        if self.native:
            # Only in 16 bits have such parameters masters in float32.
            settings = dict(dtype=torch.bfloat16) | settings
        if self.native and self.is_distributed:
            ddp = dict(fp8_param_gather=True)
            if self.format == "mxfp8":
                # Megatron gathers these no other way.
                ddp |= (reused := dict(reuse_grad_buf_for_mxfp8_param_ag=True))
                settings |= dict(optimizer_settings=dict(fp8_recipe="mxfp8") | reused)
            settings |= dict(ddp=ddp | settings.get("ddp", {}))
        return settings

    @property
    def is_distributed(self) -> bool:
        """Whether each rank has a shard of the optimizer's state."""
        return bool(self.settings.get("distributed_optimizer"))

    @property
    def rounded(self) -> str:
        """Regular expression: parameters whose gradients are rounded to 16 bits, then added."""
        if self.model.get("dtype") != torch.bfloat16:
            return "$^"
        adds_in_float32 = self.settings.get("ddp", {}).get("grad_reduce_in_fp32", True)
        is_fused = self.settings.get("gradient_accumulation_fusion") and adds_in_float32
        return r"\.experts\..*bias\d*$" if is_fused else r"\.experts\."

    @property
    def compares_losses(self) -> bool:
        """Whether steps are alike: what is rounded may change quantized numbers of the next one."""
        has_bias = self.settings.get("add_bias_linear", False)
        return self.rounded == "$^" or ("bias" in self.rounded and not has_bias)


FirstStep = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Logits and losses of each microbatch, and gradients of parameters."""


@dataclass
class Apart:
    """How far apart two trainings are on a rank."""

    forwards: list[str]
    """Numbers of forwards that are not equal."""
    gradients: float
    """The largest relative distance of a parameter's gradient, in tolerances."""
    where: str
    """Its name."""
    losses: float = 0.0
    """The largest relative distance of a later step's loss."""
    replicas: int = 0
    hits: int = 0
    """Replicas that were sent ahead and used."""
    seed: int = 0
    """Of the last start."""


def first_step(gpt: TinyGPT, case: Case) -> FirstStep:
    """Run a schedule, and before it maybe an evaluation."""
    run = partial(gpt.forward_backward, num_microbatches=case.num_microbatches)
    forwards = {}
    if case.evaluates:
        with torch.no_grad():
            forwards |= _numbered(run(7, forward_only=True), "evaluated ")
    return forwards | _numbered(run()), gpt.gradients()


def train(gpt: TinyGPT, case: Case) -> tuple[FirstStep, list[float]]:
    """Return a first step, and the losses of the next two, each after a step of the optimizer."""
    if gpt.chunks[0].ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        _gather_in_gradients(gpt)
    first, losses = first_step(gpt, case), []
    for step in (1, 2) if case.compares_losses else ():
        gpt.update()
        losses.append(gpt.mean_loss(step, num_microbatches=case.num_microbatches))
    return first, losses


def _tolerance(case: Case, name: str) -> float:
    return GRADIENTS_OF_BFLOAT16 if re.search(case.rounded, name) else GRADIENTS_OF_FLOAT32


def _numbered(reports: list[dict[str, torch.Tensor]], what: str = "") -> dict[str, torch.Tensor]:
    return {
        f"{what}{name} {number}": value
        for number, report in enumerate(reports)
        for name, value in report.items()
    }


def _gather_in_gradients(gpt: TinyGPT) -> None:
    """As Megatron's training loop: parameters wait in the gradients' buffer to be gathered."""
    zero = gpt.optimizer.zero_grad

    def zero_and_copy(*args: Any, **kwargs: Any) -> None:
        zero(*args, **kwargs)
        for each in getattr(gpt.optimizer, "chained_optimizers", [gpt.optimizer]):
            each._copy_main_params_to_param_buffer()

    gpt.optimizer.zero_grad = zero_and_copy


def apart(case: Case, expected: FirstStep, found: FirstStep) -> Apart:
    """Compare the first steps of two trainings."""
    forwards, gradients = expected
    assert forwards.keys() == found[0].keys()
    assert gradients.keys() == found[1].keys()
    assert all(each.isfinite().all() for each in found[1].values())
    distances = {
        name: relative_distance(found[1][name], each) / _tolerance(case, name)
        for name, each in gradients.items()
    }
    where = max(distances, key=lambda name: distances[name])
    unequal = [name for name, each in forwards.items() if not torch.equal(each, found[0][name])]
    return Apart(unequal, distances[where], where)


def prepare(case: Case) -> None:
    """Make this rank ready for a case, until its call ends."""
    answer_like(case.gpu or GPU[case.format])
    if case.native and case.is_distributed:
        gather_one_by_one()


def balanced_and_not(rank: int, case: Case) -> Apart:
    """Train Megatron's own layers and balanced ones.

    Where what comes of a step is half way between two quantized numbers, or two experts are equally
    good for a token, the rounding of the step's gradients decides, and later losses differ by far
    more: then another start is taken. A mistake shows from every start.
    """
    prepare(case)
    # Without it, Megatron refuses the op fuser for gated experts.
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        return _balanced_and_not(case)


def _balanced_and_not(case: Case) -> Apart:
    for seed in range(3):
        first, losses = train(build_gpt(**case.model, seed=seed), case)
        balance = BalanceConfig(**dict(tolerance=0.0) | case.balance)
        gpt = balanced_gpt(case.model, balance, seed=seed)
        with rounds_take(DEAR_EXPERTS_MS):  # Measured costs that make replicas worth while.
            of_balanced = train(gpt, case)
        result = apart(case, first, of_balanced[0])
        result.losses = _worst(losses, of_balanced[1])
        layers = balanced_layers(gpt)
        assert all(inside.in_flight(layer) == 0 for layer in layers)
        result.replicas = sum(layer.num_replicas for layer in layers)
        result.hits = sum(layer.num_hits for layer in layers)
        is_wrong = result.forwards != [] or result.gradients > 1
        worst = torch.tensor([float(is_wrong), result.losses])
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if worst[0] or worst[1] <= LOSSES:
            break
    result.seed = seed
    return result


def _worst(losses: list[float], others: list[float]) -> float:
    """The largest relative distance; a stage without losses has nan."""
    pairs = zip(losses, others, strict=True)
    return max((abs(a - b) / abs(a) for a, b in pairs if a == a), default=0.0)


def assert_training_is_the_same(case: Case) -> None:
    """Train balanced and not, and compare."""
    by_rank = run_ranks(balanced_and_not, case.world_size, case)
    for found in by_rank:
        assert found.forwards == []
        assert found.gradients <= 1, found
        assert found.losses <= LOSSES, found
        assert found.replicas > 0, "nothing was tested"
    # A layer has them from the layer before, on its rank.
    if case.balance.get("strategy") == "libra" and "pp" not in case.settings:
        assert any(found.hits > 0 for found in by_rank)
