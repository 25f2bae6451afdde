"""What a Megatron `dist_checkpointing` checkpoint holds, by its metadata; no weight is loaded.

Megatron stores the same tensor of all layers, or of all experts, under one key and puts layers and
experts on axes in front. So the shapes below tell how many there are. (In models whose layers
differ, the key has the layer's number, and the axis of layers is missing.)

    decoder.layers.mlp.router.weight                        [layers, E, H]
    decoder.layers.mlp.experts.experts.linear_fc1.weight    [layers, E, F, H]

or, with one entry per expert, `experts.experts.3.linear_fc1.weight` [layers, F, H]. Keys of the
optimizer's state end in the same names, and their tensors have the same shapes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_tools.folder import (
    COMMON_FILE,
    RUN_FILE,
    TABLE_FILE,
    find_changes,
    newest_of,
    read_checksums,
    read_run,
    stored_bytes,
)
from checkpoints_tools.pickles import read_object, read_table
from megatron_ext.files.opening import open_regular
from megatron_ext.words import ranges

# A name that a replica or its buffer would have. Only whole words: `replica_id` is Megatron's.
_TEMPORARY = re.compile(r"(?<![a-z])(slots?|replicas?)(?![a-z])", re.IGNORECASE)
_ROUTER_WEIGHT = re.compile(r"\.router\.weight$")
_EXPERT_WEIGHT = re.compile(r"\.experts\.experts\.(?:(?P<expert>\d+)\.)?linear_fc\d\.weight$")
_LAYER = re.compile(r"(.*\.)?decoder\.layers\.(?:(?P<layer>\d+)\.)?")
_EMBEDDING = "embedding.word_embeddings.weight"
_FEWEST_AXES = (
    (_ROUTER_WEIGHT, 2),
    (re.compile(r"\.experts\.experts\.linear_fc\d\.weight$"), 3),
    (re.compile(r"\.router\.(bias|expert_bias|qb_beta)$"), 1),
    (re.compile(r"\.experts\.experts\.(\d+\.)?linear_fc\d\.(weight|bias)$"), 1),
    (re.compile(rf"(^|\.){re.escape(_EMBEDDING)}$"), 1),
)
"""Axes that a tensor has at least, besides that of layers, by its name."""
_ARGUMENTS = {
    "num_ranks": "world_size",
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "ep_size": "expert_model_parallel_size",
}
"""What Megatron-LM calls the sizes in `saved_on`."""
_MOST = 65_536
"""Layers, and experts of a layer, that are counted: more than any model has."""
_OPTIMIZER = re.compile(r"(^|\.)optimizer\.")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of a checkpoint.

    Attributes:
        key: Megatron's name, the same on all ranks.
        shape: Shape of the whole tensor, over all ranks; None for an object that is not a tensor.
        dtype: Its name, such as `float32`; None for an object.
        num_shards: Pieces that it is stored in.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    num_shards: int


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """The keys of a checkpoint, and the numbers of the model that follow from them.

    Attributes:
        folder: Where the checkpoint lies.
        step: The training step it was saved after; None if the checkpoint does not hold it, or
            holds it beside classes that are not read without trust.
        num_experts: Logical experts of an MoE layer; None if the model has none.
        num_parameters: Elements of the model's tensors, without the optimizer's.
        entries: Sorted by key.
        saved_on: The ranks that saved it, as far as the checkpoint says: `num_ranks`, `tp_size`,
            `pp_size`, `ep_size`.
    """

    folder: Path
    step: int | None
    num_experts: int | None
    num_parameters: int
    entries: list[Entry]
    saved_on: dict[str, int] = field(default_factory=dict)

    def model_shape(self) -> dict[str, int]:
        """Return sizes of the model, as far as its tensors say.

        They are `num_layers`, `num_moe_layers`, `hidden_size`, `expert_hidden_size` (F), and
        `vocab_size`, with Megatron's padding.
        """
        shapes = {e.key: e.shape for e in _of_model(self.entries)}
        layers: set[int] = set()
        moe_layers: set[int] = set()
        shape = {}
        for key, sizes in shapes.items():
            if (match := _LAYER.match(key)) is None:
                continue
            own = match["layer"] is not None
            if not own and sizes[0] > _MOST:
                raise ValueError(f"{self.folder}: {key} is of {sizes[0]} layers")
            numbers = {int(match["layer"])} if own else set(range(sizes[0]))
            layers |= numbers
            if _ROUTER_WEIGHT.search(key):
                moe_layers |= numbers
                shape["hidden_size"] = sizes[-1]
            elif _EXPERT_WEIGHT.search(key) and "linear_fc2" in key:
                shape["expert_hidden_size"] = sizes[-1]
        if (embedding := shapes.get(_EMBEDDING)) is not None:
            shape |= {"vocab_size": embedding[0], "hidden_size": embedding[-1]}
        return {"num_layers": len(layers), "num_moe_layers": len(moe_layers), **shape}

    def dtypes(self) -> list[str]:
        """Return the dtypes of the model's tensors; with most elements first."""
        elements = Counter[str]()
        for entry in _of_model(self.entries):
            elements[entry.dtype or ""] += math.prod(entry.shape)
        return [dtype for dtype, _ in elements.most_common()]

    def has_optimizer(self) -> bool:
        """Whether it holds tensors of an optimizer's state."""
        return any(e.shape is not None and is_of_optimizer(e.key) for e in self.entries)


def read_contents(path: str | Path) -> CheckpointContents:
    """Read what a checkpoint holds, and run nothing that is in the checkpoint.

    Raises:
        ValueError: The checkpoint is not complete or not of this kind.
    """
    folder = newest_of(Path(path))
    metadata = read_metadata(folder)
    entries = _read_entries(metadata)
    routers = [e for e in entries if _ROUTER_WEIGHT.search(e.key) and e.shape]
    num_experts = max((e.shape[-2] for e in routers if e.shape), default=None)
    if (num_experts or 0) > _MOST:
        raise ValueError(f"{folder}: a router has {num_experts} experts")
    run = _read_run(folder, metadata)
    step = run.get("step")
    saved_on = {"num_ranks": run.get("num_ranks"), **run.get("parallel", {})}
    return CheckpointContents(
        folder=folder,
        step=step if isinstance(step, int) else None,
        saved_on={name: size for name, size in saved_on.items() if isinstance(size, int)},
        num_experts=num_experts,
        num_parameters=sum(math.prod(e.shape) for e in _of_model(entries)),
        entries=entries,
    )


def find_problems(contents: CheckpointContents) -> list[str]:
    """Return what makes a checkpoint unfit to be loaded by stock Megatron, a sentence each.

    It checks that no key names a slot or a replica, and that each of the router's experts has its
    weights once. So nothing that balancing made is in the checkpoint.
    """
    problems = [
        f"key {entry.key} names something that exists for one microbatch only"
        for entry in contents.entries
        if _TEMPORARY.search(entry.key)
    ]
    single_experts: dict[str, set[int]] = {}
    for entry in contents.entries:
        match = _EXPERT_WEIGHT.search(entry.key)
        if not match or entry.shape is None:
            continue
        if match["expert"] is not None:
            together = entry.key[: match.start("expert")] + entry.key[match.end("expert") + 1 :]
            single_experts.setdefault(together, set()).add(int(match["expert"]))
        elif entry.shape[-3] != contents.num_experts:
            problems.append(
                f"key {entry.key} holds {entry.shape[-3]} experts, the router "
                f"{contents.num_experts}"
            )
    for key, experts in single_experts.items():
        if experts != set(range(contents.num_experts or 0)):
            problems.append(
                f"key {key} is there for experts {ranges(sorted(experts))}, the router has "
                f"{contents.num_experts}"
            )
    return problems


def is_of_optimizer(key: str) -> bool:
    """Whether a key belongs to the optimizer's state, not to the model."""
    return _OPTIMIZER.search(key) is not None


def _of_model(entries: list[Entry]) -> list[Any]:
    """Return the tensors without the optimizer's."""
    return [e for e in entries if e.shape is not None and not is_of_optimizer(e.key)]


def read_metadata(folder: Path) -> Any:
    """Return a checkpoint's table of contents, torch's `Metadata`. Nothing in it is run.

    Raises:
        ValueError: The table is missing, damaged, or names what no table needs; or it or another
            of the small files was changed.
    """
    try:
        recorded = read_checksums(folder) or {}
        small = [name for name in (TABLE_FILE, RUN_FILE, COMMON_FILE) if name in recorded]
        if changes := find_changes(folder, [name for name in small if (folder / name).exists()]):
            raise ValueError(changes[0])
        table = read_table(folder / TABLE_FILE)
        for key, entry in table.state_dict_metadata.items():
            if hasattr(entry, "chunks") and len(entry.size) < _fewest_axes(key):
                raise ValueError(f"{key} is of {list(entry.size)}, too few axes for its name")
        return table
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} has no {TABLE_FILE}: it was not written to the end, or not as `torch_dist`"
        ) from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _fewest_axes(key: str) -> int:
    layer = _LAYER.match(key)
    has_layers = layer is not None and layer["layer"] is None
    return has_layers + max((axes for name, axes in _FEWEST_AXES if name.search(key)), default=0)


def _read_entries(metadata: Any) -> list[Entry]:
    # Torch takes seconds to import, and `--help` must not wait for it.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries: dict[str, Entry] = {}
    for stored_key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            entries[stored_key] = Entry(
                key=stored_key,
                shape=tuple(stored.size),
                dtype=str(stored.properties.dtype).removeprefix("torch."),
                num_shards=len(stored.chunks),
            )
        else:
            # An object's shards are stored one by one, as `key/shard_<place>_<places>`.
            key = stored_key.partition("/shard_")[0]
            shards = entries[key].num_shards + 1 if key in entries else 1
            entries[key] = Entry(key=key, shape=None, dtype=None, num_shards=shards)
    return [entries[key] for key in sorted(entries)]


def _read_run(folder: Path, metadata: Any) -> dict[str, Any]:
    """Return our `run.json`, or as much of one as the common state of Megatron's training says."""
    if (folder / RUN_FILE).is_file():
        return read_run(folder)
    try:
        common = _read_common(folder, metadata)
        arguments = getattr(common.get("args"), "__dict__", {})
    # There is none, or it holds more than can be read without trust.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    sizes = {name: arguments.get(theirs) for name, theirs in _ARGUMENTS.items()}
    groups = common.get("router_groups")
    if arguments.get("moe_router_group_topk"):
        groups = arguments.get("moe_router_num_groups")
    return {"step": common.get("iteration"), "parallel": sizes, "router_groups": groups}


def router_groups(folder: Path, metadata: Any) -> int:
    """Return among how many groups of neighboring experts routers choose; 1 if nothing says so."""
    groups = _read_run(folder, metadata).get("router_groups")
    return groups if isinstance(groups, int) and groups > 1 else 1


def sizes_of_pieces(table: Any) -> dict[tuple[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the sizes of the pieces of all tensors, by name and where the piece begins in it."""
    return {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key, entry in table.state_dict_metadata.items()
        for chunk in getattr(entry, "chunks", ())
    }


def _read_common(folder: Path, metadata: Any) -> dict[str, Any]:
    """Return what is no tensor and the same on all ranks: in a file, or of 0.19 an object."""
    if (folder / COMMON_FILE).is_file():
        with open_regular(folder / COMMON_FILE, follow=True) as file:
            common: dict[str, Any] = read_object(file)
            return common
    stored = {index.fqn: entry for index, entry in metadata.storage_data.items()}
    (common,) = read_object(stored_bytes(folder, stored["common_state/shard_0_1"]))
    return common
