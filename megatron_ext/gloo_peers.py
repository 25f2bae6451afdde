"""Ends a rank if a process of another user is its peer in a group over gloo.

gloo takes whoever connects to its port first, and all users of a machine see its ports. A peer's
message may be a pickle, which runs code: torch's and Megatron's collectives of objects send these.
So the kernel is asked whose the other ends are when a group is made, before its first collective.
By then a rank is connected with every other rank of the group, and gloo takes no one else into it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

_WAIT_S = 60.0
"""Seconds in which a rank must take the connection that another rank has made to it."""

_ENDS = "!HH16s16s"
"""How the kernel is told both ends of a connection: two ports, two addresses."""

_TCP_LISTEN = 10

_libc = ctypes.CDLL(None)

_watches = False


class PeerError(RuntimeError):
    """A peer over gloo is a process of another user, or of no user of this machine."""


class _End(NamedTuple):
    """One end of a connection, as the other end sees it where the fields are swapped."""

    family: int
    local: tuple[str, int]
    remote: tuple[str, int]


def watch() -> None:
    """Look at the peers of all gloo groups of this process, now and when one is made.

    A second call changes nothing. Where all ranks are on one machine (LOCAL_WORLD_SIZE is
    WORLD_SIZE), a peer on another machine is an error, too; else such peers are not known.

    Raises:
        PeerError: A group that exists has a peer of another user. The functions that make groups
            raise it, too.
    """
    global _watches
    if _watches or not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    gloo.__init__ = _looking(gloo.__init__)
    for name in ("split_group", "merge_remote_group"):  # They make gloo's groups in C++.
        setattr(dist.ProcessGroup, name, _looking(getattr(dist.ProcessGroup, name)))
    _watches = True
    _require_own_user(_connected(), all_here=False)


def _looking(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_and_look(group: Any, *args: Any, **kwargs: Any) -> Any:
        before = _connected()
        made = make(group, *args, **kwargs)
        now = _connected()
        new = {inode: now[inode] for inode in now.keys() - before}
        all_here = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE")
        if made is None and all_here and len(new) < group.size() - 1:
            raise PeerError(
                f"gloo has {len(new)} connections for a group of {group.size()} ranks, so the "
                "users at their other ends cannot be checked: TORCH_GLOO_LAZY_INIT must be 0"
            )
        _require_own_user(new, all_here=all_here)
        return made

    return make_and_look


def _connected() -> dict[int, int]:
    """Return the sockets that gloo has connected with peers: descriptors by inode."""
    found = {}
    for each in map(int, os.listdir("/proc/self/fd")):
        # gloo alone sets a limit for receiving, and when it takes a socket for a peer's.
        if _option(each, socket.SO_PROTOCOL) == socket.IPPROTO_TCP and _option(
            each, socket.SO_RCVTIMEO
        ):
            with suppress(OSError):  # It may be closed by now.
                found[os.fstat(each).st_ino] = each
    return found


def _option(descriptor: int, option: int) -> int:
    """Return an option of a socket as a number; 0 if the descriptor is none of a socket."""
    # An object of Python's would change the socket where socket.setdefaulttimeout was called.
    value, length = (ctypes.c_int64 * 2)(), ctypes.c_uint32(16)
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, option, value, ctypes.byref(length))
    return value[0] or value[1]


def _require_own_user(sockets: dict[int, int], *, all_here: bool) -> None:
    """Raise `PeerError` unless the other ends of these sockets are of the same user.

    `all_here`: the other ends must be on this machine.
    """
    deadline = time.monotonic() + _WAIT_S
    while sockets:
        waiting = {}
        for inode, descriptor in sockets.items():
            if (end := _end(descriptor)) is None:
                continue
            port = f"port {end.local[1]}"
            ends = end, _End(end.family, end.remote, end.local)
            own, other = map(_user, ends)
            if own is None:  # A kernel without tcp_diag, where the look takes longer.
                own, other = map(_user_in_table, ends)
            if own is None:
                raise PeerError(f"{port}: the kernel does not say whose it is")
            if other is None and (all_here or end.local[0] == end.remote[0]):
                if time.monotonic() > deadline:
                    raise PeerError(f"{port}: the peer over gloo is no process of this machine")
                waiting[inode] = descriptor
            elif other not in (None, own):
                raise PeerError(
                    f"{port}: the peer over gloo is a process of {_name(other)}, not of "
                    f"{_name(own)}"
                )
        sockets = waiting
        if sockets:
            time.sleep(0.01)
            # gloo closes those whose other end was closed.
            now = _connected()
            sockets = {inode: now[inode] for inode in sockets.keys() & now}


def _end(descriptor: int) -> _End | None:
    """Return a connected socket's end; None if it is closed. gloo's sockets never block."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
        return _End(each.family, each.getsockname()[:2], each.getpeername()[:2])
    return None


def _user(end: _End) -> int | None:
    """Ask the kernel for the user of an end; None if no process has it (`man 7 sock_diag`)."""
    packed = [socket.inet_pton(end.family, host.partition("%")[0]) for host, _ in end[1:]]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.send(
            struct.pack("=IHHII", 72, 20, 1, 0, 0)  # SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
            + struct.pack("=BBHI", end.family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
            + struct.pack(_ENDS, end.local[1], end.remote[1], *packed)
            + struct.pack("=IQ", 0, 0xFFFFFFFFFFFFFFFF)
        )
        answer = kernel.recv(4096)
    if struct.unpack_from("=H", answer, 4) != (20,):  # Else an error: there is no such end.
        return None
    state, user, inode = struct.unpack_from("=xB62xII", answer, 16)
    # Without an inode no process has taken the connection yet, or none has it any more.
    return user if inode and state != _TCP_LISTEN else None


def _user_in_table(end: _End) -> int | None:
    """Return the same from the kernel's table of connections (`man 5 proc`)."""

    def place(address: tuple[str, int]) -> str:
        packed = socket.inet_pton(end.family, address[0].partition("%")[0])
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"

    wanted = [place(end.local), place(end.remote)]
    name = "tcp6" if end.family == socket.AF_INET6 else "tcp"
    with suppress(OSError), Path("/proc/self/net", name).open() as table:
        for fields in map(str.split, table):
            if fields[1:3] == wanted and int(fields[9]):
                return int(fields[7])
    return None


def _name(user: int) -> str:
    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
