"""The gathered load of real gloo ranks against the routing maps they counted."""

import pytest
import torch

from megatron_ext.balance.load import gather_counts, load_of
from tests import workloads
from tests.ranks import run_ranks

EXPERTS = 6
TOKENS = (7, 0, 300)  # unequal, and a rank without tokens


def _routing_map(rank):
    return workloads.routing_map(TOKENS[rank], EXPERTS, 2, seed=rank)


def _gather(rank, ep_size):
    counts, _ = gather_counts(_routing_map(rank), torch.distributed.group.WORLD)
    return load_of(counts, ep_size)


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (3, 3), (3, 1)])
def test_every_rank_gets_the_same_exact_load(world_size, ep_size):
    counts = torch.stack([_routing_map(rank).sum(0) for rank in range(world_size)])
    expected = counts if ep_size == world_size else counts.sum(0, keepdim=True)
    for load in run_ranks(_gather, world_size, ep_size):
        assert load.dtype == torch.int64
        assert torch.equal(load, expected)
