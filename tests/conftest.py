"""What all tests share: repeatable generated examples, the rule for tests that need a GPU, notes of
what works, and a process that balancing leaves as it was.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.compatibility import Notes, note_options

_UNTIL = float(os.environ.pop("MEGATRON_EXT_TESTS_UNTIL", "inf"))
"""Seconds since 1970. Tests of what tests do have all the time they need."""

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Note what becomes of tests that show what works, and heed signals."""
    # A shell has what runs in its background ignore them, and what a test starts would, too.
    for each in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    config.pluginmanager.register(Notes())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put last what may be; skip `gpu` tests that this machine cannot run, unless it is said to
    have as many GPUs.
    """
    note_options(items)
    if last := tuple(os.environ.get("MEGATRON_EXT_TESTS_LAST", "").split()):
        items.sort(key=lambda item: item.nodeid.startswith(last))
    said = int(os.environ.get("MEGATRON_EXT_REQUIRE_GPU", "0"))
    # Not `device_count()` alone: the CPU platform, which tests install, answers 1 to that.
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None:
            needed = marker.kwargs.get("n", 1)
            if devices < needed and said < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip what is left once the time is over."""
    if time.time() > _UNTIL:
        pytest.skip("the time for the tests was over: not run")


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Take back what `balance_spec` and `balance_models` have done to the process of the tests."""
    yield
    if hooks := sys.modules.get("megatron_ext.mcore.process_hooks"):
        hooks.uninstall()
