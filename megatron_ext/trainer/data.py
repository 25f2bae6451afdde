"""Which data a run reads: a folder of `megatron-ext data build`, or Megatron's own datasets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_ext.data.manifest import MANIFEST, Manifest
from megatron_ext.data.tokenizer import vocab_size_of
from megatron_ext.trainer.config import DataConfig, TrainConfig


def open_data(config: TrainConfig) -> Manifest:
    """Return what the data of a run hold; of prefixes, after reading their `.idx`.

    Raises:
        FileNotFoundError: There are no such data.
        ValueError: The data are wrong, or do not fit the settings.
        ModuleNotFoundError: `data.tokenizer` needs a library that is not installed.
    """
    data = config.data
    prefixes = prefixes_of(data)
    if not prefixes:
        if data.tokenizer:
            raise ValueError(
                f"data.tokenizer ({data.tokenizer}) must be empty: the folder says its tokenizer"
            )
        return Manifest.load(data.path)
    if data.weights:
        raise ValueError(
            "data.weights must be empty: weights of prefixes are in data.path, each in front of "
            "its prefix"
        )
    if data.tokenizer:
        vocab_size = vocab_size_of(Path(data.tokenizer))
    elif not (vocab_size := config.model.vocab_size):
        raise ValueError(
            "data.tokenizer, a tokenizer.json, or model.vocab_size must say how many tokens there "
            "are"
        )
    from megatron_ext.data.indexed import manifest_of

    return manifest_of(
        [prefix for prefix, _ in prefixes], tokenizer=data.tokenizer, vocab_size=vocab_size
    )


def files_of(data: DataConfig, manifest: Manifest) -> Iterator[str]:
    """Yield the files that a run reads its data from; the last ones hold its tokens."""
    if not prefixes_of(data):
        yield str(manifest.folder / MANIFEST)
    elif data.tokenizer:
        yield data.tokenizer
    for domain in manifest.domains:
        yield from (manifest.prefix(domain) + ending for ending in (".idx", ".bin"))


DATA_ERRORS = (FileNotFoundError, ValueError, ModuleNotFoundError)
"""What `open_data` raises."""


def find_data(config: TrainConfig) -> Manifest | None:
    """Return what the data of a run hold, or None if `open_data` has an error.

    For what a run can do without; `validate` tells a run that needs its data what is wrong.
    """
    try:
        return open_data(config)
    except DATA_ERRORS:
        return None


def has_data(config: TrainConfig) -> bool:
    """Whether there are data where the run looks for them; they may be wrong."""
    try:
        open_data(config)
    except FileNotFoundError:
        return False
    except DATA_ERRORS:
        pass
    return True


def data_weights(data: DataConfig, manifest: Manifest) -> Mapping[str, float]:
    """Return the shares of domains that the settings give, by domain; empty if they give none."""
    weights = [weight for _, weight in prefixes_of(data) if weight is not None]
    return dict(zip(manifest.domains, weights, strict=True)) if weights else data.weights


def prefixes_of(data: DataConfig) -> list[tuple[str, float | None]]:
    """Return the prefixes and weights in `data.path`; nothing if it is no path of such files."""
    path, words = Path(data.path), data.path.split()
    if path.suffix in (".bin", ".idx") and path.is_file():
        raise ValueError(f"name the dataset without its ending, {path.with_suffix('')}")
    is_prefix = any(Path(data.path + ending).is_file() for ending in (".bin", ".idx"))
    if is_prefix:
        return [(data.path, None)]
    if path.exists() or len(words) < 2:
        return []
    weights = [_number(word) for word in words]
    if all(weight is None for weight in weights):
        return [(word, None) for word in words]
    pairs = list(zip(words[1::2], weights[::2], strict=False))
    if len(words) % 2 or None in weights[::2] or any(each is not None for each in weights[1::2]):
        raise ValueError("a weight must be in front of each prefix, or of none")
    if not sum(weight or 0 for _, weight in pairs):
        raise ValueError("the weights are all zero")
    return pairs


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"the weight {word} must be >= 0")
    return number
