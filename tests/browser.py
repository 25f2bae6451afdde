"""Pages opened in a headless Chromium, which `tests/run.sh` installs.

    with browser.opened(file_or_address) as page:
        page.click("text=quota")

`page` is Playwright's (https://playwright.dev/python/docs/api/class-page). Leaving the block fails
if the page's console showed an error, a script threw, or a request went to anything but the page's
own origin.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium in PATH")
"""For tests that open pages."""

_SECONDS = 60
"""How long a page may take for what a test waits for: far more than it should on a busy machine."""


@contextlib.contextmanager
def opened(
    place: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False
) -> Iterator[Page]:
    """Open a page and close it; it had no errors.

    Args:
        place: A file, or the address where a page is served.
        width: Of the window, in pixels of the page.
        height: Of the window, in pixels of the page.
        dark: Whether the reader prefers dark pages.

    Raises:
        AssertionError: The page said errors, or asked for something elsewhere.
    """
    address = place.resolve().as_uri() if isinstance(place, Path) else place
    complaints: list[str] = []

    def note_request(request: Request) -> None:
        there = urlsplit(request.url)
        if there.scheme not in ("data", "blob") and there[:2] != urlsplit(address)[:2]:
            complaints.append(f"the page asks for {request.url}")

    with _chromium() as browser:
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        page.set_default_timeout(_SECONDS * 1000)
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", note_request)
        page.goto(address)
        yield page
        if complaints:
            raise AssertionError(f"{address}: {'; '.join(complaints)}")


def cut_off(page: Page) -> list[str]:
    """Return what a reader does not see at the window's width: text of charts, and what scrolls."""
    return page.evaluate(_CUT_OFF)


_CUT_OFF = """() => {
  const found = [];
  for (const one of document.querySelectorAll("html, body, body *")) {
    const isPage = one === document.documentElement;
    const scrolls = isPage || getComputedStyle(one).overflowX !== "visible";
    if (scrolls && one.scrollWidth > one.clientWidth + 1)
      found.push(`${one.tagName}: ${one.scrollWidth} wide in ${one.clientWidth}`);
  }
  for (const text of document.querySelectorAll("figure svg text")) {
    const figure = text.closest("figure");
    const [inside, frame] = [text, figure].map((each) => each.getBoundingClientRect());
    const beyond = Math.max(frame.left - inside.left, inside.right - frame.right);
    if (beyond > 1 || inside.bottom > frame.bottom + 1)
      found.push(`${figure.ariaLabel}: ${text.textContent}`);
  }
  return found;
}"""


@contextlib.contextmanager
def _chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            # As root, Chromium runs without its sandbox or not at all.
            args=["--no-sandbox"],
        )
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder's files on this machine; gives the address, which ends with a slash."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=os.fspath(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
