"""Text that every machine has, gathered into one folder per domain. Nothing is downloaded.

Domains: `licenses`, `python` (sources of the standard library), `c_headers` (the system's,
Python's, PyTorch's and other packages') and `prose` (the Python language manual, documentation
strings, what installed packages say about themselves). Each domain is cut at the same size; text
found twice is taken once.
"""

from __future__ import annotations

import ast
import hashlib
import json
import pydoc_data.topics
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from email.parser import HeaderParser
from functools import partial
from pathlib import Path

from megatron_ext.data.files import fair_order, new_folder, read_text, walk

# Fewer than three kinds of text do not specialise experts, which is what the corpus is for.
MIN_DOMAINS = 3
# A domain of less text than this is the same as none.
MIN_DOMAIN_BYTES = 64 << 10
# Shorter files are stubs: a list of names, a one-line notice.
MIN_DOCUMENT_BYTES = 256
# No file may take more than this part of its domain: generated headers have megabytes.
MAX_DOCUMENT_SHARE = 1 / 16

# Written into a gathered folder; hidden, so that `FOLDER/*` are its domains.
MARKER = ".corpus.json"

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
# Not code that people write: tests of corner cases, character tables, the manual as one literal.
_NOT_STDLIB_CODE = {*_PACKAGE_FOLDERS, "test", "tests", "idle_test", "encodings", "pydoc_data"}
_LICENSE_NAME = re.compile(
    r"(licen[cs]es?|copying|copyright|notices?|eula)([._-]|$)", re.IGNORECASE
)
# Lists for programs that have the ending of prose.
_NOT_PROSE = re.compile(
    r"(top_level|entry_points|sources|requires|requirements.*|dependency_links|cmakelists)\.txt",
    re.IGNORECASE,
)
_HEADER_SUFFIXES = (".h", ".hh", ".hpp", ".hxx", ".cuh")
_PROSE_SUFFIXES = (".md", ".rst", ".txt")


@dataclass(frozen=True)
class Candidate:
    """A text that may enter a domain."""

    name: str
    """Relative path under which the text is stored; the names order the candidates."""
    read: Callable[[], str]
    """Returns the text when the candidate's turn comes; ValueError if the file is not text."""


@dataclass(frozen=True, kw_only=True)
class DomainSize:
    """How much of a domain was gathered."""

    documents: int
    text_bytes: int


def gather_corpus(
    out: Path, *, limit_bytes: int, overwrite: bool, on_bytes: Callable[[int], None]
) -> dict[str, DomainSize]:
    """Gather this machine's text into `out/<domain>/...`, which appears whole or not at all.

    Equal machines give equal folders. A text takes part in the first of its domains only, such as a
    licence in a README. A domain has at most `limit_bytes` of UTF-8, which are not less than
    `MIN_DOMAIN_BYTES`. `on_bytes` is called with the size of each text that is taken.

    Returns:
        What was gathered of the domains that this machine has.

    Raises:
        FileExistsError: `out` exists.
        RuntimeError: The machine has text for fewer than `MIN_DOMAINS` domains.
    """
    domains: dict[str, DomainSize] = {}
    seen: set[bytes] = set()
    with new_folder(out, overwrite=overwrite, marker=MARKER) as folder:
        for name, candidates in DOMAINS.items():
            size = _gather(folder / name, candidates(), limit_bytes, seen, on_bytes)
            if size.text_bytes >= MIN_DOMAIN_BYTES:
                domains[name] = size
            else:
                shutil.rmtree(folder / name, ignore_errors=True)
        if len(domains) < MIN_DOMAINS:
            missing = [name for name in DOMAINS if name not in domains]
            raise RuntimeError(
                f"this machine has text for {len(domains)} domains "
                f"({', '.join(domains) or 'none'}), not for {', '.join(missing)}; {MIN_DOMAINS} "
                "are needed: give text of your own to `megatron-ext data build`"
            )
        sizes = {name: asdict(size) for name, size in domains.items()}
        (folder / MARKER).write_text(json.dumps(sizes, indent=2) + "\n")
    return domains


def _gather(
    folder: Path,
    candidates: Iterable[Candidate],
    limit_bytes: int,
    seen: set[bytes],
    on_bytes: Callable[[int], None],
) -> DomainSize:
    """Write candidates in `fair_order` until the next would be over the limit."""
    documents = text_bytes = 0
    for candidate in sorted(candidates, key=lambda candidate: fair_order(candidate.name)):
        try:
            content = candidate.read().encode()
        except (ValueError, OSError):
            continue  # Not text, or not ours to read: there is other text.
        if not MIN_DOCUMENT_BYTES <= len(content) <= limit_bytes * MAX_DOCUMENT_SHARE:
            continue
        # Copies of one licence differ in line breaks and indents.
        fingerprint = hashlib.sha256(b" ".join(content.split())).digest()
        if fingerprint in seen:
            continue
        if text_bytes + len(content) > limit_bytes:
            break
        seen.add(fingerprint)
        file = folder / candidate.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        documents += 1
        text_bytes += len(content)
        on_bytes(len(content))
    return DomainSize(documents=documents, text_bytes=text_bytes)


def _under(
    roots: Iterable[tuple[Path, str]],
    is_wanted: Callable[[str], object],
    read: Callable[[Path], str] = read_text,
) -> Iterator[Candidate]:
    """Yield the files below the roots whose own name is wanted, with what reads their text.

    Their names in the corpus begin with the label of a root.
    """
    for root, label in roots:
        for name in walk(root):
            if is_wanted(name.rpartition("/")[-1]):
                yield Candidate(f"{label}/{name}", partial(read, root / name))


def _package_folders() -> Iterator[tuple[Path, str]]:
    """Yield the folders of installed packages, and a label for each."""
    folders = [Path(entry) for entry in sys.path if Path(entry).name in _PACKAGE_FOLDERS]
    for number, folder in enumerate(folder for folder in folders if folder.is_dir()):
        yield folder, f"packages{number or ''}"


def _stdlib_files() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name in walk(root, _NOT_STDLIB_CODE):
        if name.endswith(".py"):
            yield root / name, f"stdlib/{name}"


def _python_sources() -> Iterator[Candidate]:
    for file, name in _stdlib_files():
        yield Candidate(name, partial(read_text, file))


def _c_headers() -> Iterator[Candidate]:
    folders = (Path("/usr/include"), "system"), (Path(sysconfig.get_path("include")), "python")
    roots = [*folders, *_package_folders()]
    return _under(roots, lambda name: name.endswith(_HEADER_SUFFIXES))


def _licenses() -> Iterator[Candidate]:
    yield from _under([(Path("/usr/share/common-licenses"), "common")], bool)
    roots = [(Path("/usr/share/doc"), "doc"), *_package_folders()]
    yield from _under(roots, _LICENSE_NAME.match)


def _prose() -> Iterator[Candidate]:
    # The chapters of the language manual that `help()` shows.
    for topic, text in pydoc_data.topics.topics.items():
        yield Candidate(f"manual/{topic}.rst", partial(str, text))
    for file, name in _stdlib_files():
        yield Candidate(f"docstrings/{name}.txt", partial(_docstrings, file))
    yield from _under(_package_folders(), "METADATA".__eq__, _description)
    yield from _under(_package_folders(), _is_prose, _mostly_letters)


def _is_prose(name: str) -> bool:
    return (
        name.endswith(_PROSE_SUFFIXES)
        and not _LICENSE_NAME.match(name)
        and not _NOT_PROSE.fullmatch(name)
    )


def _mostly_letters(file: Path) -> str:
    """Return a file's text if it can be prose: `.txt` is also how tables of test data are named."""
    text = read_text(file)
    if sum(map(str.isalpha, text)) < len(text) / 2:
        raise ValueError("it has more signs than letters")
    return text


def _docstrings(file: Path) -> str:
    """Return the documentation strings of a module, its classes and functions, outermost first."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        tree = ast.parse(read_text(file))
    except SyntaxError as error:
        raise ValueError(str(error)) from error
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(text for text in texts if text)


def _description(file: Path) -> str:
    """Return the long description of a package from its METADATA, which is formed like a mail."""
    return str(HeaderParser().parsestr(read_text(file)).get_payload())


# In the order in which they are gathered: a licence that is also in a README goes to `licenses`.
DOMAINS: dict[str, Callable[[], Iterable[Candidate]]] = {
    "licenses": _licenses,
    "python": _python_sources,
    "c_headers": _c_headers,
    "prose": _prose,
}
