"""A checkpoint as files: whether they are all there, whole, unchanged, and whose they are.

A checkpoint of a run has `run.json` and `checksums.json` beside Megatron's files: `metadata.json`,
the table of contents `.metadata`, `common.pt`, and the tensors and objects in `*.distcp`.
Checkpoints that another program wrote have neither; of them the sizes are compared with the table
of contents. Where there are checksums, each file has one.

Problems are said in a line each, which begins with the name of the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from checkpoints_tools.pickles import ForeignClassError, read_object, read_table
from megatron_ext.files.json_files import read_json
from megatron_ext.files.opening import look_at, named, open_regular
from megatron_ext.files.whole import alone_in, sync

RUN_FILE = "run.json"
CHECKSUMS_FILE = "checksums.json"
TABLE_FILE = ".metadata"
KIND_FILE = "metadata.json"
COMMON_FILE = "common.pt"

_FORMAT = "torch_dist"
# Written with the data, it must cost next to nothing: a seventh of the time of a CRC.
_ALGORITHM = "xxh3_128"


@dataclass(frozen=True)
class Checksum:
    """What is known of a file's bytes.

    Attributes:
        num_bytes: Its size.
        digest: XXH3 of 128 bits, in hexadecimal. It notices accidents; it is no signature.
    """

    num_bytes: int
    digest: str


class Hasher:
    """The checksum of bytes that come one after another."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._num_bytes = 0

    def add(self, data: memoryview | bytes) -> None:
        """Add the next bytes."""
        self._hash.update(data)
        self._num_bytes += len(data) if isinstance(data, bytes) else data.nbytes

    def checksum(self) -> Checksum:
        """Return the checksum of the bytes so far."""
        return Checksum(self._num_bytes, self._hash.hexdigest())


def hash_file(path: Path) -> Checksum:
    """Return a file's checksum; reads it piece by piece."""
    with open_regular(path, follow=True) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
        return Checksum(file.tell(), digest)


def write_checksums(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Write a checkpoint's checksums, by name of file."""
    files = {
        name: {"bytes": checksums[name].num_bytes, "hash": checksums[name].digest}
        for name in sorted(checksums)
    }
    text = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=1)
    (folder / CHECKSUMS_FILE).write_text(text + "\n")


def seal(folder: Path, known: Mapping[str, Checksum]) -> None:
    """Complete a checkpoint with its checksums, and have what it holds on the disk.

    Files whose checksums are `known` were hashed when they were written, and are on the disk.
    """
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    others = {name: path for name, path in paths.items() if name not in known}
    hashed = {name: hash_file(path) for name, path in others.items() if path.is_file()}
    write_checksums(folder, {**known, **hashed})
    for path in (*others.values(), folder / CHECKSUMS_FILE, folder):
        sync(path)


def read_checksums(folder: Path) -> dict[str, Checksum] | None:
    """Return a checkpoint's checksums by name of file; None if it has none.

    Raises:
        ValueError: They are damaged, or of another kind.
    """
    if not (folder / CHECKSUMS_FILE).exists():
        return None
    content = _read_json(folder / CHECKSUMS_FILE)
    if (algorithm := content.get("algorithm")) != _ALGORITHM:
        raise ValueError(f"{CHECKSUMS_FILE} has checksums {algorithm!r}, not {_ALGORITHM}")
    try:
        checksums = {
            name: Checksum(int(entry["bytes"]), str(entry["hash"]))
            for name, entry in content["files"].items()
        }
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{CHECKSUMS_FILE} is damaged: {error!r}") from None
    for name in checksums:
        # Else a stranger's list could have any file of this machine read.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{CHECKSUMS_FILE} names a file outside of its folder: {name!r}")
    return checksums


def read_run(folder: Path) -> dict[str, Any]:
    """Return what `run.json` says: step, position in the data, shape of the model.

    Raises:
        ValueError: It is missing or damaged.
    """
    run = _read_json(folder / RUN_FILE)
    positions = {name: run.get(name, 0) for name in ("consumed_samples", "consumed_tokens")}
    for name, number in ({"step": run.get("step")} | positions).items():
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
            raise ValueError(f"{RUN_FILE} is damaged: it has no {name}")
    for name in ("model", "parallel", "settings"):
        if not isinstance(run.get(name, {}), dict):
            raise ValueError(f"{RUN_FILE} is damaged: {name} is no mapping")
    return run


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, whole or damaged, oldest first."""
    folders = (each for each in run_dir.glob("checkpoints/step_*") if each.is_dir())
    return sorted((each for each in folders if _number(each) >= 0), key=_number)


def _number(folder: Path) -> int:
    """Return the step or iteration in a checkpoint's name; -1 of other names, as of a copy."""
    named = re.fullmatch(r"(?:step|iter)_([0-9]+)", folder.name)
    return int(named[1]) if named else -1


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a file that only checkpoints have."""
    return any(
        (folder / name).is_file() for name in (KIND_FILE, TABLE_FILE, RUN_FILE, CHECKSUMS_FILE)
    )


def free_bytes(out: Path) -> int:
    """Return the room that the disk has where a folder will be."""
    above = next(folder for folder in out.absolute().parents if folder.is_dir())
    return shutil.disk_usage(above).free


@contextmanager
def making(out: Path, num_bytes: int) -> Iterator[Path]:
    """Make a folder, to be filled under another name, and rename it when all is on the disk.

    So a process that is killed leaves nothing at `out`, which does not exist; the next one for the
    same `out` removes what it has left beside it. The folder needs room for `num_bytes`.

    Raises:
        FileExistsError: Another process is making it.
        OSError: The disk has no room for it, or it cannot be written; nothing is left.
    """
    partial = out.with_name(f".{out.name}.partial")
    with suppress(FileNotFoundError), alone_in(partial):
        shutil.rmtree(partial)
    if (free := free_bytes(out)) < num_bytes:
        raise OSError(f"{out} cannot be written: {free:,} bytes free, it needs {num_bytes:,}")
    partial.mkdir(parents=True)
    with alone_in(partial):
        try:
            with named(out):
                yield partial
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    sync(out.parent)


def find_damage(folder: Path) -> list[str]:
    """Return what is missing, empty, cut off, unreadable or without a checksum.

    Contents are not compared, but those of the small files that say what there is.
    """
    try:
        checksums = read_checksums(folder)
    except ValueError as error:
        return [str(error)]
    if checksums is None and (folder / RUN_FILE).exists():
        return [f"{CHECKSUMS_FILE} is missing"]
    recorded = checksums or {}
    needed = {KIND_FILE: None, TABLE_FILE: None}
    sizes = needed | {name: checksum.num_bytes for name, checksum in recorded.items()}
    damage = [problem for name, size in sizes.items() if (problem := _damage(folder / name, size))]
    if damage:
        return damage
    small = (KIND_FILE, TABLE_FILE, RUN_FILE)  # What is read here.
    if changes := find_changes(folder, [name for name in small if name in recorded]):
        return changes
    try:
        kind = _read_json(folder / KIND_FILE)
        if (folder / RUN_FILE).exists():
            read_run(folder)
        table = read_table(folder / TABLE_FILE)
    except ForeignClassError:
        return []  # Not damaged, but not to be trusted: see `find_foreign_classes`.
    except ValueError as error:
        return [str(error)]
    # Other formats have other files, and Megatron would read them in other ways.
    if kind.get("sharded_backend") != _FORMAT:
        return [f"{KIND_FILE} names the format {kind.get('sharded_backend')!r}, not {_FORMAT}"]
    # How far each file is read. Megatron-Core before 0.19 keeps what is no tensor in a file, and
    # says so.
    ends = {COMMON_FILE: 1} if "common_backend" in kind else {}
    for stored in table.storage_data.values():
        end = stored.offset + stored.length
        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    damage = [
        problem
        for name, end in sorted(ends.items())
        if (problem := _damage(folder / name, end, may_be_longer=True))
    ]
    if damage or checksums is None:
        return damage
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return [
        f"{name} is not covered: {CHECKSUMS_FILE} has no checksum of it"
        for name in sorted(there - {CHECKSUMS_FILE} - recorded.keys())
    ]


def find_changes(folder: Path, names: Collection[str] | None = None) -> list[str]:
    """Return the files whose contents are not what was written; a checkpoint has no other damage.

    By default all files that have checksums are looked at.
    """
    recorded = read_checksums(folder) or {}
    changes = []
    for name in sorted(recorded if names is None else names):
        try:
            if hash_file(folder / name) != recorded[name]:
                changes.append(f"{name} was changed: its checksum is another")
        except OSError as error:
            changes.append(f"{name} cannot be read: {error.strerror}")
    return changes


def check_whole(folder: Path) -> None:
    """Raise a `ValueError` of one line unless a checkpoint's files are all there and as written."""
    if problems := find_damage(folder) or find_changes(folder):
        raise ValueError(f"{folder}: {problems[0]}")


def find_other_owners(folder: Path) -> list[str]:
    """Return the files that neither this user nor root owns, and the folder if it is such."""
    trusted = {0, os.geteuid()}
    return [
        f"{path.name} belongs to another user ({owner})"
        for path in (folder, *sorted(folder.iterdir()))
        if (owner := path.stat().st_uid) not in trusted
    ]


def find_foreign_classes(folder: Path) -> list[str]:
    """Return whether the table of contents names what a table does not need."""
    try:
        read_table(folder / TABLE_FILE)
    except ForeignClassError as error:
        return [str(error)]
    return []


def look_through_objects(
    folder: Path, part: int = 0, num_parts: int = 1
) -> tuple[list[str], list[str]]:
    """Read what is stored beside tensors, as loading would, but without running what is in it.

    The checkpoint has no damage. `part` is the share of the objects to look through.

    Returns:
        Objects that cannot be read, and objects that name foreign classes. The table of contents
        counts as the first of all shares.
    """
    damaged: list[str] = []
    foreign: list[str] = []
    try:
        table = read_table(folder / TABLE_FILE)
    except ForeignClassError as error:
        return [], [str(error)]
    for where, data in _objects(folder, table, part, num_parts):
        try:
            read_object(data)
        except ForeignClassError as error:
            foreign.append(f"{where} {error}")
        except ValueError as error:
            damaged.append(f"{where} {error}")
    return damaged, foreign


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `verify` found.

    Attributes:
        folder: The checkpoint.
        num_files: Files that are as their checksums say; 0 if the checkpoint has no checksums.
        num_bytes: Their sizes together.
        problems: What is wrong, a line each.
    """

    folder: Path
    num_files: int
    num_bytes: int
    problems: list[str]


def verify(path: str | Path) -> Verdict:
    """Look for everything that is wrong with a checkpoint's files. Nothing in them is run."""
    folder = newest_of(Path(path))
    if damage := find_damage(folder):
        return Verdict(folder=folder, num_files=0, num_bytes=0, problems=damage)
    checksums = read_checksums(folder) or {}
    changes = find_changes(folder)
    unreadable, foreign = look_through_objects(folder)
    return Verdict(
        folder=folder,
        num_files=len(checksums) - len(changes),
        num_bytes=sum(checksum.num_bytes for checksum in checksums.values()),
        problems=(changes or unreadable) + foreign,
    )


def stored_bytes(folder: Path, stored: Any) -> io.BytesIO:
    """Return the bytes of an entry of a table's `storage_data`."""
    with open_regular(folder / stored.relative_path, follow=True) as file:
        file.seek(stored.offset)
        return io.BytesIO(file.read(stored.length))


def _objects(
    folder: Path, table: Any, part: int, num_parts: int
) -> Iterator[tuple[str, io.BytesIO]]:
    """Yield a share of what loading would unpickle, and where it lies."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    if part == 0 and (folder / COMMON_FILE).is_file():
        with open_regular(folder / COMMON_FILE, follow=True) as file:
            yield COMMON_FILE, io.BytesIO(file.read())
    # By what a reader would do: what the table does not call a tensor is unpickled.
    objects = [
        (index, stored)
        for index, stored in table.storage_data.items()
        if isinstance(table.state_dict_metadata.get(index.fqn), BytesStorageMetadata)
    ]
    for index, stored in objects[part::num_parts]:
        yield f"{stored.relative_path}: {index.fqn}", stored_bytes(folder, stored)


def _damage(path: Path, size: int | None, *, may_be_longer: bool = False) -> str | None:
    """Return what is wrong with a file by its size; None if nothing is."""
    try:
        found = look_at(path, follow=True).st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    if not os.access(path, os.R_OK):
        return f"{path.name} cannot be read: no permission"
    if found == 0 and size != 0:
        return f"{path.name} is empty"
    if size is not None and (found < size or (found > size and not may_be_longer)):
        return f"{path.name} has {found} bytes, not {size}"
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if problem := _damage(path, None):
        raise ValueError(problem)
    try:
        return read_json(path, follow=True)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from None


def newest_of(path: Path) -> Path:
    """Return the checkpoint that `path` means: itself, or the newest in a folder or run.

    The newest is the one with the highest number, as in `step_9` or `iter_9`.

    Raises:
        FileNotFoundError: There is none.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder")
    if is_checkpoint(path):
        return path
    parent = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = [each for each in parent.iterdir() if _number(each) >= 0 and is_checkpoint(each)]
    if not found:
        raise FileNotFoundError(
            f"no Megatron checkpoint in {path}: no folder step_N or iter_N with a {KIND_FILE}"
        )
    return max(found, key=_number)
