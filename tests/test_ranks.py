"""The multi-process helper reports results, the first failure, a silent death and a hang."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def _sum(rank: int, offset: int) -> torch.Tensor:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return total


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _hang_on_one(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()


def test_results_come_by_rank_and_processes_are_used_again() -> None:
    assert [int(total) for total in run_ranks(_sum, 2, 10)] == [21, 21]
    pids = run_ranks(_pid, 2)
    assert run_ranks(_pid, 2) == pids
    assert [int(total) for total in run_ranks(_sum, 2, 0)] == [1, 1]


def _pid(rank: int) -> int:
    return os.getpid()


def test_the_first_failure_comes_first() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^--- rank 1\n.*ValueError: the cause"):
        run_ranks(_fail_on_one, 2)


def test_a_death_without_traceback_is_reported() -> None:
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 7"):
        run_ranks(_die_on_one, 2)


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_ended() -> None:
    run_ranks(_sum, 2, 0)  # Starting processes is not in the limit.
    with pytest.raises(TimeoutError, match=r"ranks \[1\] still ran after 5"):
        run_ranks(_hang_on_one, 2, timeout_s=5.0)
    assert [int(total) for total in run_ranks(_sum, 2, 0)] == [1, 1]
