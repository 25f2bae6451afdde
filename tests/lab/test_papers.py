"""Exhibits: their numbers by hand on the worked example, the same in JSON and Markdown.

The trace is two layers of two microbatches. Layer 1 has the worked example twice: rank loads 13 and
3 at home. Layer 2 has it with its experts the other way round, then nothing to do.
"""

import json
import re

import numpy as np
import pytest
import torch

from megatron_ext.balance.placement import Placement
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.files.loads import Loads
from megatron_ext.lab.papers import (
    make_exhibits,
    more_replays,
    to_json,
    to_markdown,
)
from megatron_ext.lab.replay import replay
from tests.balance.instances import worked_example

STRATEGIES = ("none", "quota")


def trace(predicted: torch.Tensor | None = None) -> Loads:
    example = worked_example().load
    load = torch.stack([example, example.flip(1), example, torch.zeros_like(example)])
    keys = {"step": [1] * 4, "microbatch": [0, 0, 1, 1], "layer": [1, 2, 1, 2]}
    return Loads(load, {name: torch.tensor(key) for name, key in keys.items()}, predicted)


def shown(loads=None, strategies=STRATEGIES, slots=1, **settings):
    """The exhibits by name, and their JSON as it would be read back."""
    loads = trace() if loads is None else loads
    asked = PlanSettings(**settings)
    replayed = replay(loads, strategies, asked, slots=slots, nvlink_domain=None)
    exhibits = make_exhibits(loads, replayed, asked, slots=slots, nvlink_domain=None)
    return exhibits, json.loads(json.dumps(to_json(exhibits))), replayed


def test_ultraep_table_4():
    """7 of 16 choices travel, turned 9; with a replica of the hot expert 4. The last is empty."""
    _, read, replayed = shown()
    table = read["ultraep_table_4"]
    assert table["columns"] == ["metric", "none", "quota"]
    rows = {name: numbers for name, *numbers in table["rows"]}
    assert rows["imbalance"] == [(3 * 1.625 + 1) / 4, 1.0]
    assert rows["replicas"] == rows["most replicas of an expert"] == [0, 0.75]
    assert rows["in-flight token ratio"] == [(7 + 9 + 7) / 16 / 4, 3 * 4 / 16 / 4]
    assert rows["solving time, ms"][1] == pytest.approx(replayed["quota"]["solve_us"].mean() / 1e3)


def test_ultraep_figures():
    _, read, _ = shown()
    assert read["ultraep_figure_6"]["columns"] == ["microbatch", "before", "none", "quota"]
    mean = (1.625 + 1) / 2
    assert read["ultraep_figure_6"]["rows"] == [[0, 1.625, 1.625, 1], [1, mean, mean, 1]]
    upper = {row[0]: row[1:] for row in read["ultraep_figure_15_upper"]["rows"]}
    assert (upper[0.25], upper[0.3], upper[1.0]) == (
        [1, 1, 1],
        [1.625, 1.625, 1],
        [1.625, 1.625, 1],
    )
    lower = read["ultraep_figure_15_lower"]
    assert lower["columns"] == ["imbalance before", "before", "none", "quota"]
    assert lower["rows"] == [[1, 1, 1, 1], *[[1.625, 1.625, 1.625, 1]] * 3]


def test_ultraep_figure_15_groups_loads_by_what_they_were_before():
    """Eight loads of imbalance 1.1 to 1.8, out of order: means of the two of each quarter."""
    heavy = torch.tensor([18, 11, 14, 16, 12, 17, 13, 15])
    loads = Loads(torch.stack([heavy, 20 - heavy], 1)[:, None, :].repeat(1, 2, 1))
    rows = shown(loads, ("none",))[1]["ultraep_figure_15_lower"]["rows"]
    np.testing.assert_allclose(rows, [[mean] * 3 for mean in (1.15, 1.35, 1.55, 1.75)])


def test_sem_moe_figure_5b():
    """What does not travel; nothing travels of nothing. Of two ranks the median is the mean."""
    _, read, _ = shown()
    rows = {name: numbers for name, *numbers in read["sem_moe_figure_5b"]["rows"]}
    assert rows["before"] == rows["none"] == [(9 + 7 + 9 + 16) / 16 / 4, (3 * 1.625 + 1) / 4]
    assert rows["quota"] == [(3 * 12 + 16) / 16 / 4, 1.0]


def test_libra_table_1():
    """Layer 2 is predicted by the router once exactly, once 4 of 16 too much: of nothing at all."""
    predicted = trace().load.clone()
    predicted[[0, 2]] = -1
    predicted[3, 0, 0] = 4
    _, read, _ = shown(trace(predicted))
    table = read["libra_table_1"]
    # The router says nothing of layer 1.
    assert table["columns"] == ["layer", "last load of the layer", "router, a layer earlier"]
    assert table["rows"] == [["layer 2", 0.0, 0.5]]
    _, read, _ = shown()
    assert read["libra_table_1"]["columns"] == ["layer", "last load of the layer"]
    assert read["libra_table_1"]["rows"] == [["layer 1", 1.0], ["layer 2", 0.0]]
    one = Loads(trace().load[:1])
    assert "libra_table_1" not in shown(one)[1]


def test_craft_figures():
    """One replica makes layer 1 even; so does it in layer 2, whose second load needs none."""
    none = torch.full((2, 2, 1), -1, dtype=torch.int32)
    placement = Placement((1, 2), none, torch.ones(2, 4, dtype=torch.int64))
    replays = []
    loads, asked = trace(), PlanSettings(placement=placement)
    room = {"slots": 1, "nvlink_domain": None}
    replayed = replay(loads, ("craft",), asked, **room)
    exhibits = make_exhibits(loads, replayed, asked, **room, on_load=replays.append)
    read = to_json(exhibits)
    assert sum(replays) == more_replays(loads, replayed, **room) == 2 * len(loads)
    layers = np.array([8 / 13, (8 / 13 + 1) / 2])
    assert read["craft_figure_8"]["columns"] == ["replicas of a layer", "balancedness"]
    np.testing.assert_allclose(
        read["craft_figure_8"]["rows"], [[0, layers.mean()], [1, 1], [2, 1]], rtol=1e-12
    )
    # The layer that gains less comes first.
    assert read["craft_figure_9"]["columns"] == ["replicas of a layer", "layer 2", "layer 1"]
    gains = [1 - layers[1], 1 - layers[0]]
    np.testing.assert_allclose(
        read["craft_figure_9"]["rows"], [[0, 0, 0], [1, *gains], [2, *gains]], rtol=1e-12
    )
    for names, slots in ((("quota",), 1), (("craft",), 0)):
        assert more_replays(loads, names, slots=slots, nvlink_domain=None) == 0
    assert "craft_figure_8" not in shown()[1]


def test_craft_samples_layers_from_least_to_most_gain():
    """Of six layers four, whose imbalance rises with the layer's number."""
    load = torch.stack([torch.tensor([[4 + hot, 4, 4, 4 - hot]] * 2) for hot in (0, 4, 1, 3, 2, 2)])
    loads = Loads(load, {"layer": torch.arange(1, 7)})
    none = torch.full((6, 2, 1), -1, dtype=torch.int32)
    placement = Placement(tuple(range(1, 7)), none, load.sum(1))
    _, read, _ = shown(loads, ("craft",), placement=placement)
    columns = read["craft_figure_9"]["columns"]
    assert columns == ["replicas of a layer", "layer 1", "layer 5", "layer 6", "layer 2"]


def test_markdown_has_the_numbers_of_the_json():
    exhibits, read, _ = shown()
    text = to_markdown(exhibits)
    for one in read.values():
        assert f"## {one['title']}\n" in text
        for row in one["rows"]:
            cells = [cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row]
            line = [" ".join(line.split()) for line in text.splitlines()]
            assert f"| {' | '.join(cells)} |" in line


def test_markdown_leaves_out_rows_of_long_figures():
    loads = Loads(worked_example().load.expand(41, -1, -1).contiguous())
    exhibits, read, _ = shown(loads)
    assert len(read["ultraep_figure_6"]["rows"]) == 41
    text = to_markdown([one for one in exhibits if one.name == "ultraep_figure_6"])
    assert "20 of 41 rows" in text
    numbers = [int(line.split()[1]) for line in text.splitlines() if re.match(r"\| \d", line)]
    assert (len(numbers), numbers[0], numbers[-1]) == (20, 0, 40)
