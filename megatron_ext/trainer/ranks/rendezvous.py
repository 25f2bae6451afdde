"""Where the machines of a run find each other: torch's c10d rendezvous, less open.

torch's own has two weaknesses that anyone who reaches the first machine can use: its stores listen
on every interface, and the agents unpickle what they find in one of them. Here a store listens only
on the address that the machines were told to meet at, or on a machine's own address towards it, and
agents unpickle only what was signed with the run's secret.

Nothing else in the stores is signed, and nothing is secret: whoever reaches them can end a run or
lead its ranks to another address. So the network between the machines has to be trusted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

NAME = "megatron_ext"
"""Name of this rendezvous for torchrun (`--rdzv-backend`)."""

_DEFAULT_PORT = 29500

SECRET = "RDZV_SECRET"
"""In the environment: what all agents of a run know, and nobody else. Arguments could be read by
all users of a machine, and torch writes a run's id into its store."""

_JOIN_TIMEOUT = timedelta(minutes=10)
"""How long a machine waits for the others, as long as torch's own rendezvous does."""


def create_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return this machine's side of the rendezvous: a factory for torch's registry.

    The machine that has the endpoint's address holds the store.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=_DEFAULT_PORT)
    store = _store_at(host, port)
    return _BoundRendezvous.from_backend(
        params.run_id,
        store,
        _SignedBackend(store, params.run_id, os.environ[SECRET]),
        params.min_nodes,
        params.max_nodes,
        params.local_addr or _own_address_towards(host, port),
    )


class _BoundRendezvous(DynamicRendezvousHandler):
    """Also makes the store in which the ranks meet, a new one for each attempt.

    torch keeps the first one. There ranks that start again find the addresses of those before.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return _listening_store(master_addr, master_port)


class _SignedBackend(RendezvousBackend):
    """Keeps the state of a rendezvous in a store, and takes only what its own agents wrote.

    Args:
        store: Where it is kept.
        run_id: By this name.
        secret: What all agents know, and nobody else.
    """

    def __init__(self, store: Store, run_id: str, secret: str) -> None:
        self._secret = secret.encode()
        self._backend = C10dRendezvousBackend(store, run_id)

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return found and (self._opened(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        kept = self._backend.set_state(self._signature(state) + state, token)
        return kept and (self._opened(kept[0]), *kept[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, "sha256")

    def _opened(self, signed: bytes) -> bytes:
        size = hashlib.sha256().digest_size
        signature, state = signed[:size], signed[size:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError("what the machines share was not written by this run")
        return state


def _store_at(host: str, port: int) -> TCPStore:
    """Return the store of all machines: it is here if the host's address is this machine's."""
    try:
        store = _listening_store(host, port)
    except OSError as error:
        # Not this machine's address, or another agent of this machine was first.
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        return TCPStore(host, port, is_master=False, timeout=_JOIN_TIMEOUT)
    return store


def _listening_store(host: str, port: int) -> TCPStore:
    """Return a new store that listens on the address of `host` only; port 0 takes a free one."""
    family, *_, address = _resolve(host, port)
    listener = socket.create_server(address, family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=_JOIN_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _own_address_towards(host: str, port: int) -> str:
    """Return the address under which this machine sends to a host, and so can be reached by it."""
    family, *_, address = _resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
        unconnected.connect(address)  # Sends nothing.
        return str(unconnected.getsockname()[0])


def _resolve(host: str, port: int) -> Any:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
