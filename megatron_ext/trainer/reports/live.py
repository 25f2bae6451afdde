"""Serves the page of runs that go on; the page asks for newer data every few seconds.

Whoever can reach the address can read the runs. On this machine's own address that is whoever works
on it, so web pages that a browser has open must not: requests that name another host are refused,
as a page elsewhere may have its own name point here. Any other address asks for a token.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from megatron_ext.files.json_files import json_text
from megatron_ext.trainer.reports.page import CONTENT_POLICY, Page, page_html
from megatron_ext.trainer.reports.read import read_runs, run_files
from megatron_ext.trainer.reports.run_page import run_page

SECONDS = 5
"""How often a page asks for newer data."""

_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY.format(whom="'self'") + "; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LivePage:
    """The page of some runs, read anew when one of their files has changed.

    Args:
        folders: Run directories.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._lock = Lock()  # Several browsers may ask at once.
        self._version = ""
        self._page: Page | None = None

    def get(self) -> tuple[str, Page]:
        """Return the page and the version of its data."""
        with self._lock:
            stats = [file.stat() for folder in self._folders for file in run_files(folder)]
            version = "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in stats)
            if self._page is None or version != self._version:
                self._page, self._version = run_page(read_runs(self._folders)), version
            return self._version, self._page


def make_server(page: LivePage, address: str, port: int, token: str | None) -> ThreadingHTTPServer:
    """Return a server that is bound and does not serve yet.

    Args:
        page: What it serves.
        address: IP address to listen on.
        port: Port to listen on; 0 for any that is free.
        token: Word that requests must bring as `?token=`; None for none.

    Raises:
        ValueError: The address is not an IP address, or not this machine's own and without a token.
        OSError: The port is not to be had.
    """
    try:
        own = ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise ValueError(f"--address {address} is no IP address") from None
    if not own and not token:
        raise ValueError(
            f"--address {address} is reached from other machines, which needs --token WORD"
        )

    class Handler(_Handler):
        served, wanted, any_host = page, token, not own

    return ThreadingHTTPServer((address, port), Handler)


class _Handler(BaseHTTPRequestHandler):
    served: LivePage
    wanted: str | None
    any_host: bool

    def do_GET(self) -> None:
        """Answer with the page, or with its data if they are newer than what the asker has."""
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if not self.any_host and not _is_here(self.headers.get("Host", "")):
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "not this machine's name\n")
        elif self.wanted and not _same(query.get("token", [""])[0], self.wanted):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "the token is missing or wrong\n")
        elif asked.path == "/":
            version, page = self.served.get()
            text = page_html(page, version=version, live_seconds=SECONDS)
            self._answer(HTTPStatus.OK, "text/html", text)
        elif asked.path == "/data.json":
            version, page = self.served.get()
            if query.get("have") == [version]:
                self._answer(HTTPStatus.NO_CONTENT, "text/plain", "")
                return
            names = ("title", "top", "bottom", "data")
            fresh = {"version": version} | {name: getattr(page, name) for name in names}
            self._answer(HTTPStatus.OK, "application/json", json_text(fresh))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Stay silent: a line for every request would hide the address."""


def _is_here(host: str) -> bool:
    """Whether a header `Host` names this machine itself; a tunnel may have another port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), wanted.encode())
