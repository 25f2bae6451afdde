"""Runs a training program of Megatron's with its MoE layers balanced; the program stays as it is.

Megatron's own console, TensorBoard and W&B show metrics of balancing, beside the router's losses.
On CPU ranks, `cpu_platform.py` and this file answer the CUDA calls of Megatron's training loop.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.config import BalanceConfig
from megatron_ext.cpu_platform import enable_cpu_platform

if TYPE_CHECKING:
    from megatron_ext.mcore.step_metrics import StepMetrics

CONSOLE = (
    "moe/avg_overload_factor_routed",
    "moe/avg_overload_factor",
    "moe/max_overload_factor",
    "moe/max_cum_overload_factor",
    "balance/replicas",
)
"""Metrics on Megatron's console; its logs have all metrics (`telemetry/names.py`).
The console's numbers are means over the iterations since its last line."""


def run(
    script: Path, words: list[str], balance: BalanceConfig | None, run_dir: str | None = None
) -> None:
    """Run a program, as Megatron-LM's `pretrain_gpt.py`, as its own `__main__`.

    `words` are its command line. Without `balance` the layers stay Megatron's own. Into `run_dir`
    go the steps, for `megatron-ext report`.
    """
    # As Python does for a script; a checkout of Megatron-LM has its `megatron` there.
    sys.path.insert(0, str(script.resolve().parent))
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        enable_cpu_platform()
    if importlib.util.find_spec("megatron.training") is not None:
        # Megatron's start would run `make`, and a wheel brings the library without a Makefile.
        utils = importlib.import_module("megatron.core.datasets.utils")
        if not Path(str(utils.__file__)).with_name("Makefile").exists():
            utils.compile_helpers = lambda: None  # type: ignore[attr-defined]
        if not has_cuda:
            _train_without_cuda()
        if balance is not None:
            _check_arguments(balance)
    if balance is not None:
        from megatron_ext.mcore.models import balance_models
        from megatron_ext.mcore.step_metrics import StepMetrics

        steps = StepMetrics((), run_dir=run_dir)
        if importlib.util.find_spec("megatron.training") is not None:
            _report_by_megatron(steps)
        balance_models(balance, steps.watch)
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
    if not has_cuda and torch.distributed.is_initialized():
        # Megatron leaves its groups, and a thread of theirs may abort a process that ends.
        torch.distributed.destroy_process_group()


def _train_without_cuda() -> None:
    """Answer the CUDA calls of Megatron's training loop beside those of Megatron-Core."""
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
        # A program may change its arguments before it makes a config of them. What Megatron or
        # balancing refuses then is reported when the model is built.
        with suppress(Exception):
            config = arguments.core_transformer_config_from_args(args)
        if config is not None:
            check(config, balance)
        set_args(args)

    home.set_args = check_and_set


def _report_by_megatron(steps: StepMetrics) -> None:
    """Let Megatron's training loop report the steps beside the router's losses."""
    tracking = "megatron.core.transformer.moe.moe_logging"
    owner: Any
    if importlib.util.find_spec(tracking):
        owner, name = importlib.import_module(tracking).MoEMetricsTracker, "report"
    else:  # Before 0.18.
        owner, name = importlib.import_module("megatron.training.training"), "track_moe_metrics"
    setattr(owner, name, _with_metrics(getattr(owner, name), steps))


def _with_metrics(report: Callable[..., Any], steps: StepMetrics) -> Callable[..., Any]:
    """Megatron's report of its MoE metrics at the end of a step, with those of balancing."""

    @functools.wraps(report)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(report).bind(*args, **kwargs).arguments
        iteration, writer, wandb = (
            given.get(name) for name in ("iteration", "writer", "wandb_writer")
        )
        tier = "detailed" if given.get("per_layer_logging") else "brief"
        metrics = steps.take(tier=tier, step=iteration)
        if not (metrics or steps.has_uncounted):
            _warn_of_no_layers()
        if writer is not None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log(metrics, iteration)
        if (totals := given.get("total_loss_dict")) is not None:
            # On the device of Megatron's own losses, which its loop adds these to.
            device = "cuda" if torch.cuda.is_available() else "cpu"
            for name in [each for each in CONSOLE if each in metrics]:
                totals[name] = totals.get(name, 0) + torch.tensor(metrics[name], device=device)
        return report(*args, **kwargs)

    return reporting


@functools.cache
def _warn_of_no_layers() -> None:
    """Warn once, on one rank, that no layer of any rank has trained balanced."""
    from megatron_ext.mcore.models import MODELS

    if torch.distributed.get_rank() == 0:
        names = ", ".join(name for _, name in MODELS)
        warnings.warn(
            f"nothing is balanced: this program has trained no MoE layers in a model of {names}; "
            "balance the specs of other models with megatron_ext.balance_spec",
            stacklevel=2,
        )
