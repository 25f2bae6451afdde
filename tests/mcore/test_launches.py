"""What one balanced layer gives a GPU to do, and that it makes the host wait for nothing.

Counted on CPU ranks, by `tests/perf/launches.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.perf.launches import KERNELS, QUOTA, count

CSRC = Path(__file__).parents[2] / "csrc"


@pytest.fixture(scope="module")
def quota():
    """The work of a layer with the strategy `quota`, by phase."""
    return count()


@pytest.fixture(scope="module")
def stock():
    """The same of Megatron's own layer."""
    return count(None)


MOST_LAUNCHES = 7
"""From a router's choices to choices of instances; the wait for the replicas comes later."""


def test_from_choices_to_instances(quota) -> None:
    assert quota["routing"]["by_name"] == {
        "push": 1,
        "count_load": 2,
        "gather_rows": 1,
        "solve_quota": 1,
        "share_and_seal": 1,
        "reroute": 1,
    }
    assert quota["routing"]["launches"] <= MOST_LAUNCHES
    assert quota["forward"]["by_name"]["wait"] == 1


def test_ranks_that_reach_each_other_gather_nothing_by_collectives(quota, stock) -> None:
    gathered = {
        name: work["forward"]["by_name"] for name, work in (("quota", quota), ("stock", stock))
    }
    assert gathered["stock"]["_allgather_base_"] == 1, "Megatron's dispatcher asks for counts"
    assert "_allgather_base_" not in gathered["quota"]
    # The load, and the seals that are compared before tokens travel.
    assert gathered["quota"]["gather_rows"] == 2


def test_the_host_waits_where_megatron_lets_it_wait(quota, stock) -> None:
    assert quota["forward"]["by_name"]["_grouped_mm"] == 4, "a slot had tokens"
    assert "wait" not in quota["backward"]["by_name"], "a pull's own launch is its end"
    for phase in ("routing", "forward", "backward"):
        assert quota[phase]["our_syncs"] == stock[phase]["our_syncs"] == []
    assert "moe/token_dispatcher.py: counts" in stock["forward"]["megatrons_syncs"]
    for phase in ("forward", "backward"):
        assert quota[phase]["megatrons_syncs"] == stock[phase]["megatrons_syncs"]


PRODUCTS = {"_grouped_mm", "mul", "gelu_backward", "sum", "cat", "zeros"}
"""What this package's grouped experts launch for slots apart from mains; others do not."""


def test_backward_reads_the_plan_on_the_device(quota, stock) -> None:
    """Two launches reduce, one brings gradients of probabilities back; unfused ones are copied."""
    launched, before = (Counter(work["backward"]["by_name"]) for work in (quota, stock))
    added = {name: count for name, count in (launched - before).items() if name not in PRODUCTS}
    assert added == {"pull_add": KERNELS["pull_add"], "place_back": 1, "copy_": 2}


@pytest.mark.parametrize("setting", [dict(local_first=True), dict(transport="collective")])
def test_no_way_of_tokens_or_replicas_makes_the_host_wait(setting, stock) -> None:
    work = count(dataclasses.replace(QUOTA, **setting))
    for phase in ("routing", "forward", "backward"):
        assert work[phase]["our_syncs"] == []
        assert work[phase]["megatrons_syncs"] == stock[phase]["megatrons_syncs"] * (
            phase != "routing"
        )
    if "transport" in setting:
        gathered = work["forward"]["by_name"]
        assert gathered["_allgather_base_"] == 2, "the load, and the seals"
        assert "gather_rows" not in gathered


@pytest.mark.parametrize(
    "dispatcher",
    [
        dict(dispatcher="allgather"),
        dict(dispatcher="flex", moe_flex_dispatcher_backend="deepep"),
        dict(dispatcher="flex", moe_flex_dispatcher_backend="hybridep"),
    ],
    ids=lambda settings: settings.get("moe_flex_dispatcher_backend", "allgather"),
)
def test_with_no_dispatcher_the_host_waits_for_us(dispatcher) -> None:
    quota, stock = count(**dispatcher), count(None, **dispatcher)
    assert quota["forward"]["by_name"]["_grouped_mm"] == 4, "a slot had tokens"
    assert quota["routing"]["launches"] <= MOST_LAUNCHES
    assert stock["forward"]["megatrons_syncs"], "each asks the device how many tokens came"
    for phase in ("routing", "forward", "backward"):
        assert quota[phase]["our_syncs"] == stock[phase]["our_syncs"] == []
    for phase in ("forward", "backward"):
        assert quota[phase]["megatrons_syncs"] == stock[phase]["megatrons_syncs"]


@pytest.mark.parametrize(
    ("file", "in_file"),
    [
        ("count_load", KERNELS["count_load"]),
        # Once for all tries. Over domains, behind their sums, and again.
        ("solve_quota", 1 + KERNELS["solve_quota"]),
        ("share_plan", KERNELS["share_and_seal"]),
        # For shares that come as they are, lines are laid before; and values come back.
        ("assign", 1 + KERNELS["reroute"] + KERNELS["place_back"]),
        ("push_peers", KERNELS["push"]),
        ("gather_rows", KERNELS["gather_rows"]),
        ("wait_peers", KERNELS["wait"]),
        ("set_aside", KERNELS["set_aside"]),
    ],
)
def test_kernels_are_counted_as_the_sources_launch_them(file, in_file) -> None:
    text = (CSRC / "cuda" / f"{file}.cu").read_text()
    assert len(re.findall(r"<<<|cudaMemsetAsync\(|cudaMemcpyAsync\(", text)) == in_file


def test_operations_copy_no_load_and_no_tables() -> None:
    """What an operation launches besides its kernels: nothing, for what the layer gives it."""
    text = (CSRC / "bindings" / "device.cpp").read_text()
    assert "with_whole_rows(load)" in text
    assert not re.search(
        r"load\.contiguous\(|at::(zeros|full|cat|stack)|\.(copy_|zero_|fill_)\(", text
    )
