"""Whatever a stranger puts under a name: it is opened as a regular file, or not at all."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ext.files import opening
from megatron_ext.files.arrays import open_arrays, values_of, write_arrays
from megatron_ext.files.locks import held
from megatron_ext.files.opening import (
    NotRegularError,
    check_ours,
    is_ours,
    names_in,
    open_own,
    open_regular,
    read_regular,
    whole_lines,
)
from megatron_ext.files.whole import write_whole

SECRET = "mine\n"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of this user that no folder of another may have read or written."""
    file = tmp_path / "precious"
    file.write_text(SECRET)
    return file


def _socket(path: Path, _: Path) -> None:
    # Its path may be longer than a socket's address.
    descriptor = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{descriptor}/{path.name}")
    os.close(descriptor)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a link": lambda path, precious: path.symlink_to(precious),
    "a dangling link": lambda path, _: path.symlink_to("nowhere"),
    "a link in a circle": lambda path, _: path.symlink_to(path.name),
    "a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a socket": _socket,
    "a folder": lambda path, _: path.mkdir(),
}
"""By what a name leads to: how it is made."""


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_neither_waited_for_nor_followed(
    kind: str, precious: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "name"
    KINDS[kind](file, precious)
    for opened in (open_regular, open_own, read_regular, lambda path: list(whole_lines(path))):
        with pytest.raises(NotRegularError, match=rf"{file}: not a file but a \w+"):
            opened(file)
    assert os.listdir(tmp_path / "run") == ["name"]
    assert precious.read_text() == SECRET


@pytest.mark.parametrize("kind", KINDS.keys() - {"a folder"})
def test_what_is_written_replaces_it(kind: str, precious: Path, tmp_path: Path) -> None:
    """Under its own name, and under the name that it has until it is whole."""
    import torch

    file, arrays = tmp_path / "text", tmp_path / "arrays.npz"
    for path in (file, tmp_path / ".text.partial", arrays):
        KINDS[kind](path, precious)
    KINDS[kind](tmp_path / f".arrays.npz.{os.getpid()}.partial", precious)
    write_whole(file, ["whole"])
    write_arrays(arrays, {"load": torch.ones(2)}, overwrite=True)
    assert read_regular(file) == b"whole"
    with open_arrays(arrays, ["load"]) as archive:
        assert values_of(arrays, archive, "load").tolist() == [1.0, 1.0]
    assert precious.read_text() == SECRET


def test_a_disk_that_fails_is_one_line_with_the_file(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield "one"
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "text"
    with pytest.raises(OSError, match=rf"No space left on device: '{file}'"):
        write_whole(file, lines())
    assert list(tmp_path.iterdir()) == []
    failing = Path("/proc/self/mem")  # A regular file whose first page is in no memory.
    error = pytest.raises(ValueError, match="/proc/self/mem cannot be read: Input/output error")
    with error, open_arrays(failing, ["load"]):
        pass


def test_a_hard_link_is_not_written(precious: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.link(precious, tmp_path / "run" / ".lock")
    assert read_regular(tmp_path / "run" / ".lock") == SECRET.encode()
    with (
        pytest.raises(NotRegularError, match="its other name, a hard link"),
        held(tmp_path / "run"),
    ):
        raise AssertionError("it was held")
    assert precious.read_text() == SECRET


def test_links_of_caches_are_followed_where_they_are_harmless(
    precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(precious)
    assert read_regular(link, follow=True) == SECRET.encode()
    # Another user's to another user's own file, and to a file of mine.
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "lstat", _owned_by(os.lstat, owner + 2))
    with pytest.raises(NotRegularError, match=rf"a link of another user \({owner + 2}\)"):
        read_regular(link, follow=True)
    monkeypatch.setattr(os, "stat", _owned_by(os.stat, owner + 2))
    assert read_regular(link, follow=True) == SECRET.encode()
    link.unlink()
    os.mkfifo(tmp_path / "pipe")
    link.symlink_to("pipe")
    with pytest.raises(NotRegularError, match="not a file but a pipe"):
        open_regular(link, follow=True)


def _owned_by(look: Callable[..., os.stat_result], owner: int) -> Callable[..., os.stat_result]:
    """`os.stat` or `os.lstat`, with another owner of what it looks at."""

    def looked(*given: object, **named: object) -> os.stat_result:
        values = list(look(*given, **named))
        values[4] = owner
        return os.stat_result(values)

    return looked


def test_files_without_end_are_read_up_to_a_bound(tmp_path: Path) -> None:
    file = tmp_path / "sparse"
    file.write_bytes(b"a\nb\n")
    assert list(whole_lines(file)) == [b"a\n", b"b\n"]
    assert list(whole_lines(file, 2)) == [b"b\n"]
    os.truncate(file, 1 << 40)  # Zeros, which take no room.
    with pytest.raises(NotRegularError, match="a line of more than 1,000 bytes"):
        list(whole_lines(file, most_bytes=1000))
    with pytest.raises(NotRegularError, match="more than 1,000 bytes"):
        read_regular(file, most_bytes=1000)


def test_a_folder_is_not_looked_into_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").touch()
    (tmp_path / "link").symlink_to("real")
    assert names_in(tmp_path / "real") == ["file"]
    assert names_in(tmp_path / "absent") == []
    for name in ("link", "real/file"):
        with pytest.raises(NotRegularError, match=f"{name}: not a folder, or a link"):
            names_in(tmp_path / name)


def test_a_folder_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, scratch = tmp_path / "run", tmp_path / "scratch"
    (scratch / "logs").mkdir(parents=True)
    (scratch / "logs" / "link").symlink_to("nowhere")  # Files below have checks of their own.
    run_dir.symlink_to(scratch)  # The user's word, not that of a folder.
    check_ours(run_dir)
    scratch.chmod(0o2775)
    check_ours(run_dir)  # The group is trusted.
    for mode in (0o777, 0o1777):
        scratch.chmod(mode)
        with pytest.raises(
            PermissionError, match=f"every user may write in {run_dir}: .* chmod o-w"
        ):
            check_ours(run_dir)
    # A file system without modes, and one that gives all files to one user.
    monkeypatch.setattr(opening, "_made_in", lambda _: scratch.stat())
    check_ours(run_dir)
    scratch.chmod(0o755)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    check_ours(run_dir)
    assert is_ours(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_folder_of_another_user_is_not_this_users(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.chown(tmp_path / "logs", 12345, -1)
    assert is_ours(tmp_path)
    with pytest.raises(PermissionError, match=r"logs belongs to another user \(12345\)"):
        check_ours(tmp_path)
    os.chown(tmp_path, 12345, -1)
    assert not is_ours(tmp_path)
    with pytest.raises(PermissionError, match=rf"{tmp_path} belongs to another user \(12345\)"):
        check_ours(tmp_path)
    with pytest.raises(PermissionError), held(tmp_path):
        raise AssertionError("it was held")
    assert os.listdir(tmp_path) == ["logs"]


def test_a_folder_with_links_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path.parent)
    with pytest.raises(PermissionError, match="checkpoints is a link: only the path of the whole"):
        check_ours(tmp_path)
