"""Runs a training program of Megatron's with its MoE layers balanced; the program stays as it is.

Megatron's own console, TensorBoard and W&B show what balancing did, as they show the router's
losses. On CPU ranks, what Megatron's training loop asks of CUDA is answered.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.config import BalanceConfig
from megatron_ext.cpu_platform import enable_cpu_platform

METRICS = ("moe_imbalance_before", "moe_imbalance_after", "moe_replicas")
"""Means over an iteration's microbatches and layers, in Megatron's logs."""


def run(script: Path, words: list[str], balance: BalanceConfig | None) -> None:
    """Run a program as its own `__main__`.

    Args:
        script: The program, as Megatron-LM's `pretrain_gpt.py`.
        words: Its command line.
        balance: What the balancer may do; None leaves the layers Megatron's own.
    """
    # As Python does for a script; a checkout of Megatron-LM has its `megatron` there.
    sys.path.insert(0, str(script.resolve().parent))
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        enable_cpu_platform()
    if importlib.util.find_spec("megatron.training") is not None:
        _keep_compiled_helpers()
        if not has_cuda:
            _train_without_cuda()
        if balance is not None:
            _check_arguments(balance)
            _report_by_megatron()
    if balance is not None:
        from megatron_ext.mcore.models import balance_models

        balance_models(balance, _record_in_megatron)
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
    if not has_cuda and torch.distributed.is_initialized():
        # Megatron leaves its groups, and a thread of theirs may abort a process that ends.
        torch.distributed.destroy_process_group()


def _train_without_cuda() -> None:
    """Answer what Megatron's training loop asks of CUDA beside Megatron-Core."""
    training = importlib.import_module("megatron.training.training")
    home = importlib.import_module("megatron.training.initialize")
    initialize = functools.partial(home.initialize_megatron, allow_no_cuda=True)
    for module in (importlib.import_module("megatron.training"), home, training):
        module.initialize_megatron = initialize  # type: ignore[attr-defined]
    # Before 0.17 it compiles kernels at start, which nothing on a CPU calls.
    if importlib.util.find_spec("megatron.legacy") is not None:
        kernels = importlib.import_module("megatron.legacy.fused_kernels")
        kernels.load = lambda args: None  # type: ignore[attr-defined]


def _check_arguments(balance: BalanceConfig) -> None:
    """Let Megatron's start check its arguments for balancing, before any rank waits for others."""
    from megatron_ext.mcore.check import check

    home: Any = importlib.import_module("megatron.training.global_vars")
    arguments: Any = importlib.import_module("megatron.training.arguments")
    set_args = home.set_args

    def check_and_set(args: Any) -> None:
        config = None
        # A program may change its arguments before it makes a config of them; what Megatron refuses
        # then, and what balancing does, is said when the model is built.
        with suppress(Exception):
            config = arguments.core_transformer_config_from_args(args)
        if config is not None:
            check(config, balance)
        set_args(args)

    home.set_args = check_and_set


def _keep_compiled_helpers() -> None:
    """Let Megatron's start not run `make`, where a wheel brought the library without a Makefile."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    if not Path(str(utils.__file__)).with_name("Makefile").exists():
        utils.compile_helpers = lambda: None  # type: ignore[attr-defined]


def _record_in_megatron(layer: Any) -> None:
    """Let a layer record its `METRICS` where Megatron's router records its losses."""
    record = _recorder()
    num_layers = layer.config.num_layers + (layer.config.mtp_num_layers or 0)

    def observe(report: Any) -> None:
        values = (
            imbalances(home_loads(report.load)),
            imbalances(report.rank_loads_after),
            (report.slots >= 0).sum(),
        )
        for name, value in zip(METRICS, values, strict=True):
            record(name, value, report.layer_number, num_layers)

    layer.observers.append(observe)


def _recorder() -> Callable[..., None]:
    """The function of Megatron that records a layer's value."""
    if tracking := _tracking():
        record: Callable[..., None] = tracking.get_moe_metrics_tracker().record
        return record
    function: Callable[..., None] = importlib.import_module(_UTILS).save_to_aux_losses_tracker
    return function


def _report_by_megatron() -> None:
    """Let Megatron's training loop report `METRICS` beside the router's losses."""
    tracking = _tracking()
    owner: Any = tracking.MoEMetricsTracker if tracking else importlib.import_module(_LOOP)
    name = "report" if tracking else "track_moe_metrics"
    setattr(owner, name, _with_metrics(getattr(owner, name)))


_LOOP = "megatron.training.training"
_UTILS = "megatron.core.transformer.moe.moe_utils"


def _tracking() -> Any:
    """Megatron's module that tracks MoE metrics; None before there was one (0.18)."""
    home = "megatron.core.transformer.moe.moe_logging"
    return importlib.import_module(home) if importlib.util.find_spec(home) else None


def _with_metrics(report: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(report)
    def reporting(*args: Any, track_names: Any = None, **kwargs: Any) -> Any:
        names = None if track_names is None else [*track_names, *METRICS]
        return report(*args, track_names=names, **kwargs)

    return reporting
