"""The manifest of a dataset folder: which tokenizer, which domains, how much of each.

`manifest.json`:

    {"tokenizer": "bytes", "vocab_size": 257, "eod": 256, "eod_token": "<eod>",
     "domains": {"python": {"prefix": "python", "documents": 600, "tokens": 8000600,
                            "text_bytes": 8000000}}}

`tokenizer` is "bytes" or the name of a tokenizer.json in the folder. `prefix` is the path of a
Megatron indexed dataset without `.bin` and `.idx`, relative to the folder; an absolute one may
point to a dataset made elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.config import field_problems, limits
from megatron_ext.files.json_files import read_json

MANIFEST = "manifest.json"
BYTES = "bytes"

_COUNT = limits(least=0)


@dataclass(frozen=True, kw_only=True)
class Domain:
    """One kind of text, in a Megatron indexed dataset of its own."""

    prefix: str
    documents: int = field(metadata=_COUNT)
    tokens: int = field(metadata=_COUNT)
    """With one eod per document."""
    text_bytes: int | None = field(metadata=_COUNT)
    """Size of the text before tokenizing, UTF-8; None of a dataset made elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a dataset holds. `build_dataset` writes it into a folder, and training reads it.

    For datasets made elsewhere, `indexed.py` makes a manifest that no file holds.
    """

    folder: Path
    tokenizer: str
    vocab_size: int = field(metadata=limits(least=1))
    """Number of token ids, eod included."""
    eod: int | None = field(metadata=_COUNT)
    """Id of the token that ends each document; None of datasets made elsewhere."""
    eod_token: str | None
    """The same token as the tokenizer writes it."""
    domains: dict[str, Domain]

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read the manifest of a dataset folder.

        Raises:
            FileNotFoundError: There is no manifest.
            ValueError: The file is not a manifest.
        """
        file = Path(path)
        if file.is_dir():
            file = file / MANIFEST
        if not file.is_file():
            raise FileNotFoundError(
                f"no dataset at {path}: there is no {MANIFEST}. `megatron-ext data build` makes one"
            )
        content = read_json(file)
        try:
            domains = {name: Domain(**fields) for name, fields in content.pop("domains").items()}
            manifest = cls(folder=file.parent, domains=domains, **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is not the manifest of a dataset: {error}") from error
        if not domains:
            raise ValueError(f"{file} names no domain")
        problems = [
            problem
            for part in (manifest, *domains.values())
            for problem in field_problems(type(part), part)
        ]
        if problems:
            raise ValueError(f"{file}: {'; '.join(problems)}")
        return manifest

    def save(self) -> None:
        """Write `manifest.json` into the folder."""
        content = dataclasses.asdict(self)
        del content["folder"]
        (self.folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")

    def prefix(self, domain: str) -> str:
        """Return the path prefix of a domain's `.bin` and `.idx`, as Megatron wants it."""
        return str(self.folder / self.domains[domain].prefix)
