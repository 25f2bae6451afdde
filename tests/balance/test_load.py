"""The gathered load of real gloo ranks against the routing maps they counted."""

import pytest
import torch

from megatron_ext.balance.load import gather_load
from tests import workloads
from tests.ranks import run_ranks

EXPERTS = 6
TOKENS = (7, 0, 300)  # unequal, and a rank without tokens


def _routing_map(rank):
    return workloads.routing_map(TOKENS[rank], EXPERTS, 2, seed=rank)


def _gather(rank):
    return gather_load(_routing_map(rank), torch.distributed.group.WORLD)


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_the_same_exact_load(world_size):
    expected = torch.stack([_routing_map(rank).sum(0) for rank in range(world_size)])
    for load in run_ranks(_gather, world_size):
        assert load.dtype == torch.int64
        assert torch.equal(load, expected)
