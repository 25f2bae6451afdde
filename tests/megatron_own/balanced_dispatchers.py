"""A plugin for pytest: Megatron's own tests of its token dispatchers on CPU ranks, balanced or not.

`run.py` starts ranks with it. Nothing else of this folder's tests is on their path: there, `tests`
is the checkout's.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from megatron_ext.cpu_platform import enable_cpu_platform

enable_cpu_platform()

# By its path, as `tests` is the checkout's.
inside = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "mcore/inside.py")))

BALANCED = "MEGATRON_OWN_BALANCED"
"""In the environment of ranks whose layers are to be balanced."""
NOTES = "MEGATRON_OWN_NOTES"
"""There, the folder where each rank writes what became of the tests."""

_outcomes: dict[str, str] = {}
_num_replicas = 0


def pytest_configure() -> None:
    """Let the tests believe in CUDA while they are collected, and start gloo in place of NCCL."""
    mock.patch.object(torch.cuda, "is_available", return_value=True).start()
    dist.init_process_group = _with_gloo(dist.init_process_group)
    from megatron.core import utils

    # Megatron's tests compare it with others also where Transformer Engine is not there.
    te_version = utils.get_te_version() or Version("0")
    utils.get_te_version = lambda: te_version


def pytest_collection_finish(session: pytest.Session) -> None:
    """What skips for want of CUDA has been decided; put balanced layers in place if asked to."""
    mock.patch.stopall()
    if BALANCED in os.environ:
        for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
            _balance(module)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test's outcome; what fails before or after its call has failed."""
    if report.when == "call" or not report.passed:
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write what this rank found; Megatron's own end of the session leaves the process group."""
    file = Path(os.environ[NOTES], f"{os.environ['RANK']}.json")
    file.write_text(json.dumps({"outcomes": _outcomes, "replicas": _num_replicas}))


def _with_gloo(init: Any) -> Any:
    def init_with_gloo(*args: Any, **kwargs: Any) -> Any:
        return init(*args, **kwargs | {"backend": "gloo"})

    return init_with_gloo


def _balance(module: Any) -> None:
    """Have a module of tests make balanced layers, and route through their planning."""
    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.moe_layer import BalancedMoELayer

    layers = {}

    def make(config: Any, submodules: Any) -> BalancedMoELayer:
        layer = BalancedMoELayer(config, submodules, balance=BalanceConfig(slots=2, tolerance=0.0))
        inside.watch_plans(layer, _count)
        layers[layer.token_dispatcher] = layer
        return layer

    def permute(dispatcher: Any, hidden: Any, probs: Any, choices: Any) -> Any:
        layer = layers[dispatcher]
        hidden, probs = layer.preprocess(hidden, probs, choices)
        inside.drop_forward(layer)  # What comes after the experts, which these tests leave out.
        hidden, probs = dispatcher.token_dispatch(hidden, probs)
        return dispatcher.dispatch_postprocess(hidden, probs)

    module.MoELayer, module.token_permutation = make, permute


def _count(plan: Any, *_: Any) -> None:
    global _num_replicas
    _num_replicas += int((plan.experts_in_slots >= 0).sum())
