"""What a page says of runs, by numbers that a reader can check by hand; no browser."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megatron_ext.trainer.reports.layers import LayerLines, Layers
from megatron_ext.trainer.reports.read import Run
from megatron_ext.trainer.reports.speed import speed, speed_ratio
from megatron_ext.trainer.reports.summary import (
    cells,
    cost_shares,
    summarize,
    summarize_read,
    summarize_runs,
)
from megatron_ext.trainer.reports.verdict import compare


def _run(strategy: str, after: float, tokens_per_s: Sequence[float], layers: Layers | None) -> Run:
    """Steps of which the first five take another time than the rest."""
    metrics = [
        {
            "step": step,
            "loss": 100.0 - step,
            "imbalance_before": 2.0,
            "imbalance_after": after,
            "replicas": 3.0 + step % 2,
            "tokens_per_s": tokens_per_s[step - 6] if step > 5 else 1.0,
            "step_ms": 100.0 if step > 5 else 1.0,
            "plan_ms": 1.0 if step > 5 else 50.0,
            "materialize_ms": 6.0 if step > 5 else 0.0,
            "materialize_exposed_ms": 2.0 if step > 5 else 0.0,
            "reduce_ms": 3.0,
            "reduce_exposed_ms": 3.0 if step > 5 else 0.0,
        }
        for step in range(1, len(tokens_per_s) + 6)
    ]
    return Run(metrics, layers, {"balance.strategy": strategy}, {}, [])


def _noisy(speed: float, *, seed: int, steps: int = 40) -> list[float]:
    """Tokens per second with the noise of a busy machine: some steps take twice as long."""
    random = np.random.default_rng(seed)
    slow = random.choice([1.0, 0.5], p=[0.8, 0.2], size=steps)
    return (speed * slow * random.normal(1, 0.05, steps)).tolist()


def _layers() -> Layers:
    """Eight steps of two layers on two ranks; step 4 has the worst microbatch, step 6 the next."""
    lines = LayerLines()
    for step in range(1, 9):
        most = {4: 90, 6: 80}.get(step, 60)
        lines.add(
            {
                "step": step,
                "layer": [3, 5],
                "imbalance_before": [1.5, 2.5],
                "imbalance_after": [1.25, 1.0],
                "rank_loads_before": [[75, 25], [10, 90]],
                "rank_loads_after": [[60, 40], [50, 50]],
                "worst": {
                    "layer": 5,
                    "microbatch": 2,
                    "rank_loads_before": [100 - most, most],
                    "rank_loads_after": [50, 50],
                    "slots": [[3], [-1]],
                    "num_experts": 4,
                },
            }
        )
    layers = lines.layers()
    assert layers is not None
    return layers


@pytest.fixture
def runs() -> dict[str, Run]:
    return {
        "none": _run("none", 2.0, [100.0, 120.0, 800.0] * 8, None),
        "quota": _run("quota", 1.25, [150.0, 160.0, 800.0] * 8, _layers()),
        "ideal": _run("ideal", 1.0, [190.0, 200.0, 800.0] * 8, None),
    }


def _said(runs: dict[str, Run]) -> tuple[list[str], list[str]]:
    _, said, unknown = compare(runs)
    return list(said), list(unknown)


def test_times_are_medians_after_the_first_steps_and_the_rest_means(runs: dict[str, Run]) -> None:
    found = summarize(runs["none"].metrics)
    expected: dict[str, Any] = {
        "imbalance_before": 2.0,
        "imbalance_after": 2.0,
        "step_ms": 100.0,
        "tokens_per_s": 120.0,
        "final_loss": 71.0,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["replicas"] == pytest.approx(3.5, abs=0.02)
    assert summarize(runs["quota"].metrics)["imbalance_after"] == 1.25
    one_slow = [*runs["none"].metrics[:-1], {**runs["none"].metrics[-1], "step_ms": 700.0}]
    assert summarize(one_slow)["step_ms"] == 100.0


def test_rank_hours_and_mfu_are_said_where_the_files_know_them(runs: dict[str, Run]) -> None:
    metrics = [{**step, "tflops_per_gpu": 400.0} for step in runs["quota"].metrics]
    machine = {"hardware.constants.peak_flops_per_s.value": "1e15"}
    runs["quota"] = Run(metrics, None, machine, {"num_ranks": 8, "gpus": ["H100"] * 8}, [])
    runs["none"] = Run(runs["none"].metrics, None, machine, {"num_ranks": 2, "gpus": []}, [])
    runs["ideal"] = Run(metrics, None, machine | {"num_ranks": "many"}, {}, [])
    found = summarize_read(runs)
    milliseconds = 24 * 100.0 + 5 * 1.0  # The first steps count, too.
    assert found["quota"]["rank_hours"] == pytest.approx(8 * milliseconds / 3.6e6)
    assert found["none"]["rank_hours"] == pytest.approx(2 * milliseconds / 3.6e6)
    assert found["quota"]["mfu"] == pytest.approx(0.4)
    assert [run for run in found if math.isnan(found[run]["mfu"])] == ["none", "ideal"]
    assert math.isnan(found["ideal"]["rank_hours"])
    # It continued on twice as many ranks.
    grown = [{**step, "num_ranks": 4 if step["step"] <= 10 else 8} for step in metrics]
    fewer = sum(step["step_ms"] for step in grown[:10])
    (run,) = summarize_read({"": Run(grown, None, {}, {"num_ranks": 8}, [])}).values()
    assert run["rank_hours"] == pytest.approx((8 * milliseconds - 4 * fewer) / 3.6e6)
    header, rows = cells(found)
    assert header[5:8] == ("TFLOP/s a rank", "MFU", "rank hours")
    assert [row[5:8] for row in rows] == [
        ("", "", "0.00134"),
        ("400", "40.0%", "0.00534"),
        ("400", "", ""),
    ]
    del runs["quota"], runs["ideal"]
    header, _ = cells(summarize_read(runs))
    assert header[5:7] == ("rank hours", "final loss")


def test_costs_are_split_into_what_is_waited_for_and_what_is_hidden(runs: dict[str, Run]) -> None:
    expected = {
        "planning": 0.01,
        "weights_exposed": 0.02,
        "weights_hidden": 0.04,
        "gradients_exposed": 0.03,
        "gradients_hidden": 0.0,
    }
    assert cost_shares(runs["quota"]) == pytest.approx(expected)


def test_a_comparison_names_the_limit_and_the_worst_layer(runs: dict[str, Run]) -> None:
    said, unknown = _said(runs)
    # Every third step is fast in all runs. Steps are drawn for all alike: no ratio changes by that.
    assert said == [
        "Run quota trains 1.33 x as fast as run none (95 % interval 1.33 to 1.33), at 0.80 "
        "(0.80 to 0.80) of the limit, run ideal.",
        "Run quota lowers the busiest rank's load from 2.00 to 1.25 x the mean; layer 3 is the "
        "worst with 1.25.",
        "Ranks of run quota wait 6.0 % of a step for balancing; at most another 4.0 % runs behind "
        "other work.",
    ]
    assert unknown == []


def test_what_balances_nothing_is_not_praised(runs: dict[str, Run]) -> None:
    said, unknown = _said({"none": runs["none"]})
    assert said[0] == "The busiest rank of run none has 2.00 x the mean load: nothing balances it."
    assert said[-1].startswith("Run none trains 120 tokens/s (95 % interval ")
    assert unknown[:2] == [
        "Add a run with strategy quota to see what balancing brings.",
        "Add a run with strategy ideal to see how far from the limit this is.",
    ]


@pytest.mark.parametrize(
    ("strategy", "after", "said"),
    [
        ("eplb", 2.5, "Run r raises the busiest rank's load from 2.00 to 2.50 x the mean."),
        ("quota", 2.0, "The busiest rank of run r has 2.00 x the mean load, as if experts stayed"),
        (
            "ideal",
            2.0,
            "The busiest rank of run r has 2.00 x the mean load: even routing is",
        ),
    ],
)
def test_what_balances_in_vain_or_for_the_worse_is_called_so(
    strategy: str, after: float, said: str
) -> None:
    assert _said({"r": _run(strategy, after, [1.0], None)})[0][0].startswith(said)


def test_what_is_there_is_not_asked_for(runs: dict[str, Run]) -> None:
    none, quota, ideal = runs["none"], runs["quota"], runs["ideal"]
    brings = " to see what balancing brings."
    assert _said({"quota": quota, "ideal": ideal})[1] == [f"Add a run with strategy none{brings}"]
    assert _said({"ideal": ideal, "quota": quota})[1] == []
    # It was balanced before it went on without balancing.
    steps = [{**step, "strategy": "quota"} for step in quota.metrics[:9]]
    steps += [{**step, "strategy": "none"} for step in none.metrics[9:]]
    mixed = Run(steps, None, {"balance.strategy": "none"}, {}, [])
    assert _said({"mixed": mixed})[1][0] == f"Add a run with strategy none{brings}"


def test_noise_is_not_stated_as_a_difference() -> None:
    """Of runs as fast as each other at most about one in twenty is said to be faster."""
    pairs = [(_noisy(100, seed=seed), _noisy(100, seed=100 + seed)) for seed in range(40)]
    found = []
    for pair in pairs:
        runs = [_run("quota", 1.0, speeds, None) for speeds in pair]
        ratio = speed_ratio(runs[0].metrics, runs[1].metrics)
        assert ratio is not None
        assert ratio.low <= ratio.value <= ratio.high
        found.append(ratio.is_clear)
    assert sum(found) <= 4
    alike = next(pair for pair, is_clear in zip(pairs, found, strict=True) if not is_clear)
    said, _ = _said(
        {
            "none": _run("none", 1.0, alike[0], None),
            "quota": _run("quota", 1.0, alike[1], None),
            "ideal": _run("ideal", 1.0, _noisy(200, seed=0), None),
        }
    )
    assert re.fullmatch(
        r"No difference in speed beyond noise: run quota trains \d\.\d\d x as fast as run none "
        r"\(95 % interval 0\.\d\d to 1\.\d\d\)\.",
        said[0],
    )


def test_a_difference_beyond_noise_is_found_with_its_interval() -> None:
    for seed in range(20):
        runs = [
            _run("quota", 1.0, _noisy(speed, seed=seed + number), None)
            for number, speed in ((0, 150), (100, 100))
        ]
        ratio = speed_ratio(runs[0].metrics, runs[1].metrics)
        assert ratio is not None
        assert ratio.is_clear
        assert ratio == speed_ratio(runs[0].metrics, runs[1].metrics)
        assert 1.3 < ratio.low < ratio.high < 1.7


def test_neighbouring_steps_do_not_count_as_independent() -> None:
    """What slows a machine for some steps makes the interval wider."""
    random = np.random.default_rng(0)
    by_stretch = np.repeat(random.normal(1, 0.2, 40), 10)
    spread = []
    for values in (by_stretch, random.permutation(by_stretch)):
        of = speed(_run("quota", 1.0, values.tolist(), None).metrics)
        assert of is not None
        spread.append(of.high - of.low)
    assert spread[0] > 1.5 * spread[1]


def test_few_steps_say_nothing_about_speed() -> None:
    """Less than 20 after the first five: neither a headline, nor a cell, nor shares of a step."""
    runs = {
        name: _run(name, after, [speed] * 19, None)
        for name, after, speed in (("none", 2.0, 100.0), ("quota", 1.0, 230.0))
    }
    said, unknown = _said(runs)
    assert said == ["Run quota lowers the busiest rank's load from 2.00 to 1.00 x the mean."]
    assert "Which run is the fastest is said when two runs share 20 steps after the first 5." in (
        unknown
    )
    summaries = summarize_runs({name: run.metrics for name, run in runs.items()}, ["none"])
    assert summaries["quota"]["vs"] == {"none": None}
    assert cost_shares(runs["quota"]) == {}
    one_more = {name: _run(name, 1.0, [100.0] * 20, None) for name in runs}
    assert "95 % interval" in _said(one_more)[0][0]


def test_the_fastest_of_many_is_named_with_its_equals() -> None:
    first = _run("none", 1.0, _noisy(100, seed=0), None)
    runs = {
        "first": first,
        "a": _run("quota", 1.0, _noisy(150, seed=1), None),
        "b": _run("quota", 1.0, _noisy(151, seed=2), None),
        "slow": _run("quota", 1.0, _noisy(110, seed=3), None),
    }
    (said, *_), _ = _said(runs)
    assert re.search(r"; no difference beyond noise to run [ab]\.$", said)
    assert "the fastest here" not in said
    (said, *_), _ = _said({name: runs[name] for name in ("first", "a", "slow")})
    assert said.startswith("Run a, the fastest here, trains 1.")


def test_of_equal_layers_none_is_the_worst() -> None:
    lines = LayerLines()
    for step in range(1, 4):
        lines.add({"step": step, "layer": [1, 2], "imbalance_after": [1.008, 1.006 + 0.001 * step]})
    layers = lines.layers()
    assert layers is not None
    assert layers.worst_layer() is None


def test_ranks_and_microbatches_are_those_of_the_lines() -> None:
    layers = _layers()
    assert layers.worst_layer() == (3, 1.25)
    before, after = layers.rank_loads["before"], layers.rank_loads["after"]
    np.testing.assert_array_equal(before[0], [[1.5, 0.5], [0.2, 1.8]])
    np.testing.assert_array_equal(after[0], [[1.2, 0.8], [1.0, 1.0]])
    assert [worst["step"] for worst in layers.worst][:2] == [4, 6]
    assert len(layers.worst) == 5
    first = layers.worst[0]
    assert (first["layer"], first["microbatch"]) == (5, 2)
    assert list(first["before"]) == [10, 90]
    assert list(first["after"]) == [50, 50]
    # Expert 3 is at home on rank 1, and has its replica on rank 0.
    assert [tuple(each) for each in first["replicas"]] == [(3, 1, 0)]
