"""Ids and places of experts, against the numbering written out by hand."""

import pytest

from megatron_ext.balance.layout import ExpertLayout


def make(**changes):
    return ExpertLayout(
        **{"num_experts": 8, "ep_size": 4, "slots": 1, "nvlink_domain": 2, **changes}
    )


@pytest.mark.parametrize("value", [1.0, "1", True, None])
def test_numbers_that_are_not_whole(value):
    with pytest.raises(ValueError, match=rf"^slots \({value!r}\) must be a whole number >= 0$"):
        make(slots=value)


def test_numbers_of_the_worked_example():
    layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    assert (layout.mains_per_rank, layout.physical_per_rank, layout.num_physical) == (2, 3, 6)
    assert [layout.home_rank(e) for e in range(4)] == [0, 0, 1, 1]


def test_domains_are_runs_of_ranks():
    assert [make().domain(r) for r in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 10}, r"num_experts \(10\) must be a multiple of ep_size \(4\)"),
        ({"slots": -1}, r"slots \(-1\) must be >= 0"),
        ({"ep_size": 0}, r"ep_size \(0\) must be >= 1"),
        ({"num_experts": 0}, r"num_experts \(0\) must be >= 1"),
        ({"nvlink_domain": 3}, r"nvlink_domain \(3\) must divide ep_size \(4\)"),
        ({"nvlink_domain": 0}, r"nvlink_domain \(0\) must be >= 1"),
    ],
)
def test_wrong_numbers(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
