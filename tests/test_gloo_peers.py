"""A process of another user is no peer in a group over gloo: the rank ends before a collective.

A peer is a socket here whose owner connects as a rank does. The kernel notes a socket's user when
it is made, so this process makes another user's by being that user for a moment.
"""

from __future__ import annotations

import inspect
import os
import re
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext import gloo_peers
from megatron_ext.gloo_peers import PeerError, watch

OTHER_USER = 65534  # nobody
GLOO: Any = dist.ProcessGroupGloo
HOOKS: Any = [
    (GLOO, "__init__"),
    (dist.ProcessGroup, "split_group"),
    (dist.ProcessGroup, "merge_remote_group"),
]


def _sockets_of(user: int) -> list[socket.socket]:
    """Return one for each sequence number of a group of two ranks."""
    mine = os.geteuid()
    os.seteuid(user)
    try:
        return [socket.socket() for _ in range(2)]
    finally:
        os.seteuid(mine)


def _make_group(init: Any, sockets: list[socket.socket]) -> Any:
    """Make rank 0's group of two; these sockets connect to it, and nothing else does."""
    store, group = dist.HashStore(), GLOO.__new__(GLOO)
    options = GLOO._Options()
    options._devices = [GLOO.create_device(interface="lo")]
    options._timeout = timedelta(seconds=20)
    with ThreadPoolExecutor() as pool:
        made = pool.submit(init, group, store, 0, 2, options)
        store.wait(["0/0"], timedelta(seconds=20))
        address = store.get("0/0")
        # Of two ranks, that with the larger port connects to the other.
        where = re.search(rb"\x02\0(..)\x7f\0\0\x01", address, re.DOTALL)
        assert where is not None
        store.set("0/1", address[: where.start(1)] + b"\xff\xff" + address[where.end(1) :])
        for number, each in enumerate(sockets):
            each.connect(("127.0.0.1", *struct.unpack(">H", where[1])))
            each.sendall(struct.pack("<q", number))
        made.result()
    return group


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sockets of other users")
@pytest.mark.parametrize("is_watched", [True, False], ids=["made", "existing"])
def test_a_peer_of_another_user_ends_the_rank(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch()
    expected = pytest.raises(PeerError, match=r"^port \d+: .* user nobody, not of user root$")
    with ExitStack() as sockets:
        of_stranger = [sockets.enter_context(each) for each in _sockets_of(OTHER_USER)]
        if is_watched:
            with expected:
                _make_group(GLOO.__init__, of_stranger)
            return
        group = _make_group(inspect.unwrap(GLOO.__init__), of_stranger)
        for owner, name in HOOKS:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # Put back at the end.
        monkeypatch.setattr(gloo_peers, "_watches", False)
        with expected:
            watch()
        del group


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sockets of other users")
def test_a_kernel_without_a_way_to_ask_has_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    watch()
    monkeypatch.setattr(gloo_peers, "_user", lambda _: None)
    with ExitStack() as sockets:
        mine = [sockets.enter_context(each) for each in _sockets_of(os.geteuid())]
        assert _make_group(GLOO.__init__, mine).size() == 2
    with ExitStack() as sockets:
        of_stranger = [sockets.enter_context(each) for each in _sockets_of(OTHER_USER)]
        with pytest.raises(PeerError, match="user nobody, not of user root"):
            _make_group(GLOO.__init__, of_stranger)


@pytest.mark.parametrize("all_here", [True, False])
def test_a_peer_of_this_user_is_a_peer(all_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watch()
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")[: 2 if all_here else 1]:
        monkeypatch.setenv(name, "2")
    with ExitStack() as sockets:
        mine = [sockets.enter_context(each) for each in _sockets_of(os.geteuid())]
        assert _make_group(GLOO.__init__, mine).size() == 2


def test_a_peer_on_another_machine_is_refused_where_all_ranks_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = ("10.0.0.1", 1), ("10.0.0.2", 2)
    users = {mine: 0}
    monkeypatch.setattr(gloo_peers, "_end", lambda _: gloo_peers._End(2, mine, theirs))
    for name in "_user", "_user_in_table":
        monkeypatch.setattr(gloo_peers, name, lambda end: users.get(end.local))
    monkeypatch.setattr(gloo_peers, "_WAIT_S", 0.0)
    gloo_peers._require_own_user({7: 3}, all_here=False)
    with pytest.raises(PeerError, match="port 1: the peer over gloo is no process of this mach"):
        gloo_peers._require_own_user({7: 3}, all_here=True)
    users.clear()
    with pytest.raises(PeerError, match="port 1: the kernel does not say whose it is"):
        gloo_peers._require_own_user({7: 3}, all_here=False)


@pytest.mark.parametrize("ask", [gloo_peers._user, gloo_peers._user_in_table])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_kernel_names_the_user_of_an_end(
    host: str, ask: Callable[[gloo_peers._End], int | None]
) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family == socket.AF_INET6 and not Path("/proc/self/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with socket.create_server((host, 0), family=family) as server, socket.socket(family) as one:
        one.connect(server.getsockname())
        end = gloo_peers._end(one.fileno())
        assert end is not None
        other = gloo_peers._End(family, end.remote, end.local)
        assert ask(end) == os.geteuid()
        assert ask(other) is None  # It waits for `accept`.
        with server.accept()[0]:
            assert ask(other) == os.geteuid()
        assert ask(other) is None


def test_connections_that_gloo_makes_later_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    watch()
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    options = GLOO._Options()
    options._devices = [GLOO.create_device(interface="lo", lazy_init=True)]
    with pytest.raises(PeerError, match=r"0 connections .* 2 ranks.*TORCH_GLOO_LAZY_INIT"):
        GLOO(dist.HashStore(), 0, 2, options)


@pytest.mark.parametrize("name", ["split_group", "merge_remote_group"])
def test_groups_that_torch_makes_in_cpp_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real functions crash the process now and then (torch 2.13), so they stay uncalled."""
    looks: list[dict[int, int]] = []
    monkeypatch.setattr(gloo_peers, "_require_own_user", lambda new, **_: looks.append(new))
    for owner, each in HOOKS:
        monkeypatch.setattr(owner, each, inspect.unwrap(getattr(owner, each)))
    monkeypatch.setattr(dist.ProcessGroup, name, lambda group, ranks: f"{group} of {ranks}")
    monkeypatch.setattr(gloo_peers, "_watches", False)
    watch()
    looks.clear()
    assert getattr(dist.ProcessGroup, name)("group", [0]) == "group of [0]"
    assert looks == [{}]
