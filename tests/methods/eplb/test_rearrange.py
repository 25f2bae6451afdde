"""EPLB's re-layout: the published example, a small one by hand, and what every layout must be.

Of a trace: that its ranks would have been as even as is said.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.files.loads import Loads
from megatron_ext.files.relayout import read_layout, write_layout
from megatron_ext.methods.eplb.rearrange import rearrange, relayout
from tests.balance.instances import worked_example

PUBLISHED = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
"""Loads of two layers, from the README of DeepSeek EPLB."""


def test_published_example():
    """The README's placement on 2 nodes with 4 ranks each, expert by expert."""
    sizes = dict(num_physical=16, num_groups=4, num_nodes=2, num_ranks=8)
    assert [relayout(np.array(load), **sizes).tolist() for load in PUBLISHED] == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_global_where_nodes_do_not_divide_groups():
    load = np.array(PUBLISHED[0])
    placed = relayout(load, num_physical=16, num_groups=3, num_nodes=2, num_ranks=8)
    alone = relayout(load, num_physical=16, num_groups=1, num_nodes=1, num_ranks=8)
    assert placed.tolist() == alone.tolist()


def test_by_hand():
    """Shares 5 5 6 4 (expert 0 twice): heaviest first into the lighter rank that has room."""
    placed = relayout(np.array([10, 6, 4]), num_physical=4, num_groups=1, num_nodes=1, num_ranks=2)
    assert placed.tolist() == [1, 2, 0, 0]


@given(
    nodes=st.sampled_from([1, 2]),
    ranks_per_node=st.sampled_from([1, 2, 4]),
    groups_per_node=st.sampled_from([1, 2]),
    more=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_every_layout(nodes, ranks_per_node, groups_per_node, more, seed):
    ranks, groups = nodes * ranks_per_node, nodes * groups_per_node
    experts = ranks * groups
    load = np.random.default_rng(seed).integers(0, 50, experts)
    placed = relayout(
        load,
        num_physical=experts + more * ranks,
        num_groups=groups,
        num_nodes=nodes,
        num_ranks=ranks,
    )
    count = np.bincount(placed, minlength=experts)
    assert len(placed) == experts + more * ranks
    assert (count >= 1).all()
    node_of_place = np.arange(len(placed)) // (len(placed) // nodes)
    for group in np.arange(experts).reshape(groups, -1):
        assert len(set(node_of_place[np.isin(placed, group)])) == 1
    # No expert was worth a further place more than one that got it.
    by_node = [placed[node_of_place == node] for node in range(nodes)]
    for here in by_node:
        of_node = np.unique(here)
        replicated = of_node[count[of_node] > 1]
        if len(replicated):
            worth = (load[replicated] / (count[replicated] - 1)).min()
            assert worth >= (load[of_node] / count[of_node]).max()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(num_physical=4, num_groups=2, num_nodes=1, num_ranks=2), r"experts \(3\).*groups"),
        (dict(num_physical=4, num_groups=1, num_nodes=2, num_ranks=3), r"ranks \(3\).*nodes \(2\)"),
        (dict(num_physical=5, num_groups=1, num_nodes=1, num_ranks=2), r"physical experts \(5\)"),
        (dict(num_physical=2, num_groups=1, num_nodes=1, num_ranks=2), r"\(2\) must be >= exp"),
    ],
)
def test_wrong_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        relayout(np.array([1, 2, 3]), **sizes)


def test_a_trace_by_hand():
    """Layer 7 has the worked example, 10 3 | 2 1: expert by expert: 13 and 3; then 11 and 5.

    Its second load has nothing on any expert: as even before as after. Layer 3 is even.
    """
    example = worked_example().load
    load = torch.stack([example, torch.ones_like(example), torch.zeros_like(example)])
    loads = Loads(load, {"layer": torch.tensor([7, 3, 7])})
    rearranged = rearrange(loads, num_groups=1, num_nodes=1)
    assert list(rearranged) == [3, 7]
    hot = rearranged[7]
    assert sorted(map(sorted, hot.expert.reshape(2, 2).tolist())) == [[0, 3], [1, 2]]
    assert (hot.before, hot.after) == ((1.625 + 1) / 2, (11 / 8 + 1) / 2)
    assert (rearranged[3].before, rearranged[3].after) == (1.0, 1.0)


def test_groups_stay_on_a_node():
    load = torch.tensor([[9, 9, 9, 9, 1, 1, 1, 1]] * 4)[None]
    loads = Loads(load, {"layer": torch.tensor([1])})
    expert = rearrange(loads, num_groups=2, num_nodes=2)[1].expert
    assert sorted(map(sorted, expert.reshape(2, 4).tolist())) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rearrange(loads, num_groups=1, num_nodes=1)[1].after == 1.0


def test_a_trace_without_layers():
    with pytest.raises(ValueError, match="the loads are of no known layer"):
        rearrange(Loads(torch.ones(1, 2, 4, dtype=torch.int64)), num_groups=1, num_nodes=1)


class TestFiles:
    def test_layout(self, tmp_path):
        layout = {2: np.array([1, 0, 2]), 5: np.array([0, 2, 1])}
        write_layout(tmp_path / "layout.npz", layout)
        found = read_layout(tmp_path / "layout.npz")
        assert {layer: order.tolist() for layer, order in found.items()} == {
            2: [1, 0, 2],
            5: [0, 2, 1],
        }
        with pytest.raises(FileExistsError, match=r"layout\.npz .*--overwrite"):
            write_layout(tmp_path / "layout.npz", layout)

    @pytest.mark.parametrize(
        ("layer", "expert", "message"),
        [
            ([1], [[0, 0, 2]], "expert of layer 1 must be every number from 0 to 2 once"),
            ([1, 1], [[0, 1], [1, 0]], r"layers must differ, got \[1, 1\]"),
            (
                [1, 2],
                [[0, 1]],
                r"layer must be \[1\] beside expert of \[1, 2\], got shape \[2\]",
            ),
            ([1], [[0.0, 1.0]], "expert must be int64"),
        ],
    )
    def test_other_files(self, tmp_path, layer, expert, message):
        np.savez(tmp_path / "layout.npz", layer=np.array(layer), expert=np.array(expert))
        with pytest.raises(ValueError, match=message):
            read_layout(tmp_path / "layout.npz")
