"""Tests here need Transformer Engine on their path; its twin runs it on the CPU."""

import pytest

from tests.te_on_cpu import enable_te_on_cpu, te_is_here

enable_te_on_cpu()  # before a test imports anything of Megatron


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    if not te_is_here():
        pytest.skip("Transformer Engine is not on the path: tests/te/run.sh puts it there")
