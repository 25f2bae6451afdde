"""Kinds of dispatchers by name (no processes)."""

from __future__ import annotations

from unittest import mock

import pytest

import tests.gpt  # noqa: F401  # first: it enables the CPU platform

from megatron_ext.mcore import dispatcher  # isort: skip


def test_kinds_are_found_by_name() -> None:
    from megatron_ext.methods.libra.local_first import LOCAL_FIRST

    assert dispatcher.dispatcher_kind("megatron") is dispatcher.MEGATRON
    assert dispatcher.dispatcher_kind("local_first") is LOCAL_FIRST


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'ring'; known: local_first, megatron"):
        dispatcher.dispatcher_kind("ring")


def test_without_methods_megatrons_dispatchers_are_left() -> None:
    with mock.patch.object(dispatcher.importlib.util, "find_spec", return_value=None):
        assert dispatcher.dispatcher_kind("megatron") is dispatcher.MEGATRON
        with pytest.raises(ValueError, match=r"'local_first'; known: megatron"):
            dispatcher.dispatcher_kind("local_first")
