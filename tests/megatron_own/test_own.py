"""Megatron-LM's own programs do with balanced layers what they do with Megatron's.

Layer 4, where `MEGATRON_LM` names a checkout (`run.py`): neither Megatron's tests nor
`pretrain_gpt.py` are in its wheels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_own.run import CHECKOUT, dispatcher_tests, pretrain_gpt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]


def test_megatrons_tests_of_its_dispatchers_end_as_without_balancing() -> None:
    stock, none = dispatcher_tests(Path(str(CHECKOUT)), balanced=False)
    balanced, replicas = dispatcher_tests(Path(str(CHECKOUT)), balanced=True)
    assert balanced == stock
    assert list(stock.values()).count("passed") >= 8
    assert none == 0 < replicas


def test_pretrain_gpt_has_the_losses_that_it_has_without_balancing() -> None:
    stock, none = pretrain_gpt(Path(str(CHECKOUT)), balanced=False)
    balanced, replicas = pretrain_gpt(Path(str(CHECKOUT)), balanced=True)
    assert len(stock) >= 4
    assert balanced == pytest.approx(stock, rel=1e-5)
    assert none == []
    assert max(replicas) > 0
