"""Microbatches: which tokens arrive when, compared with the tokens on disk and with themselves.

Tokens are written so that each names its domain and place: domain d holds 1000 * d + 0, 1, 2, ...
"""

import dataclasses
import gc
import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.data.manifest import Domain, Manifest
from megatron_ext.data.mixing import DRAWS_PER_PERIOD, MixedDataset, microbatches, shuffled
from megatron_ext.data.tokenizer import padded_vocab_size

DOMAIN_TOKENS = {"code": 201, "prose": 105, "rare": 41}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    for number, (name, num_tokens) in enumerate(DOMAIN_TOKENS.items()):
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16)
        # Documents of 7 tokens, so that windows lie over several.
        tokens = np.arange(num_tokens) + 1000 * number
        for document in np.split(tokens, range(7, num_tokens, 7)):
            builder.add_document(document, [len(document)])
        builder.finalize(f"{folder / name}.idx")
    manifest = Manifest(
        folder=folder,
        tokenizer="bytes",
        vocab_size=4000,
        eod=3999,
        eod_token="",
        domains={
            name: Domain(prefix=name, documents=-(-n // 7), tokens=n, text_bytes=n)
            for name, n in DOMAIN_TOKENS.items()
        },
    )
    manifest.save()
    return manifest


def mixed(manifest, **settings):
    defaults = dict(
        split="train",
        sequence_length=10,
        micro_batch_size=2,
        seed=1,
        weights={},
        mix_by="microbatch",
        validation_fraction=0.0,
    )
    return MixedDataset(manifest, **(defaults | settings))


def domains(dataset, index):
    """The domain of each sample of a microbatch, by its first token."""
    names = list(DOMAIN_TOKENS)
    return [names[token // 1000] for token in dataset[index]["tokens"][:, 0].tolist()]


def test_a_microbatch(manifest):
    batch = mixed(manifest)[0]
    for name in ("tokens", "labels", "position_ids"):
        assert batch[name].dtype == torch.int64
        assert batch[name].shape == (2, 10)
        assert batch[name].is_contiguous()
    assert torch.equal(batch["loss_mask"], torch.ones(2, 10))
    assert torch.equal(batch["position_ids"], torch.arange(10).expand(2, 10))
    # Consecutive tokens of one domain: windows start at multiples of the sequence length.
    assert torch.equal(batch["labels"], batch["tokens"] + 1)
    assert torch.equal(batch["tokens"] - batch["tokens"][:, :1], batch["position_ids"])
    assert (batch["tokens"][:, 0] % 1000 % 10 == 0).all()


@pytest.mark.parametrize("mix_by", ["microbatch", "sample"])
def test_every_window_once_per_epoch(manifest, mix_by):
    dataset = mixed(manifest, mix_by=mix_by)
    # By domain, the first tokens of its samples in the order they come, into the second period.
    starts = {name: [] for name in DOMAIN_TOKENS}
    for i in range(DRAWS_PER_PERIOD + 100):
        for start in dataset[i]["tokens"][:, 0].tolist():
            starts[list(DOMAIN_TOKENS)[start // 1000]].append(start)
    orders = set()
    for number, (name, num_tokens) in enumerate(DOMAIN_TOKENS.items()):
        num_windows = (num_tokens - 1) // 10
        every = [1000 * number + 10 * w for w in range(num_windows)]
        for first in range(0, len(starts[name]) - num_windows + 1, num_windows):
            epoch = starts[name][first : first + num_windows]
            assert sorted(epoch) == every
            orders.add(tuple(epoch))
    # Epochs have orders of their own; the smallest domain has only 24 to choose from.
    assert len(orders) > 100


def test_microbatches_of_one_domain_or_mixed(manifest):
    by_microbatch = mixed(manifest, micro_batch_size=4)
    assert all(len(set(domains(by_microbatch, i))) == 1 for i in range(100))
    by_sample = mixed(manifest, micro_batch_size=4, mix_by="sample")
    assert any(len(set(domains(by_sample, i))) > 1 for i in range(100))


def test_weights_are_met_in_every_period(manifest):
    dataset = mixed(manifest, weights={"code": 1, "rare": 3}, micro_batch_size=1)
    for period in (0, 5):
        first = period * DRAWS_PER_PERIOD
        drawn = Counter(domains(dataset, i)[0] for i in range(first, first + DRAWS_PER_PERIOD))
        assert drawn == {"code": DRAWS_PER_PERIOD // 4, "rare": DRAWS_PER_PERIOD * 3 // 4}


def test_no_weights_means_by_tokens(manifest):
    dataset = mixed(manifest, micro_batch_size=1)
    drawn = Counter(domains(dataset, i)[0] for i in range(DRAWS_PER_PERIOD))
    total = sum(DOMAIN_TOKENS.values())
    for name, num_tokens in DOMAIN_TOKENS.items():
        assert abs(drawn[name] - DRAWS_PER_PERIOD * num_tokens / total) <= 1


def test_a_tiny_weight_is_not_never(manifest):
    dataset = mixed(manifest, weights={"code": 1.0, "rare": 1e-9}, micro_batch_size=1)
    assert any(domains(dataset, i) == ["rare"] for i in range(DRAWS_PER_PERIOD + 1))


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def take(iterator, number):
    return list(itertools.islice(iterator, number))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_one_sequence(manifest, size):
    """Together the ranks read microbatches 0, 1, 2, ... whatever their number."""
    dataset = mixed(manifest)
    per_rank = [
        take(
            microbatches(
                dataset, consumed_samples=0, data_parallel_rank=rank, data_parallel_size=size
            ),
            3,
        )
        for rank in range(size)
    ]
    for i in range(3 * size):
        assert same(per_rank[i % size][i // size], dataset[i])


def test_resume_continues_exactly(manifest):
    def run(dataset, consumed_samples):
        return microbatches(
            dataset,
            consumed_samples=consumed_samples,
            data_parallel_rank=1,
            data_parallel_size=2,
        )

    whole = take(run(mixed(manifest), 0), 50)
    # Ten microbatches of two ranks with two samples each, then a fresh process.
    resumed = take(run(mixed(manifest), 10 * 2 * 2), 40)
    assert all(map(same, whole[10:], resumed))
    copied = take(run(pickle.loads(pickle.dumps(mixed(manifest))), 10 * 2 * 2), 40)
    assert all(map(same, resumed, copied))


def test_resume_needs_whole_microbatches(manifest):
    with pytest.raises(ValueError, match=r"consumed_samples \(3\) must be a multiple of"):
        microbatches(
            mixed(manifest), consumed_samples=3, data_parallel_rank=0, data_parallel_size=1
        )


def test_reading_in_worker_processes(manifest):
    dataset = mixed(manifest)
    loader = torch.utils.data.DataLoader(
        dataset, sampler=range(1, 9, 2), batch_size=None, num_workers=1
    )
    assert all(map(same, loader, [dataset[i] for i in range(1, 9, 2)]))


def test_seed_changes_the_order(manifest):
    first = [mixed(manifest, seed=1)[i]["tokens"] for i in range(8)]
    second = [mixed(manifest, seed=2)[i]["tokens"] for i in range(8)]
    assert not torch.equal(torch.stack(first), torch.stack(second))


def test_order_is_pinned(manifest):
    """Checkpoints hold a number of samples, so this order may never change."""
    dataset = mixed(manifest, micro_batch_size=1)
    assert [int(dataset[i]["tokens"][0, 0]) for i in range(8)] == [
        170,
        90,
        190,
        0,
        110,
        40,
        1080,
        1040,
    ]
    assert shuffled(np.arange(10), 10, "key").tolist() == [0, 9, 4, 6, 7, 3, 2, 5, 8, 1]


def test_splits_share_no_token(manifest):
    seen = {}
    for split in ("train", "validation"):
        dataset = mixed(manifest, split=split, validation_fraction=0.3)
        batches = [dataset[i] for i in range(100)]
        seen[split] = {int(t) for b in batches for k in ("tokens", "labels") for t in b[k].view(-1)}
    assert not seen["train"] & seen["validation"]
    for number, num_tokens in enumerate(DOMAIN_TOKENS.values()):
        cut = 1000 * number + num_tokens - round(num_tokens * 0.3)
        for split, inside in (
            ("train", range(1000 * number, cut)),
            ("validation", range(cut, 9999)),
        ):
            domain = {t for t in seen[split] if t // 1000 == number}
            assert domain
            assert all(t in inside for t in domain)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": {"maths": 1.0}}, "data.weights names maths; .* has code, prose, rare"),
        ({"weights": {"code": -1.0}}, r"data.weights.code \(-1.0\) must be >= 0"),
        ({"weights": {"code": float("nan")}}, r"data.weights.code \(nan\) must be >= 0"),
        ({"weights": {"code": 0.0}}, "data.weights are all zero"),
        ({"sequence_length": 41}, "domain rare has 41 train tokens"),
        ({"split": "validation"}, "domain code has 0 validation tokens"),
    ],
)
def test_settings_that_cannot_work(manifest, settings, message):
    with pytest.raises(ValueError, match=message):
        mixed(manifest, **settings)


def test_a_domain_of_weight_zero_may_be_too_short(manifest):
    dataset = mixed(manifest, sequence_length=50, weights={"code": 1, "rare": 0})
    assert {name for i in range(20) for name in domains(dataset, i)} == {"code"}


def test_files_that_do_not_fit_the_manifest(manifest, tmp_path):
    moved = dataclasses.replace(manifest, folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"code\.bin or \.idx does not exist"):
        mixed(moved)
    _copy(manifest, tmp_path)
    (tmp_path / "code.bin").write_bytes((manifest.folder / "code.bin").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"by the \.idx 201, in the \.bin 191"):
        mixed(moved)


@pytest.mark.parametrize("num_bytes", [0, 5, 20, 30, 60, 500])
def test_a_cut_index_is_named_and_nothing_else_is_said(manifest, tmp_path, num_bytes, capfd):
    moved = _copy(manifest, tmp_path)
    index = tmp_path / "code.idx"
    assert index.stat().st_size > 500
    index.write_bytes(index.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=rf"^domain code: {index} is cut off"):
        mixed(moved)
    gc.collect()
    assert capfd.readouterr().err == ""


def test_an_empty_dataset_is_named(manifest, tmp_path, capfd):
    moved = _copy(manifest, tmp_path)
    (tmp_path / "code.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"^domain code: {tmp_path}/code\.bin is empty$"):
        mixed(moved)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("token", [4000, 65535])
def test_a_token_beyond_the_vocabulary_is_named_with_its_place(
    manifest, tmp_path, token, monkeypatch
):
    moved = _copy(manifest, tmp_path)
    _put(tmp_path / "code.bin", {57: token, 100: token})
    rule = rf"^{tmp_path}/code\.bin: token {token} at position 57 must be from 0 to 3999"
    with pytest.raises(ValueError, match=rule):
        mixed(moved)
    # A later one is noticed when its window is read.
    monkeypatch.setattr("megatron_ext.data.indexed._FIRST_TOKENS", 50)
    dataset = mixed(moved, weights={"code": 1})
    first = rf"^{tmp_path}/code\.bin: token {token} at position (57|100) must"
    with pytest.raises(ValueError, match=first):
        dataset.windows(range(dataset.micro_batch_size * 10))


def _copy(manifest, folder):
    for file in manifest.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return dataclasses.replace(manifest, folder=folder)


def _put(file, tokens):
    """Put other tokens into a `.bin`, by position."""
    content = np.fromfile(file, dtype=np.uint16)
    for position, token in tokens.items():
        content[position] = token
    content.tofile(file)


def test_no_negative_microbatch(manifest):
    with pytest.raises(IndexError, match="-1"):
        mixed(manifest)[-1]


@given(st.integers(1, 300), st.text(max_size=8))
def test_shuffled_is_a_permutation(size, key):
    assert sorted(shuffled(np.arange(size), size, key).tolist()) == list(range(size))


def test_shuffled_at_random_access():
    """Any part of a shuffle is what the whole would give, also of one too large to make."""
    whole = shuffled(np.arange(5000), 5000, "a")
    assert shuffled(np.array([4999, 7]), 5000, "a").tolist() == [whole[4999], whole[7]]
    size = 3 * 2**40
    far = shuffled(np.arange(size - 1000, size), size, "a")
    assert len(set(far.tolist())) == 1000
    assert far.min() >= 0
    assert far.max() < size


def test_shuffled_spreads_evenly():
    """Over keys, each position goes everywhere: chi-squared of 16 x 16 cells, 225 degrees.

    The mean of the statistic is 225 and its deviation 21, so 350 is about six deviations.
    """
    size, num_keys = 16, 4096
    cells = np.zeros((size, size))
    for number in range(num_keys):
        cells[np.arange(size), shuffled(np.arange(size), size, str(number))] += 1
    expected = num_keys / size
    assert ((cells - expected) ** 2 / expected).sum() < 350


def test_padded_vocab_size():
    assert padded_vocab_size(257, tensor_parallel=1) == 384
    assert padded_vocab_size(384, tensor_parallel=1) == 384
    assert padded_vocab_size(385, tensor_parallel=2) == 512
    assert padded_vocab_size(257, tensor_parallel=8) == 384
    assert padded_vocab_size(257, tensor_parallel=3) == 384
    assert padded_vocab_size(257, tensor_parallel=5) == 640
