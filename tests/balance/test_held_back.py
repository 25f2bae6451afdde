"""Gradients that wait for the replicas' part."""

from __future__ import annotations

import pytest
import torch

from megatron_ext.balance import held_back


def test_a_call_waits_until_its_gradient_is_complete() -> None:
    held, free = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    calls: list[str] = []
    held_back.hold_back([held])
    held_back.call_when_complete(held, lambda: calls.append("held"))
    held_back.call_when_complete(free, lambda: calls.append("free"))
    assert calls == ["free"]
    held_back.let_go([held, free])
    assert calls == ["free", "held"]
    held_back.call_when_complete(held, lambda: calls.append("again"))
    assert calls == ["free", "held", "again"]
    held_back.require_complete()


def test_gradients_held_back_at_the_end_of_a_step_are_an_error_once() -> None:
    held_back.hold_back([torch.nn.Parameter(torch.zeros(2)) for _ in range(3)])
    with pytest.raises(RuntimeError, match=r"gradients of 3 expert weights lack .*replicas"):
        held_back.require_complete()
    held_back.require_complete()


def test_an_aborted_step_is_forgotten() -> None:
    held_back.hold_back([torch.nn.Parameter(torch.zeros(2))])
    held_back.forget()
    held_back.require_complete()
