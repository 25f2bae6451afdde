"""Pages that do what pages here must not do are noticed, from disk and served."""

from pathlib import Path

import pytest

from tests import browser

pytestmark = browser.needs_chromium

FAULTS = {
    "boom": "<script>throw new Error('boom')</script>",
    "said": "<script>console.error('said')</script>",
    "asks for http://example.invalid/a.png": "<img src='http://example.invalid/a.png'>",
}


def _file(folder: Path, body: str) -> Path:
    file = folder / "page.html"
    # The icon that browsers ask for on their own.
    file.write_text(f"<!DOCTYPE html><link rel=icon href=data:,><h1>Page</h1>{body}")
    return file


def test_a_page_from_disk_and_served(tmp_path: Path) -> None:
    file = _file(
        tmp_path,
        "<script>document.title = matchMedia('(prefers-color-scheme: dark)').matches</script>",
    )
    with browser.opened(file) as page:
        assert page.title() == "false"
        assert page.inner_text("h1") == "Page"
    with (
        browser.served(tmp_path) as address,
        browser.opened(f"{address}page.html", dark=True) as page,
    ):
        assert page.title() == "true"


def test_what_is_cut_off_is_noticed(tmp_path: Path) -> None:
    """Inside of a box that scrolls, beyond the window, and text beyond its chart."""
    wide = "<i style='display:block;width:1300px'>wide</i>"
    text = (
        "<figure aria-label=chart style='width:200px'><svg overflow=visible><text x=190>long</text>"
    )
    for body, found in (
        ("<p>fine</p>", []),
        (f"<div style='overflow-x:auto;width:900px'>{wide}</div>", ["DIV: 1300 wide in 900"]),
        (wide, ["HTML: 1308 wide in 1200"]),
        (f"{text}</svg></figure>", ["chart: long"]),
    ):
        with browser.opened(_file(tmp_path, body)) as page:
            assert browser.cut_off(page) == found


def test_faults_are_noticed(tmp_path: Path) -> None:
    for fault, body in FAULTS.items():
        with pytest.raises(AssertionError, match=fault), browser.opened(_file(tmp_path, body)):
            pass
