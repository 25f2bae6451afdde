"""`megatron-ext data`: text and datasets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_ext.arguments import existing_path, positive
from megatron_ext.cli import options
from megatron_ext.cli.output import mib, progress, show, warn
from megatron_ext.files.tables import text_table

if TYPE_CHECKING:
    from megatron_ext.data.manifest import Manifest

# Files named in a message; the rest is counted.
_MOST_NAMED = 5


def add(commands: Any) -> None:
    """Add the command and those below it."""
    data = options.add_group(commands, "data", "build datasets from text, and look at them")
    build = options.add_command(
        data,
        "build",
        run_build,
        "turn text files into Megatron indexed datasets, one per domain",
        "megatron-ext data build code=megatron_ext 'docs=docs/**/*.md' --out runs/text",
    )
    build.add_argument(
        "sources",
        nargs="+",
        metavar="[NAME=]PATH",
        help="a file, a folder or a quoted pattern; NAME is the domain (default: the path's last "
        "part)",
    )
    _add_folder_to_make(build)
    build.add_argument(
        "--tokenizer",
        type=existing_path,
        metavar="FILE",
        help="a Hugging Face tokenizer.json (default: one token per byte)",
    )
    build.add_argument(
        "--eod",
        metavar="TOKEN",
        help="the tokenizer's token that ends a document, if its name is unusual",
    )
    build.add_argument(
        "--strict", action="store_true", help="fail on a file that is not text, instead of skipping"
    )
    corpus = options.add_command(
        data,
        "corpus",
        run_corpus,
        "gather text that this machine has, one folder per domain",
        "megatron-ext data corpus --out runs/corpus\n"
        "  megatron-ext data build runs/corpus/* --out runs/data",
    )
    _add_folder_to_make(corpus)
    corpus.add_argument(
        "--limit-mb",
        type=positive,
        default=8,
        metavar="N",
        help="most text of a domain, in MiB (default: %(default)s)",
    )
    info = options.add_command(
        data,
        "info",
        run_info,
        "show what a dataset holds, and check that it is complete",
        "megatron-ext data info runs/data",
    )
    info.add_argument(
        "path", type=existing_path, metavar="DIR", help="a dataset made by `data build`"
    )


def _add_folder_to_make(parser: argparse.ArgumentParser) -> None:
    options.add_out(
        parser, "DIR", "folder to make", required=True, replaces="an earlier output at DIR"
    )


def run_build(arguments: argparse.Namespace) -> int:
    """Build a dataset, and show what it holds and what was skipped."""
    from megatron_ext.data.build import build_dataset, parse_sources

    if arguments.eod is not None and arguments.tokenizer is None:
        raise ValueError("--eod names a token of the --tokenizer, which is not given")
    domains = parse_sources(arguments.sources)
    total = sum(file.stat().st_size for files in domains.values() for file in files)
    with progress("Tokenizing", total, in_bytes=True) as on_bytes:
        manifest, skipped = build_dataset(
            domains,
            arguments.out,
            tokenizer_file=arguments.tokenizer,
            eod_token=arguments.eod,
            strict=arguments.strict,
            overwrite=arguments.overwrite,
            on_bytes=on_bytes,
        )
    if skipped:
        named = [f"{path} ({reason})" for path, reason in skipped.items()]
        more = len(named) - _MOST_NAMED
        warn(
            f"skipped {len(named)} file{'s' * (len(named) > 1)}: {', '.join(named[:_MOST_NAMED])}"
            + (f" and {more} more" if more > 0 else "")
        )
    left_out = [{"path": str(path), "reason": reason} for path, reason in skipped.items()]
    return show(arguments, _describe(manifest) | {"skipped": left_out}, _dataset_lines)


def run_corpus(arguments: argparse.Namespace) -> int:
    """Gather text, and show how much there is of each domain."""
    from megatron_ext.data.corpus import DOMAINS, gather_corpus

    limit_bytes = arguments.limit_mb << 20
    with progress("Gathering", limit_bytes * len(DOMAINS), in_bytes=True) as on_bytes:
        domains = gather_corpus(
            arguments.out, limit_bytes=limit_bytes, overwrite=arguments.overwrite, on_bytes=on_bytes
        )
    if missing := [name for name in DOMAINS if name not in domains]:
        warn(f"this machine has no text for {', '.join(missing)}: left out")
    report = {
        "path": str(arguments.out),
        "domains": {name: asdict(size) for name, size in domains.items()},
        "missing": missing,
    }
    return show(arguments, report, _corpus_lines)


def _corpus_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"text of this machine in {report['path']}"
    yield ""
    yield text_table(
        ("domain", "documents", "MiB"),
        [
            (name, f"{size['documents']:,}", mib(size["text_bytes"]))
            for name, size in report["domains"].items()
        ],
    )


def run_info(arguments: argparse.Namespace) -> int:
    """Open every domain of a dataset, and show what it holds."""
    from megatron_ext.data.indexed import open_domain
    from megatron_ext.data.manifest import Manifest

    manifest = Manifest.load(arguments.path)
    for name in manifest.domains:
        open_domain(manifest, name)
    return show(arguments, _describe(manifest), _dataset_lines)


def _describe(manifest: Manifest) -> dict[str, Any]:
    return asdict(manifest) | {"folder": str(manifest.folder)}


def _dataset_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"dataset    {report['folder']}"
    yield f"tokenizer  {report['tokenizer']}, {report['vocab_size']:,} tokens"
    yield f"eod        {report['eod_token']} ({report['eod']})"
    yield ""
    yield text_table(
        ("domain", "documents", "tokens", "text MiB"),
        [
            (name, f"{d['documents']:,}", f"{d['tokens']:,}", mib(d["text_bytes"]))
            for name, d in report["domains"].items()
        ],
    )
