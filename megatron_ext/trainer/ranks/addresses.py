"""Addresses of the machines of a run, and the interfaces that have them."""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta
from typing import Any

import psutil

logger = logging.getLogger(__name__)

JOIN_TIMEOUT = timedelta(minutes=10)
"""How long a machine waits for the others, as long as torch's own rendezvous does."""

_RETRY_S = 1.0
"""Seconds after which a name is looked up again."""


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the address of a socket of this host.

    A name may come to be known only after its machine has started, as in Kubernetes: it is looked
    up until `JOIN_TIMEOUT` is over.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    waits = False
    while True:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return family, address
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise
            if not waits:
                logger.warning("waiting for an address of %s: %s", host, error.strerror)
            waits = True
        time.sleep(_RETRY_S)


def own_address_towards(host: str, port: int) -> str:
    """Return the address from which this machine sends to a host, and so can be reached by it."""
    family, address = resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as unconnected:
        unconnected.connect(address)  # Sends nothing.
        return str(unconnected.getsockname()[0])


def interface_towards(host: str, port: int) -> str | None:
    """Return the interface that has this machine's own address towards a host, if one has it."""
    own = own_address_towards(host, port)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == own for each in addresses):
            return str(name)
    return None
