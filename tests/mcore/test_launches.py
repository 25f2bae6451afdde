"""What one balanced layer gives a GPU to do, and that it makes the host wait for nothing.

Counted on CPU ranks, by `tests/perf/launches.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.perf.launches import KERNELS, count

CSRC = Path(__file__).parents[2] / "csrc"


@pytest.fixture(scope="module")
def quota():
    """The work of a layer with the strategy `quota`, by phase."""
    return count()


@pytest.fixture(scope="module")
def stock():
    """The same of Megatron's own layer."""
    return count(None)


def test_from_choices_to_instances(quota) -> None:
    transfers = {"push": 1, "wait": 1}
    assert quota["routing"].pop("by_name") == transfers | {
        "count_load": 2,
        "_allgather_base_": 1,
        "narrow_copy": 1,
        "solve_quota": 1,
        "seal_plan": 1,
        "copy of slots to the host": 1,
        "share_plan": 1,
        "assign": 2,
        "place": 1,
    }


def test_the_host_waits_where_megatron_lets_it_wait(quota, stock) -> None:
    assert quota["forward"]["by_name"]["_grouped_mm"] == 4, "a slot had tokens"
    assert quota["backward"]["by_name"]["pull_add"] == KERNELS["pull_add"]
    for phase in ("routing", "forward", "backward"):
        assert quota[phase]["our_syncs"] == stock[phase]["our_syncs"] == []
    assert "moe/token_dispatcher.py: counts" in stock["forward"]["megatrons_syncs"]
    for phase in ("forward", "backward"):
        assert quota[phase]["megatrons_syncs"] == stock[phase]["megatrons_syncs"]


@pytest.mark.parametrize(
    ("file", "ops"),
    [
        ("count_load", ("count_load",)),
        ("seal_plan", ("seal_plan",)),
        ("split_quota", ("share_plan",)),
        # A copy serves both ways.
        ("assign", ("assign", "place")),
        ("push_peers", ("push",)),
    ],
)
def test_kernels_are_counted_as_the_sources_launch_them(file, ops) -> None:
    text = (CSRC / "cuda" / f"{file}.cu").read_text()
    launches = len(re.findall(r"<<<|cudaMemsetAsync\(|cudaMemcpyAsync\(", text))
    assert launches == sum(KERNELS[op] for op in ops)
