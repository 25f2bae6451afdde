"""What docs/results.md and docs/journal.md claim of the strategies, on every shipped trace, whole.

Live strategies are those that plan in every microbatch with the slots that they are given: neither
those that need a placement made before, nor those that take slots of their own number.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.strategies import STRATEGIES, PlanSettings
from megatron_ext.balance.strategies.strategy import FromPlacement
from megatron_ext.config import HistorySettings
from megatron_ext.files.loads import Loads, read_loads
from megatron_ext.lab.planning import Asked
from megatron_ext.lab.replay import Measured, make_report, replay

FOLDER = Path(__file__).parents[2] / "recipes" / "traces"
TRACES = ("early", "late", "late_ep8", "mixed", "switch")
SLOTS = (1, 2)
KNOW_NO_TOLERANCE = ("eplb", "eplb_exact", "lplb", "llep", "taot")
OTHERS = ("quota_paper", "quota_shipped", *KNOW_NO_TOLERANCE, "libra", "libra_paper")

# EPLB and LPLB place anew every 3 steps, at EP4.
HISTORY = (HistorySettings(interval=6),)


@cache
def loads_of(name: str) -> Loads:
    path = FOLDER / name
    return read_loads(path if path.is_dir() else path.with_suffix(".npz"))


def asked(planning: PlanSettings, slots: int) -> Asked:
    return Asked(planning=planning, slots=slots, nvlink_domain=None)


def replayed(name: str, slots: int, tolerance: float) -> dict[str, Measured]:
    settings = PlanSettings(tolerance=tolerance, sections=HISTORY)
    others = [strategy for strategy in OTHERS if strategy not in KNOW_NO_TOLERANCE]
    planned = replay(loads_of(name), ("quota", *others), asked(settings, slots))
    return planned | replayed_once(name, slots)


@cache
def replayed_once(name: str, slots: int) -> dict[str, Measured]:
    settings = PlanSettings(sections=HISTORY)
    return replay(loads_of(name), KNOW_NO_TOLERANCE, asked(settings, slots))


def test_no_trace_and_no_live_strategy_is_left_out():
    assert sorted({path.stem for path in FOLDER.iterdir()} - {"README"}) == list(TRACES)
    live = {
        name
        for name, strategy in STRATEGIES.items()
        if strategy.planner
        and not isinstance(strategy.kind, FromPlacement)
        and strategy.num_slots(1, 8) == 1
        and name not in ("none", "quota")
    }
    assert live == set(OTHERS)


@pytest.mark.parametrize("name", TRACES)
def test_every_microbatch_is_there_in_every_layer(name):
    loads = loads_of(name)
    step, microbatch, layer = loads.trace.values()
    assert sorted(set(layer.tolist())) == [1, 2, 3, 4]
    steps = step.unique()
    assert steps.tolist() == list(range(int(steps[0]), int(steps[-1]) + 1))
    assert len(loads) == len(steps) * len(microbatch.unique()) * 4
    # Every token of a microbatch has chosen two experts in every layer.
    assert (loads.load.sum(-1) == 4 * 256 * 2).all()
    # Nothing is predicted of a first layer, nor in a run's first microbatch: when these runs were
    # recorded, layers learned in it which comes after which.
    starts = torch.isin(step, torch.tensor([1, 151])) & (microbatch == 0)
    expected = (layer > 1) & ~starts
    assert [loads.prediction(b) is not None for b in range(len(loads))] == expected.tolist()


def test_traces_are_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 4e6


def test_what_is_replayed_once_knows_no_tolerance():
    settings = PlanSettings(tolerance=0.0, sections=HISTORY)
    exact = replay(loads_of("late_ep8"), KNOW_NO_TOLERANCE, asked(settings, 2))
    for strategy, of in replayed_once("late_ep8", 2).items():
        for name in ("imbalance", "replicas", "remote_assignments"):
            assert (of[name] == exact[strategy][name]).all(), (strategy, name)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("name", TRACES)
def test_quota_is_most_even_with_fewest_replicas(name, slots):
    """Its mean imbalance is least; of those within 1 % of it none moves fewer replicas.

    `taot` has a finer goal, the mean itself: with two slots it ends lower on `switch`, and near it
    with fewer replicas on `mixed`."""
    of = replayed(name, slots, PlanSettings().tolerance)
    del of["taot"]
    imbalance = {name: float(one["imbalance"].mean()) for name, one in of.items()}
    replicas = {name: float(one["replicas"].mean()) for name, one in of.items()}
    assert imbalance["quota"] <= min(imbalance.values()) + 1e-9, imbalance
    close = {name: replicas[name] for name in of if imbalance[name] <= 1.01 * imbalance["quota"]}
    assert replicas["quota"] == min(close.values()), close


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("name", TRACES)
def test_no_strategy_is_more_even_on_any_load(name, slots):
    """Where quota is asked for all that the slots allow, as the others try without being asked."""
    of = replayed(name, slots, 0.0)
    for other in OTHERS:
        assert (of["quota"]["imbalance"] <= of[other]["imbalance"] + 1e-9).all(), other


@pytest.mark.parametrize("name", TRACES)
def test_most_replicas_of_libra_move_before_the_load_is_known(name):
    """With two slots, by the router's prediction; on `late`, where that falls short (0.692), by the
    layer's last load. docs/journal.md says why, and what becomes of one slot."""
    loads, two = loads_of(name), asked(PlanSettings(), 2)
    if name == "late":
        loads = Loads(loads.load, loads.trace)
    report = make_report(loads, replay(loads, ("libra",), two), two)
    assert report["strategies"]["libra"]["share_placed"] >= 0.7


COSTS = LayerCosts(expert_bytes=65536, link_bandwidth=6.8e9, assignment_time=3.4e-7)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("name", TRACES)
def test_a_finer_goal_gains_little_and_costs_replicas(name, slots):
    """Objective time ends more even, by less than quota's tolerance; never with fewer replicas."""
    settings = PlanSettings(costs=COSTS)
    of = replay(loads_of(name), ("quota", "quota:time"), asked(settings, slots))
    quota, time = of["quota"], of["quota:time"]
    gained = quota["imbalance"].mean() / time["imbalance"].mean() - 1
    assert 0 < gained < settings.tolerance
    assert quota["replicas"].mean() <= time["replicas"].mean()
