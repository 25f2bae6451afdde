"""A wait that failed on one rank ends the step on all ranks, before a weight changes.

Between GPUs the device waits, and the host learns of a failed wait at its next call of the
transport. After the last reduction of a step, that call comes only after the optimizer step. The
same holds for plans that differ between ranks, which the device finds. So

    gradients are finished   the failures of all ranks of the model are counted, in a reduction of
                             one word; the host waits for it on gloo, but not between GPUs
    an optimizer steps       the host looks at the count; if it is not 0, all ranks raise
    gradients are zeroed     the same, where the optimizer has skipped its step

Megatron's optimizer reads the norm of all gradients before its step. By then the count has arrived,
so the host does not wait longer than without the count.

A rank that finds a failure in its own call of a transport raises at once: its peer may have died,
and then no reduction ends.

`process_hooks.py` calls `start_count` and `look` at these three places. Behind a replay of a whole
step, `full_graphs.py` calls `count_and_look`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from torch.distributed import ProcessGroup

from megatron_ext.balance.agreement import Agreement, agreements_in_use
from megatron_ext.balance.slots import transports_in_use
from megatron_ext.mcore.planning_group import warn_if_late
from megatron_ext.transport import HostCopy, Transport
from megatron_ext.transport.reach import gather

logger = logging.getLogger(__name__)


_counts: list[tuple[HostCopy, list[ProcessGroup]]] = []
"""What the host has not looked at, for each chunk of each model in a step: the number of failures
of all ranks, int32 [1], and groups that one after the other connect all ranks of the model."""

_late: list[Timer] = []
"""Warns if the first count of this process does not end."""


def count_and_look(model: Iterable[nn.Module]) -> None:
    """Count, and look at once: before a checkpoint, and behind a replay.

    All ranks of the model call. Chunks in none of Megatron's data-parallel wrappers are left out.

    Raises:
        RuntimeError: As `look`.
    """
    for chunk in model:
        if isinstance(chunk, _BaseDataParallel):
            start_count(chunk)
            look()
            return


def forget() -> None:
    """Forget the counts of an aborted step."""
    _counts.clear()
    while _late:
        _late.pop().cancel()


def look() -> None:
    """Look at the counts since the last look; all ranks of the models call.

    Raises:
        RuntimeError: A wait of some rank has failed, or a rank has found other plans than its own.
            All ranks raise the same error, which names the rank that waited, the peer and the
            awaited work, or the ranks whose plans differ.
    """
    counts = _counts[:]
    _counts.clear()
    # Each model by itself, because some of its ranks may be in no other model.
    failed = [groups for number, groups in counts if int(number.wait())]
    for timer in _late:
        timer.cancel()
    if failed:
        _raise_on_all([group for groups in failed for group in groups])


def start_count(ddp: Any) -> None:
    """Count what has failed when the work issued so far is done."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number = torch.zeros(1, dtype=torch.int32, device=device)
    for each in _in_use():
        if (failed := each.failed) is not None:
            number += failed.to(device, non_blocking=True)
    groups = _groups(ddp)
    if groups and not _late:
        _late.append(warn_if_late("of the model to count failed waits"))
    for group in groups:
        dist.all_reduce(number, group=group)
    on_host = HostCopy((1,), number.dtype, device)
    on_host.start(number)
    _counts.append((on_host, groups))


def _in_use() -> list[Transport | Agreement]:
    """What fails late: the device notices, and the host hears of it."""
    return [*transports_in_use(), *agreements_in_use()]


def _groups(ddp: Any) -> list[ProcessGroup]:
    """The groups of data, tensor and pipeline parallelism: a grid of all ranks of the model."""
    if hasattr(ddp, "dp_cp_group"):
        pipelines = ddp.pp_group if isinstance(ddp.pp_group, list) else [ddp.pp_group]
        groups = [ddp.dp_cp_group, ddp.tp_group, *pipelines]
    else:  # Megatron-FSDP keeps meshes of the data-parallel groups only.
        groups = [
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ]
    return [group for group in groups if group.size() > 1]


def _raise_on_all(groups: list[ProcessGroup]) -> None:
    said: set[str] = set()
    for each in _in_use():
        try:
            each.raise_failure()
        except RuntimeError as failure:
            said.add(f"global rank {dist.get_rank()}: {failure}")
            # Logged before the gather, which does not end if another rank has died.
            logger.error("%s", failure)
    for group in groups:
        said = set().union(*gather(said, group))
    raise RuntimeError(
        "a wait for replicas failed or plans differ, and the step ends on all ranks before it "
        f"changes a weight: {'; '.join(sorted(said))}"
    )
