"""Replay: the numbers are those of the plans, every layer has its own past, and files are whole."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import imbalance
from megatron_ext.balance.plan_metrics import rank_sends, remote_assignments
from megatron_ext.balance.solve import solve
from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.balance.strategies.strategy import PlanSettings
from megatron_ext.cli import options
from megatron_ext.cli.replay import FILES
from megatron_ext.config import HistorySettings, LlepSettings
from megatron_ext.files.loads import Loads
from megatron_ext.files.tables import markdown_table
from megatron_ext.lab.planning import Asked, read_name
from megatron_ext.lab.replay import (
    PREDICTED,
    WEIGHTS,
    make_report,
    replay,
    tables,
    write_report,
)
from tests import workloads
from tests.balance.instances import TIME, needs_of, worked_example

LAYERS = 2
MICROBATCHES = 5

HISTORY = HistorySettings(interval=2)


@pytest.fixture
def trace() -> Loads:
    """Two layers with other hot experts, in turn."""
    load = torch.stack(
        [
            workloads.zipf(4, 8, 400, 1.2, seed=layer)
            + workloads.uniform(4, 8, 40, seed=10 * microbatch + layer)
            for microbatch in range(MICROBATCHES)
            for layer in range(LAYERS)
        ]
    )
    order = torch.arange(len(load))
    keys = {"step": order * 0, "microbatch": order // LAYERS, "layer": order % LAYERS + 1}
    return Loads(load, keys)


def ask(slots=1, nvlink_domain=None, **settings):
    return Asked(planning=PlanSettings(**settings), slots=slots, nvlink_domain=nvlink_domain)


def run(loads, *strategies, **asked):
    return replay(loads, strategies, ask(**asked))


def test_worked_example():
    loads = Loads(worked_example().load[None])
    replayed = run(loads, "none", "quota")
    of = make_report(loads, replayed, ask())["strategies"]
    assert of["none"]["imbalance_mean"] == of["none"]["imbalance_worst"] == 1.625
    assert of["quota"]["imbalance_p95"] == 1.0
    assert (of["quota"]["replicas_mean"], of["quota"]["max_rank_sends"]) == (1.0, 1.0)
    assert of["quota"]["remote_assignments_mean"] == 4.0
    assert of["quota"]["solve_us_p50"] > 0
    assert list(of["none"]["layers"]) == ["0"]


@pytest.mark.parametrize("strategy", [TIME, *(n for n, each in STRATEGIES.items() if each.planner)])
def test_numbers_are_those_of_the_plans(trace, strategy):
    """Layer by layer, planned without replay; so no layer sees another's past."""
    layout = ExpertLayout(num_experts=8, ep_size=4, slots=2, nvlink_domain=2)
    settings = {
        "sections": (HISTORY, LlepSettings(min_tokens_per_gemm=8)),
        **needs_of(strategy, layout),
    }
    measured = run(trace, strategy, slots=2, nvlink_domain=2, **settings)[strategy]
    for layer in (1, 2):
        here = trace.trace["layer"] == layer
        load = trace.load[here]
        asked = {"strategy": read_name(strategy)[0], **settings}
        plans = solve(load, ep_size=4, slots=2, nvlink_domain=2, **asked).unbatch()
        expected = {
            "imbalance": [imbalance(plan.rank_loads()) for plan in plans],
            "replicas": [plan.num_replicas() for plan in plans],
            "max_rank_sends": [int(rank_sends(plan).max()) for plan in plans],
            "remote_assignments": [
                int(remote_assignments(*pair)) for pair in zip(load, plans, strict=True)
            ],
        }
        for name, values in expected.items():
            assert measured[name][here.numpy()].tolist() == values


def test_only_time_is_asked_for_the_fastest_plan(trace):
    dear = LayerCosts(expert_bytes=10**9, link_bandwidth=1e9, assignment_time=1e-6)
    both = run(trace, "quota", "quota:time", tolerance=0.0, costs=dear)
    alone = run(trace, "quota", tolerance=0.0)
    assert both["quota"]["imbalance"].tolist() == alone["quota"]["imbalance"].tolist()
    assert both["quota"]["replicas"].min() > both["quota:time"]["replicas"].max() == 0


def test_summary_by_hand():
    """Ten loads of imbalance 1.1 to 2.0 in one layer."""
    heavy = torch.arange(11, 21)
    loads = Loads(torch.stack([heavy, 20 - heavy], 1)[:, None, :].repeat(1, 2, 1))
    of = make_report(loads, run(loads, "none"), ask())
    numbers = of["strategies"]["none"]
    assert numbers["imbalance_mean"] == pytest.approx(1.55)
    assert numbers["imbalance_p50"] == 1.5
    assert numbers["imbalance_p95"] == numbers["imbalance_worst"] == 2.0
    assert of["before"]["imbalance_mean"] == numbers["imbalance_mean"]


def test_bytes_by_hand():
    """Experts of 3 MiB; the second load is even already, and the first needs one replica."""
    load = worked_example().load
    loads = Loads(torch.stack([load, torch.ones_like(load)]))
    replayed = run(loads, "none", "quota", "moonep")
    report = make_report(loads, replayed, ask(), expert_bytes=3 * 2**20)
    assert report["expert_bytes"] == 3 * 2**20
    numbers = {
        name: [of[f"{what}_bytes"] / 2**20 for what in ("slot", "moved", "sent")]
        for name, of in report["strategies"].items()
    }
    assert numbers == {"none": [3, 0, 0], "quota": [3, 1.5, 1.5], "moonep": [6, 1.5, 1.5]}
    assert tables(report)[WEIGHTS][1][-1] == ("moonep", "6.00", "1.50", "1.50")
    unknown = make_report(loads, replayed, ask())
    assert WEIGHTS not in tables(unknown)
    assert "expert_bytes" not in unknown


def test_bytes_that_are_sent_ahead(trace):
    """Layers send ahead into two sets of slots in turn, also what is then not used."""
    measured = dict(run(trace, "libra")["libra"])
    measured["wasted_replicas"] = np.full(len(trace), 3.0)
    of = make_report(trace, {"libra": measured}, ask(), expert_bytes=10)["strategies"]["libra"]
    assert of["slot_bytes"] == 2 * 10
    assert of["moved_bytes"] == 10 * (of["replicas_mean"] + 3)


@pytest.mark.parametrize(("predicted", "sent"), [(3, 10), (1, 20)])
def test_the_busiest_sender_sends_wasted_replicas_too(predicted, sent):
    """All tokens choose expert 0 of rank 0, where expert 1 is, too: another one was predicted."""
    load, wrong = torch.zeros(2, 1, 2, 4, dtype=torch.int64)
    load[..., 0] = wrong[..., predicted] = 8
    loads = Loads(load, {}, wrong)
    of = make_report(loads, run(loads, "libra"), ask(), expert_bytes=10)["strategies"]["libra"]
    assert (of["max_rank_sends"], of["moved_bytes"], of["sent_bytes"]) == (1, 20, sent)


def check_out(out, overwrite=False):
    options.check_out(Namespace(out=out, overwrite=overwrite), *FILES)


def test_files(trace, tmp_path):
    folder = tmp_path / "new" / "out"
    check_out(folder)
    replayed = run(trace, "none", "eplb", "exact", "libra", sections=(HISTORY,))
    report = make_report(trace, replayed, ask(sections=(HISTORY,)), expert_bytes=2**20)
    write_report(folder, report)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    read = json.loads((folder / "replay.json").read_text())
    assert read == report
    assert [(name, of["slots"]) for name, of in read["strategies"].items()] == [
        ("none", 1),
        ("eplb", 1),
        ("exact", 2),
        ("libra", 1),
    ]
    assert read["strategies"]["eplb"]["layers"].keys() == {"1", "2"}
    text = (folder / "replay.md").read_text()
    assert "| eplb " in text
    for title in (PREDICTED, WEIGHTS):
        assert f"## {title}\n\n{markdown_table(*tables(report)[title])}" in text
    worst = np.max(replayed["eplb"]["imbalance"][::2])
    assert f"({worst:.3f})" in text
    page = (folder / "replay.html").read_text("utf-8")
    assert (
        'class="verdict">exact leaves the busiest rank 1.000 x the mean load, no other strategy'
        in page
    )
    with pytest.raises(FileExistsError, match=r"replay\.json exists already"):
        check_out(folder)
    check_out(folder, overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"replay\.md is no folder"):
        check_out(folder / "replay.md", overwrite=True)


def test_a_prediction_of_the_last_load(trace):
    """Of the worked example three times: nothing is predicted of the first, all of the others."""
    loads = Loads(worked_example().load.expand(3, -1, -1).contiguous())
    replayed = run(loads, "libra")
    measured = replayed["libra"]
    assert measured["hit_replicas"].tolist() == [0, 1, 1]
    assert measured["topped_up_replicas"].tolist() == [1, 0, 0]
    assert measured["wasted_replicas"].tolist() == [0, 0, 0]
    assert measured["imbalance"].tolist() == [1.0, 1.0, 1.0]
    assert measured["imbalance_of_placed"].tolist() == [1.625, 1.0, 1.0]
    report = make_report(loads, replayed, ask())
    assert report["strategies"]["libra"]["hit_rate"] == 1.0
    assert report["strategies"]["libra"]["share_placed"] == pytest.approx(2 / 3)
    assert [row[0] for row in tables(report)[PREDICTED][1]] == ["libra"]
    assert PREDICTED not in tables(make_report(loads, run(loads, "none"), ask()))


def test_a_prediction_of_the_file(trace):
    """What is predicted rightly hits; where the file has none, the layer's last load counts."""
    exact = Loads(trace.load, trace.trace, trace.load)
    partly = Loads(trace.load, trace.trace, trace.load.clone())
    partly.predicted[4:] = -1
    of = {name: run(loads, "libra_paper") for name, loads in (("exact", exact), ("partly", partly))}
    hits = {name: each["libra_paper"]["hit_replicas"] for name, each in of.items()}
    assert hits["exact"][:4].tolist() == hits["partly"][:4].tolist()
    last = run(trace, "libra_paper")["libra_paper"]["hit_replicas"]
    assert hits["partly"][4:].tolist() == last[4:].tolist()
    assert hits["exact"].sum() > last.sum()
