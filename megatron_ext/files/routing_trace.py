"""Reads the routing that Megatron-Core writes itself (`--moe-routing-trace-path`), as loads.

Since 0.19 each rank writes `router_trace_rank{rank}.jsonl`: a line for each MoE layer that a
microbatch passed, with the experts that its tokens chose.

    {"step": 7, "stage": "pre_dispatch", "block": "decoder" or "mtp", "mtp_idx": 0 (of mtp only),
     "layer": 3, "rank": 0, "num_tokens": 128, "topk": 2, "top_indices": [[12, 45], ...]}

What the files do not say is asked for: the ranks of an EP group, the pipeline stages, and the
number of experts. Ranks are in Megatron's order: those of an EP group follow each other, stages are
the slowest. `layer` counts from 0 within the stage; loads have the layers that follow from stages
of equal length, from 1, and those that predict further tokens (MTP) after them. Loads of several EP
groups count as further microbatches, and so do those that are there again: of an evaluation before
the step, or of a layer that is recomputed.

Legend: R ranks of an EP group, E logical experts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from megatron_ext.files.loads import TRACE_FIELDS, Loads
from megatron_ext.files.opening import whole_lines
from megatron_ext.files.schema import MOST_EXPERTS

_FILE = re.compile(r"router_trace_rank(\d+)\.jsonl")
_STAGE = "pre_dispatch"
_BLOCKS = ("decoder", "mtp")
_LONGEST = 2**30
"""Bytes of a line; a million tokens of eight choices need a tenth of that."""


class _Layer(NamedTuple):
    """A layer as a rank's file names it; sorts in the order of the model."""

    block: int
    head: int
    layer: int


_Counts: TypeAlias = dict[int, dict[_Layer, list[np.ndarray]]]
"""What a rank's microbatches chose, by step and layer: counts by expert up to the highest chosen
one, int64."""


def is_routing_trace(path: Path) -> bool:
    """Return whether a folder holds such files."""
    return path.is_dir() and any(_FILE.fullmatch(file.name) for file in path.iterdir())


def read_routing_trace(
    folder: Path, *, ep_size: int, pp_size: int = 1, num_experts: int | None = None
) -> Loads:
    """Read the files of all ranks, and return the loads in the order of step, microbatch and layer.

    The lines of a killed run that not all ranks wrote are left out: a torn last line, and the last
    steps. `ep_size` may be the run's, or another to find out about. Without `num_experts`, the
    highest expert that was chosen counts as the last.

    Raises:
        FileNotFoundError: The folder has no such files, or one of a rank is missing.
        ValueError: A line is not of this format, or ranks, groups and experts do not fit each
            other; the message names file, value and rule.
    """
    files = _files(folder)
    if ep_size < 1 or pp_size < 1 or len(files) % (ep_size * pp_size):
        raise ValueError(
            f"{folder} is of {len(files)} ranks: that must be a multiple of --ep-size x --pp-size "
            f"({ep_size} x {pp_size})"
        )
    counts = [_read_rank(file, rank) for rank, file in enumerate(files)]
    groups = [list(range(start, start + ep_size)) for start in range(0, len(files), ep_size)]
    _keep_common_steps(folder, counts, groups)
    experts = _num_experts(folder, counts, num_experts, ep_size)
    numbers = _layer_numbers(counts, pp_size)
    found: dict[tuple[int, int, int], np.ndarray] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for group in groups:
        stage = group[0] // (len(files) // pp_size)
        for step, layers in counts[group[0]].items():
            for name in layers:
                layer = numbers[stage, name]
                for parts in zip(*(counts[rank][step][name] for rank in group), strict=True):
                    padded = [np.pad(chosen, (0, experts - len(chosen))) for chosen in parts]
                    found[step, seen[step, layer], layer] = np.stack(padded)
                    seen[step, layer] += 1
    keys = sorted(found)
    load = torch.from_numpy(np.stack([found.pop(key) for key in keys]))
    columns = torch.tensor(keys).T.contiguous()
    return Loads(load, dict(zip(TRACE_FIELDS, columns, strict=True)))


def _files(folder: Path) -> list[Path]:
    by_rank = {
        int(match[1]): file for file in folder.iterdir() if (match := _FILE.fullmatch(file.name))
    }
    for rank in range(max(by_rank, default=0) + 1):
        if rank not in by_rank:
            raise FileNotFoundError(
                f"{folder} has no router_trace_rank{rank}.jsonl: copy those of all ranks there"
            )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _read_rank(path: Path, rank: int) -> _Counts:
    counts: _Counts = {}
    for number, line in enumerate(whole_lines(path, follow=True, most_bytes=_LONGEST), 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "stage" not in record:
                raise ValueError("it has no 'stage'")
            if record["stage"] == _STAGE:
                step, layer, chosen = _parse(record, rank)
                counts.setdefault(step, {}).setdefault(layer, []).append(chosen)
        # A RecursionError is Python's answer to brackets without end.
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is not of Megatron's routing trace: {error}"
            ) from None
    if not counts:
        raise ValueError(f"{path} has no line of stage {_STAGE!r}")
    return counts


def _parse(record: Mapping[str, Any], rank: int) -> tuple[int, _Layer, np.ndarray]:
    """Return step and layer of the record, and how often each expert was chosen."""
    if record.get("block") not in _BLOCKS:
        raise ValueError(f"block ({_short(record.get('block'))}) must be {' or '.join(_BLOCKS)}")
    if (of := _count(record, "rank")) != rank:
        raise ValueError(f"rank ({of}) must be that of the file's name")
    shape = (_count(record, "num_tokens"), _count(record, "topk"))
    chosen = np.asarray(record.get("top_indices"))
    if not chosen.size and not shape[0]:  # Of a rank without tokens.
        chosen = np.empty(shape, dtype=np.int64)
    if chosen.dtype.kind != "i" or chosen.shape != shape:
        raise ValueError(f"top_indices must be {shape[0]} x {shape[1]} (num_tokens x topk) experts")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < MOST_EXPERTS:
        raise ValueError(f"top_indices must be >= 0 and < {MOST_EXPERTS}")
    head = _count(record, "mtp_idx") if "mtp_idx" in record else 0
    layer = _Layer(_BLOCKS.index(record["block"]), head, _count(record, "layer"))
    return _count(record, "step"), layer, np.bincount(chosen.ravel())


def _count(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError(f"{name} ({_short(value)}) must be a whole number >= 0")
    return value


def _short(value: Any) -> str:
    return repr(value)[:40]


def _keep_common_steps(
    folder: Path, counts: Sequence[_Counts], groups: Sequence[Sequence[int]]
) -> None:
    """Drop the last steps, as far as some rank has not written them; all before must be whole."""
    last = min(max(of_rank) for of_rank in counts)
    if any(_differ(counts, group, last) for group in groups):
        last -= 1
    for of_rank in counts:
        for step in [step for step in of_rank if step > last]:
            del of_rank[step]
    for group in groups:
        for step in sorted({step for rank in group for step in counts[rank]}):
            if rank := _differ(counts, group, step):
                raise ValueError(
                    f"{folder}: ranks {group[0]} and {rank} of an EP group have not as many lines "
                    f"of each layer in step {step}: ranks of a group follow each other (--ep-size, "
                    "--pp-size), and Megatron writes none where tokens were dropped or padded"
                )
    if not all(counts):
        raise ValueError(f"{folder} has no step that all ranks wrote")


def _differ(counts: Sequence[_Counts], group: Sequence[int], step: int) -> int:
    """Return a rank whose layers have not as many lines as the group's first rank's, or 0."""
    sizes = {
        rank: {name: len(parts) for name, parts in counts[rank].get(step, {}).items()}
        for rank in group
    }
    return next((rank for rank in group if sizes[rank] != sizes[group[0]]), 0)


def _num_experts(folder: Path, counts: Sequence[_Counts], asked: int | None, ep_size: int) -> int:
    least = max(len(chosen) for _, parts in _layers(counts) for chosen in parts)
    experts = least if asked is None else asked
    if experts < least:
        raise ValueError(
            f"{folder}: expert {least - 1} was chosen (from 0), so the experts ({experts}) must be "
            f">= {least}"
        )
    if not experts or experts % ep_size:
        guessed = "" if asked is not None else "; the last may not have been chosen: say --experts"
        raise ValueError(
            f"{folder}: experts ({experts}) must be a multiple of --ep-size ({ep_size}){guessed}"
        )
    return experts


def _layer_numbers(counts: Sequence[_Counts], pp_size: int) -> dict[tuple[int, _Layer], int]:
    """Number the layers of all stages, from 1; those that predict further tokens come last."""
    layers = sorted({layer for layer, _ in _layers(counts)})
    decoder = [layer for layer in layers if _BLOCKS[layer.block] == "decoder"]
    further = [layer for layer in layers if layer not in decoder]
    of_stage = max((layer.layer + 1 for layer in decoder), default=0)
    last = pp_size * of_stage
    numbers: dict[tuple[int, _Layer], int] = {}
    for stage in range(pp_size):
        numbers |= {(stage, each): stage * of_stage + each.layer + 1 for each in decoder}
        numbers |= {(stage, each): number for number, each in enumerate(further, last + 1)}
    return numbers


def _layers(counts: Sequence[_Counts]) -> Iterator[tuple[_Layer, list[np.ndarray]]]:
    """Yield every layer of every step and rank, with its counts."""
    for of_rank in counts:
        for of_step in of_rank.values():
            yield from of_step.items()
