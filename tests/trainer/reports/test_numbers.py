"""What a page says of runs, by numbers that a reader can check by hand; no browser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_ext.trainer.reports.layers import LayerLines, Layers
from megatron_ext.trainer.reports.read import Run
from megatron_ext.trainer.reports.summary import cost_shares, summarize
from megatron_ext.trainer.reports.verdict import verdict


def _run(strategy: str, after: float, tokens_per_s: list[float], layers: Layers | None) -> Run:
    """Seven steps; what takes time in the first five is unlike the rest."""
    metrics = [
        {
            "step": step,
            "loss": 10.0 - step,
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
        for step in range(1, 9)
    ]
    return Run(metrics, layers, {"balance.strategy": strategy}, {}, [])


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
        "none": _run("none", 2.0, [100.0, 120.0, 800.0], None),
        "quota": _run("quota", 1.25, [150.0, 180.0, 160.0], _layers()),
        "ideal": _run("ideal", 1.0, [200.0, 190.0, 800.0], None),
    }


def _said(runs: dict[str, Run]) -> tuple[list[str], list[str]]:
    return verdict(runs, {name: summarize(run.metrics) for name, run in runs.items()})


def test_times_are_medians_after_the_first_steps_and_the_rest_means(runs: dict[str, Run]) -> None:
    found = summarize(runs["none"].metrics)
    expected: dict[str, Any] = {
        "imbalance_before": 2.0,
        "imbalance_after": 2.0,
        "step_ms": 100.0,
        "tokens_per_s": 120.0,
        "final_loss": 2.0,
        "replicas": 3.5,
    }
    assert {name: found[name] for name in expected} == expected
    assert summarize(runs["quota"].metrics)["imbalance_after"] == 1.25
    one_slow = [*runs["none"].metrics[:-1], {**runs["none"].metrics[-1], "step_ms": 700.0}]
    assert summarize(one_slow)["step_ms"] == 100.0


def test_costs_are_split_into_what_is_waited_for_and_what_is_hidden(runs: dict[str, Run]) -> None:
    assert cost_shares(runs["quota"]) == {
        "planning": 0.01,
        "weights_exposed": 0.02,
        "weights_hidden": 0.04,
        "gradients_exposed": 0.03,
        "gradients_hidden": 0.0,
    }


def test_a_comparison_names_the_limit_and_the_worst_layer(runs: dict[str, Run]) -> None:
    said, unknown = _said(runs)
    assert said == [
        "quota trains 1.33 x as fast as none, at 0.80 of the limit (ideal).",
        "quota lowers the busiest rank's load from 2.00 to 1.25 x the mean; layer 3 is the worst "
        "with 1.25.",
        "Balancing costs 10.0% of a step of quota, of which 6.0% is exposed: ranks wait for it.",
    ]
    assert unknown == []


def test_what_balances_nothing_is_not_praised(runs: dict[str, Run]) -> None:
    said, unknown = _said({"none": runs["none"]})
    assert said[0] == "The busiest rank of none has 2.00 x the mean load: nothing balances it."
    assert said[-1] == "none trains 120 tokens/s."
    assert "no run with ideal routing is beside it" in unknown[0]


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
