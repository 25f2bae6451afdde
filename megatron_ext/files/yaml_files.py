"""Files in YAML that hold a mapping, found by path or by name.

A file may be anybody's. YAML can name a part again, and a value can name another one, so that few
bytes stand for more than any memory holds: what a file would be, written out, is counted before it
is made.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ext.arguments import one_line
from megatron_ext.files.opening import NotRegularError, read_regular
from megatron_ext.words import did_you_mean

_MOST_BYTES = 1 << 20
_MOST_NODES = 10_000
"""Values, names and hundreds of letters, with what is named again: several times any recipe's."""
_MOST_DEPTH = 20
_MOST_LETTERS = 4096
"""Of a value: as of a path. A reference, or a name for a part, may write it out again."""
_MOST_REFERENCES = 16
"""Places with `${name}`: each may double what it names."""
_HUGE = re.compile(r"[-+]?(0x[\da-fA-F_]{17,}|0b[01_]{65,}|[\d_:]{19,})")
"""Whole numbers that no tensor and no file's format can hold."""


def find_file(name_or_file: str, folder: Path, what: str) -> Path:
    """Return the path of a file that is named by its path or by its name in `folder`.

    Raises:
        FileNotFoundError: There is no such path and no such name; the message lists the names.
    """
    for path in (Path(name_or_file), folder / f"{name_or_file}.yaml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if folder.is_dir():
        near = did_you_mean(name_or_file, known)
        named = f"{folder} has {', '.join(known) or 'none'}{near}"
    else:
        named = f"there is no folder {folder.absolute()}"
    raise FileNotFoundError(f"no {what} {name_or_file!r}: no such file, and {named}")


def read_yaml(path: Path, *, follow: bool = True) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, as it stands there: references are not looked up.

    For `follow` see `look_at`.

    Raises:
        ValueError: It cannot be read, is not YAML, holds no mapping, or more than any such file;
            the message is one line with the line of the fault.
    """
    text = check_yaml(path, follow=follow)
    with faults_of(path):
        content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping")
    return {str(key): value for key, value in content.items()}


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Turn what OmegaConf and PyYAML raise about a file into a `ValueError` of one line."""
    from yaml import MarkedYAMLError, YAMLError

    try:
        yield
    except NotRegularError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where} is no readable YAML: {one_line(error.problem)}") from None
    except (OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no readable YAML: {one_line(error)}") from None


def check_yaml(path: Path, *, follow: bool = True) -> str:
    """Return a file's text, which is YAML and not larger than the limits above, to be loaded.

    Arguments and errors are those of `read_yaml`.
    """
    import yaml

    # In C where PyYAML has it: the file is read once more when it is loaded.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with faults_of(path):
        text = read_regular(path, follow=follow, most_bytes=_MOST_BYTES).decode()
        # Nodes and references of what has a name, written out.
        sizes: dict[str | None, tuple[int, int]] = {}
        # What is open: its name, and the nodes and references before.
        around: list[tuple[str | None, int, int]] = []
        nodes = references = 0
        for event in yaml.parse(text, loader):
            problem = None
            name: str | None = getattr(event, "anchor", None)
            if isinstance(event, yaml.AliasEvent):
                problem = None if name in sizes else f"*{name} names nothing above it"
                more = sizes.get(name, (0, 0))
                nodes, references = nodes + more[0], references + more[1]
            elif isinstance(event, yaml.NodeEvent):
                nodes += 1
                if isinstance(event, yaml.ScalarEvent):
                    here, letters = event.value.count("${"), len(event.value) // 100
                    nodes, references = nodes + letters, references + here
                    if len(event.value) > _MOST_LETTERS:
                        problem = f"a value has more than {_MOST_LETTERS} letters"
                    elif event.implicit[0] and _HUGE.fullmatch(event.value):
                        problem = f"{event.value[:20]}... is beyond 64 bits"
                    elif event.value and not around:  # OmegaConf would take it for a name.
                        problem = "it holds one value, and no mapping"
                    sizes |= {name: (1 + letters, here)} if name else {}
                else:
                    around.append((name, nodes - 1, references))
            elif isinstance(event, yaml.CollectionEndEvent):
                name, *before = around.pop()
                sizes |= {name: (nodes - before[0], references - before[1])} if name else {}
            for found, most, what in (
                (nodes, _MOST_NODES, "values or hundreds of letters, written out"),
                (len(around), _MOST_DEPTH, "levels"),
                (references, _MOST_REFERENCES, "references ${...}"),
            ):
                if found > most:
                    problem = f"it has more than {most} {what}"
            if problem is not None:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
    return text
