"""Runs on datasets that Megatron's builder wrote, named by their prefixes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config import ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.validate import validate
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides
from tests.trainer.test_run import _train

TOKENS = {"one_text_document": 3, "two_text_document": 60}
"""The only token of each dataset, so that a sample shows where it is from."""

SIZE = "model.vocab_size=300"


def write_datasets(folder: Path, tokens: dict[str, int]) -> None:
    """Write datasets by Megatron's own builder: 20 documents of 100 times the given token."""
    enable_cpu_platform()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name, token in tokens.items():
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
        for _ in range(20):
            builder.add_document(torch.full((100,), token), [100])
        builder.finalize(f"{folder / name}.idx")


def write_tokenizer(file: Path) -> None:
    """Write a `tokenizer.json` of 300 token ids, without a token that ends a document."""
    words = {f"w{number}": number for number in range(300)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """The prefixes of two datasets."""
    write_datasets(tmp_path, TOKENS)
    return [str(tmp_path / name) for name in TOKENS]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The file of their tokenizer."""
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def _words(path: str, run_dir: Path, *more: str) -> list[str]:
    given = [word for word in overrides(Path("x"), run_dir) if not word.startswith("data.path=")]
    return [*given, f"data.path={path}", "steps=2", *more]


def _shares(words: list[str]) -> dict[int, float]:
    """Return the share of each token in the samples of a long run."""
    from megatron_ext.trainer.data import open_data
    from megatron_ext.trainer.model.build import dataset

    config = load_config(words)
    validate(config, num_ranks=2)
    windows = dataset(config, open_data(config), "train").windows(range(2 * 2000))
    return {token: float((windows[:, 0] == token).mean()) for token in TOKENS.values()}


@pytest.mark.parametrize(
    ("path", "share"), [("{0}", 1), ("{0} {1}", 0.5), ("0.3 {0} 0.9 {1}", 0.25)]
)
def test_prefixes_and_weights(
    path: str, share: float, prefixes: list[str], tokenizer: Path, tmp_path: Path
) -> None:
    words = _words(path.format(*prefixes), tmp_path / "run", f"data.tokenizer={tokenizer}")
    shares = _shares(words)
    # Shares are met within a draw of each period of 4096, and 2000 draws are half of one.
    assert shares[TOKENS["one_text_document"]] == pytest.approx(share, abs=0.03)
    assert sum(shares.values()) == 1


def test_a_run_on_a_blend_of_prefixes(prefixes: list[str], tokenizer: Path, tmp_path: Path) -> None:
    words = _words(f"1 {prefixes[0]} 1 {prefixes[1]}", tmp_path / "run", "eval_every=2")
    run_ranks(_train, 2, [*words, f"data.tokenizer={tokenizer}", "eval_steps=1"])
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    # Two tokens alone are learned at once.
    assert lines[1]["loss"] < lines[0]["loss"]
    assert lines[1]["eval_loss"] < lines[0]["loss"]


def _train_as_a_machine(rank: int, arguments: list[str], folders: list[str]) -> Any:
    """Train with data of this folder, on the only rank of its machine."""
    os.environ["LOCAL_WORLD_SIZE"], local_rank = "1", os.environ.get("LOCAL_RANK", "0")
    os.environ["LOCAL_RANK"] = "0"
    try:
        with chdir(folders[rank]):
            _train(rank, arguments)
    except SystemExit as ended:
        return ended.code
    finally:
        os.environ["LOCAL_RANK"] = local_rank
        del os.environ["LOCAL_WORLD_SIZE"]
    return None


def test_machines_with_other_copies_of_the_data_do_not_train(tmp_path: Path) -> None:
    """Their files have the same sizes."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, token in zip(folders, TOKENS.values(), strict=True):
        folder.mkdir()
        write_datasets(folder, {"text": token})
    words = _words("text", tmp_path / "run", SIZE)
    for two, status in ((0, None), (1, 2)):
        given = [str(folders[number]) for number in (0, two)]
        assert run_ranks(_train_as_a_machine, 2, words, given) == [status] * 2


def _cut(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 20)


PROBLEMS: dict[str, tuple[str, list[str], Callable[[str], Any], str]] = {
    "no index": ("{0}", [SIZE], lambda p: os.remove(p + ".idx"), "{0}.idx does not exist"),
    "no tokens": ("{0} {1}", [SIZE], lambda p: os.remove(p + ".bin"), "{0}.bin does not exist"),
    "a cut bin": (
        "{0}",
        [SIZE],
        lambda p: _cut(p + ".bin"),
        "domain one_text_document: {0} was changed or cut off: tokens by the .idx 2000, in the "
        ".bin 1990",
    ),
    "a cut idx": ("{0}", [SIZE], lambda p: _cut(p + ".idx"), "{0}.idx is cut off, damaged"),
    "a token beyond": (
        "0.5 {0} 0.5 {1}",
        ["model.vocab_size=60"],
        str,
        "{1}.bin: token 60 at position 0 must be from 0 to 59, the vocabulary of the data",
    ),
    "no vocabulary": ("{0}", [], str, "data.tokenizer, a tokenizer.json, or model.vocab_size must"),
    "no tokenizer": (
        "{0}",
        ["data.tokenizer=/x.json"],
        str,
        "tokenizer file /x.json does not exist",
    ),
    "an ending": ("{0}.idx", [SIZE], str, "name the dataset without its ending, {0}"),
    "twice": ("{0} {0}", [SIZE], str, "{0} is given twice"),
    "half of the weights": ("0.5 {0} {1}", [SIZE], str, "a weight must be in front of each prefix"),
    "a weight too many": ("{0} 0.5 {1} 1", [SIZE], str, "a weight must be in front of each prefix"),
    "a negative weight": ("-1 {0} 2 {1}", [SIZE], str, "the weight -1 must be >= 0"),
    "no weight": ("0 {0} 0 {1}", [SIZE], str, "the weights are all zero"),
    "weights twice": ("{0} {1}", [SIZE, "+data.weights.a=1"], str, "data.weights must be empty"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_wrong_prefixes_are_refused_in_one_line(
    case: str, prefixes: list[str], tmp_path: Path
) -> None:
    path, more, harm, said = PROBLEMS[case]
    harm(prefixes[0])
    words = _words(path.format(*prefixes), tmp_path / "run", *more)
    with pytest.raises(ConfigError) as refused:
        validate(load_config(words), num_ranks=2)
    (problem,) = refused.value.problems
    assert said.format(*prefixes) in problem
    assert problem.startswith("data.")


def test_a_folder_says_its_own_tokenizer(data: Path, tokenizer: Path, tmp_path: Path) -> None:
    words = [*overrides(data, tmp_path / "run"), f"data.tokenizer={tokenizer}"]
    with pytest.raises(ConfigError, match=r"data\.tokenizer \(.*\) must be empty"):
        validate(load_config(words), num_ranks=2)
