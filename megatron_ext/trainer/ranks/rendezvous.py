"""Lets the machines of a run find each other: torch's c10d rendezvous, less open.

torch's own rendezvous has two weaknesses for every process that reaches the first machine: its
stores listen on every interface, and its agents unpickle a store's contents. Here a store listens
only on the address at which the machines meet, or on a machine's own address towards that address,
and agents unpickle only contents that are signed with the run's secret.

Nothing else in the stores is signed, and nothing is secret: every process that reaches the stores
can end a run or lead its ranks to another address. So the network between the machines must be
trusted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    Token,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from megatron_ext.trainer.ranks.addresses import JOIN_TIMEOUT, own_address_towards, resolve

NAME = "megatron_ext"
"""Name of this rendezvous for torchrun (`--rdzv-backend`)."""

_DEFAULT_PORT = 29500

SECRET = "RDZV_SECRET"
"""In the environment: what all agents of a run know, and nobody else. Arguments could be read by
all users of a machine, and torch writes a run's id into its store."""

_ANSWER_TIMEOUT = timedelta(minutes=1)
"""How long another agent of this machine may take to answer."""

LOST_PATIENCE_S = 10.0
"""Seconds that ranks may go on where the store of all machines is gone, to end by themselves."""

_GAVE_UP = "megatron_ext.gave_up"
"""In the store: the machine for which the run is over though it is not finished, if one is."""


def create_handler(params: RendezvousParameters) -> BoundRendezvous:
    """Return this machine's side of the rendezvous: a factory for torch's registry.

    The machine that has the endpoint's address holds the store.

    Raises:
        RendezvousError: The machines cannot meet there; the message says where, and why.
    """
    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=_DEFAULT_PORT)
    try:
        if params.max_nodes > 1:
            _check_reachable(host, port)
        store = _store_at(host, port)
        address = params.local_addr or own_address_towards(host, port)
    except OSError as error:
        raise _no_meeting(host, port, error.strerror or str(error)) from error
    return BoundRendezvous.from_backend(
        params.run_id,
        store,
        _SignedBackend(store, params.run_id, os.environ[SECRET]),
        params.min_nodes,
        params.max_nodes,
        address,
    )


class BoundRendezvous(DynamicRendezvousHandler):
    """Also makes the store in which the ranks meet, and lets a machine end the run for all.

    The store is a new one for each attempt. torch keeps the first one, where ranks that start again
    find the addresses of those before.
    """

    _store: TCPStore
    _lost_at: float | None = None
    """When the store was found to be gone."""

    def give_up(self) -> None:
        """Have the agents of all machines end the run; each learns it within seconds.

        torch closes the rendezvous when an agent ends, which the others notice only when they start
        ranks again. Ranks that wait for those of this machine may do so for long.
        """
        with suppress(RuntimeError):  # Where the store is gone, so is the run.
            self._store.set(_GAVE_UP, socket.gethostname())

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler`."""
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        try:
            return super().next_rendezvous()
        except RendezvousClosedError:
            raise _ended(self._who_gave_up() or "another machine") from None
        except RendezvousTimeoutError:
            raise RendezvousTimeoutError(
                f"not all machines came to {_place(self._store)} in time"
            ) from None

    def num_nodes_waiting(self) -> int:
        """See `RendezvousHandler`; torch asks again and again while ranks run."""
        try:
            # A machine that is done before others closes the rendezvous, too: that ends nobody.
            if self.is_closed() and (host := self._who_gave_up()):
                raise _ended(host)
            return super().num_nodes_waiting()
        except RendezvousConnectionError:
            # The machine of the store may have ended a little earlier.
            self._lost_at = self._lost_at or time.monotonic()
            if time.monotonic() > self._lost_at + LOST_PATIENCE_S:
                raise
            return 0

    def _who_gave_up(self) -> str | None:
        try:
            if self._store.check([_GAVE_UP]):
                return self._store.get(_GAVE_UP).decode(errors="replace")
        except RuntimeError:
            raise _lost(self._store) from None
        return None

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return _listening_store(master_addr, master_port)


class _SignedBackend(RendezvousBackend):
    """Keeps the state of a rendezvous in a store, and takes only what holders of a secret wrote."""

    def __init__(self, store: TCPStore, run_id: str, secret: str) -> None:
        self._secret = secret.encode()
        self._store = store
        self._backend = C10dRendezvousBackend(store, run_id)

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        with self._is_there():
            found = self._backend.get_state()
        return found and (self._opened(found[0]), found[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        with self._is_there():
            kept = self._backend.set_state(self._signature(state) + state, token)
        return kept and (self._opened(kept[0]), *kept[1:])

    @contextmanager
    def _is_there(self) -> Iterator[None]:
        try:
            yield
        except RendezvousConnectionError:
            raise _lost(self._store) from None

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._secret, state, "sha256")

    def _opened(self, signed: bytes) -> bytes:
        size = hashlib.sha256().digest_size
        signature, state = signed[:size], signed[size:]
        if not hmac.compare_digest(signature, self._signature(state)):
            raise RendezvousStateError("what the machines share was not written by this run")
        return state


def _place(store: TCPStore) -> str:
    return f"{store.host}:{store.port}"


def _ended(host: str) -> RendezvousClosedError:
    return RendezvousClosedError(f"{host} has ended the run, and says why")


def _lost(store: TCPStore) -> RendezvousConnectionError:
    return RendezvousConnectionError(
        f"the machine at {_place(store)}, where all meet, has ended the run, or is lost"
    )


def _no_meeting(host: str, port: int, why: str) -> RendezvousConnectionError:
    return RendezvousConnectionError(
        f"the machines cannot meet at {host}:{port} (MASTER_ADDR:MASTER_PORT): {why}"
    )


def _check_reachable(host: str, port: int) -> None:
    """Check that a name is not this machine's own, for itself alone, as Debian sets names up.

    A loopback address itself, and its name `localhost`, are for machines that are one.
    """
    address = resolve(host, port)[1][0]
    if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        raise RendezvousError(
            f"MASTER_ADDR ({host}) is {address} on this machine, where no other reaches it (see "
            "/etc/hosts): set MASTER_ADDR, on all machines, to an address that they reach"
        )


def _store_at(host: str, port: int) -> TCPStore:
    """Return the store of all machines: it is here if the host's address is this machine's."""
    try:
        return _listening_store(host, port)
    except OSError as error:
        # Not this machine's address, or another agent of this machine was first.
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
        is_taken = error.errno == errno.EADDRINUSE
    if store := _store_of_another(host, port, _ANSWER_TIMEOUT if is_taken else JOIN_TIMEOUT):
        return store
    if is_taken:
        why = "another program of this machine has the port, so set MASTER_PORT to another"
    else:
        why = "no agent answers: is the run started there, and do firewalls let the port through?"
    raise _no_meeting(host, port, why)


def _store_of_another(host: str, port: int, timeout: timedelta) -> TCPStore | None:
    """Return the store of another agent, which may start later; None if there is none in time."""
    found: list[TCPStore] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(TCPStore(host, port, is_master=False, timeout=JOIN_TIMEOUT))

    # torch waits without end, and deaf to signals, for an answer of a program that is no store.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    return found[0] if found else None


def _listening_store(host: str, port: int) -> TCPStore:
    """Return a new store that listens on the address of `host` only; port 0 takes a free one."""
    family, address = resolve(host, port)
    listener = socket.create_server(address, family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )
