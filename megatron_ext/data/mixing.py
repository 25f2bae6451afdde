"""Mixes indexed datasets: which text a data-parallel rank sees in which microbatch.

Everything is a pure function of the settings and of an index: microbatch i is the same on every
rank, after any microbatches before, for any number of steps, and with any balance strategy. So the
only state of a run is one integer, and a resumed run continues exactly.

1. A *draw* picks a domain; a draw is a microbatch or a sample (`mix_by`). Draws come in periods of
   about `DRAWS_PER_PERIOD`, in which each domain has a number of draws in proportion to its weight,
   shuffled.
2. The k-th sample of a domain is window `k mod n` of its n windows, in an order shuffled anew in
   each epoch.
3. A window is `sequence_length + 1` consecutive tokens of the domain's stream, over document
   boundaries, and shares its last token with the next: each token but the first is predicted once
   per epoch.

Megatron's own `GPTDataset` is not used here: the number of steps planned changes the order of its
samples, and its blending knows no microbatches.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.data.indexed import open_domain, read_tokens
from megatron_ext.data.manifest import Manifest

# Weights are met to one part in so many: few enough that a run of 10 000 microbatches meets them.
DRAWS_PER_PERIOD = 4096
# The fewest rounds that make a Feistel network a good shuffle.
_FEISTEL_ROUNDS = 4


class MixedDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """An endless sequence of microbatches drawn from the domains of one dataset folder.

    The sequence has no state and only reads its files: it may be shared, pickled and read out of
    order. `seed` decides the order of domains and windows. `weights` are shares of the draws by
    domain name, in any unit: a domain that they do not name has no draws. Without weights, draws
    are in proportion to the domains' tokens. The split `validation` is the last
    `validation_fraction` of each domain's tokens, `train` the others.

    Raises:
        FileNotFoundError: An indexed dataset that the manifest names is missing.
        ValueError: `weights` are out of range or name an unknown domain; a domain is too short for
            one sample; or files and manifest disagree.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        split: str,
        sequence_length: int,
        micro_batch_size: int,
        seed: int,
        weights: Mapping[str, float],
        mix_by: str,
        validation_fraction: float,
    ) -> None:
        shares = _shares(manifest, weights)
        self.sequence_length = sequence_length
        self.micro_batch_size = micro_batch_size
        self._key = f"{seed}/{split}"
        self._samples_per_draw = micro_batch_size if mix_by == "microbatch" else 1
        self._streams = [
            _Stream(manifest, name, split, sequence_length, validation_fraction) for name in shares
        ]
        # At least one draw, so that a rare domain is seen at all.
        self._draws_per_period = tuple(
            max(1, round(share * DRAWS_PER_PERIOD)) for share in shares.values()
        )

    def order(self) -> dict[str, Any]:
        """Return what decides which sample comes when, by setting, for JSON."""
        draws = zip(self._draws_per_period, self._streams, strict=True)
        return {
            "seed": self._key,
            "data.sequence_length": self.sequence_length,
            "data.micro_batch_size or data.mix_by": self._samples_per_draw,
            "data.path, data.weights or data.validation_fraction": {
                stream.name: [draws_of_it, stream.num_windows] for draws_of_it, stream in draws
            },
        }

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return microbatch `index` (>= 0) of the whole run, over all data-parallel ranks.

        Returns:
            `tokens`, `labels` (the tokens one position later) and `position_ids`, int64, and
            `loss_mask` (ones), float32; all [micro_batch_size, sequence_length] on the CPU.
        """
        if index < 0:
            raise IndexError(f"microbatch {index} must be >= 0")
        first = index * self.micro_batch_size
        return self.as_microbatch(self.windows(range(first, first + self.micro_batch_size)))

    def windows(self, samples: range) -> NDArray[np.int64]:
        """Return the tokens of samples of the whole run, int64 [samples, sequence_length + 1]."""
        return np.stack([self._window(sample) for sample in samples])

    def as_microbatch(self, windows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Make a microbatch, as `__getitem__` returns it, from the tokens of its samples."""
        block = torch.from_numpy(windows)
        shape = (self.micro_batch_size, self.sequence_length)
        return {
            "tokens": block[:, :-1].contiguous(),
            "labels": block[:, 1:].contiguous(),
            "loss_mask": torch.ones(shape, dtype=torch.float32),
            "position_ids": torch.arange(self.sequence_length).repeat(self.micro_batch_size, 1),
        }

    def _window(self, sample: int) -> NDArray[np.int64]:
        draw, offset = divmod(sample, self._samples_per_draw)
        period, place = divmod(draw, sum(self._draws_per_period))
        domains, counts = _period(self._draws_per_period, f"{self._key}/{period}")
        domain = int(domains[place])
        draws_before = period * self._draws_per_period[domain] + int(counts[place])
        stream = self._streams[domain]
        count = draws_before * self._samples_per_draw + offset  # Earlier samples of the domain.
        epoch, position = divmod(count, stream.num_windows)
        key = f"{self._key}/{stream.name}/{epoch}"
        window = shuffled(np.array([position]), stream.num_windows, key)[0]
        return stream.read(int(window))


def microbatches(
    dataset: MixedDataset,
    *,
    consumed_samples: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[dict[str, Tensor]]:
    """Return the microbatches of one data-parallel rank, from where a run stands, without end.

    The ranks take turns: microbatch i of the whole run goes to rank `i mod data_parallel_size`, so
    the order of the whole run does not depend on the number of ranks. Data-parallel ranks, those of
    an EP group among them, read different samples. `consumed_samples`, over all ranks together, is
    the state of a run.

    Raises:
        ValueError: `consumed_samples` is not a whole number of microbatches.
    """
    first, rest = divmod(consumed_samples, dataset.micro_batch_size)
    if rest:
        raise ValueError(
            f"consumed_samples ({consumed_samples}) must be a multiple of "
            f"micro_batch_size ({dataset.micro_batch_size})"
        )
    return (dataset[i] for i in itertools.count(first + data_parallel_rank, data_parallel_size))


def shuffled(positions: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Return where a shuffle of `range(size)` puts each position, without making the shuffle.

    A Feistel network permutes the next power of four; results outside are sent through again until
    they are inside, which keeps it a permutation. So the order of a billion windows takes no memory
    and no start-up time, and the result never changes with a library's version, as exact resuming
    needs. Positions and results are int64 in [0, size); `key` names the shuffle.

    >>> sorted(shuffled(np.arange(5), 5, "a").tolist())
    [0, 1, 2, 3, 4]
    """
    half_bits = np.uint64(max(1, math.ceil((size - 1).bit_length() / 2)))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    values = positions.astype(np.uint64)
    todo = np.ones(values.shape, dtype=bool)
    while todo.any():
        left, right = values[todo] >> half_bits, values[todo] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values[todo] = (left << half_bits) | right
        todo = values >= size
    return values.astype(np.int64)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter the bits of each value (the finalizer of the splitmix64 generator)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=8)
def _period(
    draws_per_period: tuple[int, ...], key: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each draw of a period, its domain and the number of earlier draws of that domain.

    The cache helps because thousands of draws in a row ask for the same period.
    """
    num_draws = sum(draws_per_period)
    order = shuffled(np.arange(num_draws), num_draws, key)
    domains = np.repeat(np.arange(len(draws_per_period)), draws_per_period)[order]
    counts = np.empty(num_draws, dtype=np.int64)
    for domain, total in enumerate(draws_per_period):
        counts[domains == domain] = np.arange(total)
    return domains, counts


class _Stream:
    """The tokens of one domain's split, cut into windows."""

    def __init__(
        self,
        manifest: Manifest,
        name: str,
        split: str,
        sequence_length: int,
        validation_fraction: float,
    ) -> None:
        self.name = name
        self._dataset = open_domain(manifest, name)
        self._vocab_size = manifest.vocab_size
        num_tokens = manifest.domains[name].tokens
        num_validation = round(num_tokens * validation_fraction)
        num_train = num_tokens - num_validation
        self._start, num_split = (0, num_train) if split == "train" else (num_train, num_validation)
        self._sequence_length = sequence_length
        self.num_windows = (num_split - 1) // sequence_length
        if self.num_windows < 1:
            raise ValueError(
                f"domain {name} has {num_split} {split} tokens, fewer than one sample "
                f"(sequence_length {sequence_length} + 1)"
            )

    def read(self, window: int) -> NDArray[np.int64]:
        """Return the tokens of one window, int64 [sequence_length + 1]."""
        start = self._start + window * self._sequence_length
        return read_tokens(self._dataset, start, self._sequence_length + 1, self._vocab_size)


def _shares(manifest: Manifest, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the draws of every domain that has some; they sum to 1."""
    unknown = sorted(set(weights) - set(manifest.domains))
    if unknown:
        raise ValueError(
            f"data.weights names {', '.join(unknown)}; the dataset at {manifest.folder} has "
            f"{', '.join(manifest.domains)}"
        )
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"data.weights.{name} ({weight}) must be >= 0")
    by_tokens = {name: domain.tokens for name, domain in manifest.domains.items()}
    # In the manifest's order, so that the order of words on a command line changes nothing.
    chosen = {name: float((weights or by_tokens).get(name, 0)) for name in manifest.domains}
    total = sum(chosen.values())
    if total <= 0:
        raise ValueError("data.weights are all zero")
    return {name: weight / total for name, weight in chosen.items() if weight > 0}
