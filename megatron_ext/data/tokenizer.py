"""Tokenizers: bytes, which need no file, and any Hugging Face `tokenizer.json`.

A tokenizer turns documents into token ids, below its `vocab_size`, and names the id that ends a
document (eod). Nothing is added to a document here: no begin token, no padding. `build.py` appends
the eod.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Tokens that end a document in published tokenizers, most specific first. A tokenizer.json does not
# say which of its tokens does: the first one found is taken and reported; `--eod` names another.
COMMON_EOD_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with wide bars and low lines.
)


class ByteTokenizer:
    """One token per UTF-8 byte (ids 0 to 255) and the eod (256). Knows every text, needs no file.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode(["hi"])[0].tolist(), tokenizer.eod, tokenizer.vocab_size
    ([104, 105], 256, 257)
    """

    vocab_size = 257
    eod = 256
    eod_token = "<eod>"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the UTF-8 bytes of each text as int64 ids."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


class HuggingFaceTokenizer:
    """A tokenizer read from a `tokenizer.json`, as the `tokenizers` library writes it.

    Without an `eod_token`, the first of `COMMON_EOD_TOKENS` that the tokenizer has ends a document.

    Raises:
        ModuleNotFoundError: The `tokenizers` library is not installed.
        FileNotFoundError: There is no such file.
        ValueError: The file is not a tokenizer, or it has no such eod token.
    """

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        self._tokenizer, vocabulary = _read(path)
        self._path = path
        candidates = COMMON_EOD_TOKENS if eod_token is None else (eod_token,)
        self.eod_token = next((token for token in candidates if token in vocabulary), "")
        if not self.eod_token:
            raise ValueError(
                f"{path} has none of the tokens {', '.join(candidates)} to end a document: "
                "name one it has with --eod"
            )
        self.eod = vocabulary[self.eod_token]
        self.vocab_size = _vocab_size(vocabulary)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of each text, int64, without the tokenizer's special tokens.

        Raises:
            ValueError: The file names tokens that it does not have.
        """
        with _refusing(f"{self._path} cannot encode a text"):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]


@cache
def vocab_size_of(path: Path) -> int:
    """Return the number of token ids of a `tokenizer.json`."""
    return _vocab_size(_read(path)[1])


def _read(path: Path) -> tuple[Any, dict[str, int]]:
    """Return a tokenizer of the library that neither cuts nor fills up, and its ids by token."""
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"reading {path} needs the `tokenizers` library: pip install 'megatron-ext[train]'"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer file {path} does not exist")
    with _refusing(f"{path} is not a Hugging Face tokenizer.json"):
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
    # Settings stored in the file which would cut or fill up documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ValueError(f"{path} is a tokenizer without a vocabulary")
    return tokenizer, vocabulary


@contextmanager
def _refusing(why: str) -> Iterator[None]:
    """Raise what the library raises for a fault of the file as a ValueError.

    That is a bare Exception or, of a fault that the library does not look for, a panic of Rust,
    which is no Exception.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{why}: {error}") from error


def _vocab_size(vocabulary: dict[str, int]) -> int:
    # Ids may have gaps, so the number of tokens is not enough.
    return max(vocabulary.values()) + 1


def padded_vocab_size(vocab_size: int, *, tensor_parallel: int) -> int:
    """Return the rows of an embedding that holds `vocab_size` tokens and splits evenly.

    The number is the smallest multiple of 128 (which keeps matrix shapes fast) and of the ranks
    that share the embedding. Rows that stand for no token have logits, too. A checkpoint must be
    the same model on another number of ranks, so all numbers of ranks that divide 128 pad alike.
    Megatron's own rule, a multiple of 128 on each rank, would add rows that were never trained.

    >>> padded_vocab_size(257, tensor_parallel=2)
    384
    """
    multiple = math.lcm(128, tensor_parallel)
    return -(-vocab_size // multiple) * multiple
