"""Simulation: every equation by hand, what must grow with what, and files that are wrong.

The worked example: 2 ranks, 4 experts, one slot; 13 and 3 assignments at home, 8 and 8 when
balanced. Numbers of the machine are chosen so that seconds come out whole.
"""

import dataclasses
import json
import re
import shlex

import pytest
import torch
from omegaconf import OmegaConf

from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.solve import solve
from megatron_ext.balance.strategies.strategy import PlanSettings
from megatron_ext.cli import main
from megatron_ext.config import BalanceConfig
from megatron_ext.files.loads import Loads, write_loads
from megatron_ext.lab.forecast import forecast_transport
from megatron_ext.lab.hardware import Hardware, constants, read_hardware
from megatron_ext.lab.planning import Asked, Planned
from megatron_ext.lab.shape import read_shape
from megatron_ext.lab.simulate import (
    LEGEND,
    Machine,
    Setting,
    _layer_times,
    as_measured,
    even_load,
    layer_table,
    relayed_sends,
    simulate,
    timed_sends,
)
from megatron_ext.lab.synthetic import generate, make_spec
from megatron_ext.trainer.config import ParallelConfig, TrainConfig
from megatron_ext.trainer.model.shape import ModelShape
from tests import workloads
from tests.balance.instances import worked_example
from tests.perf.calibrate import write_hardware


def a_shape(**changes) -> ModelShape:
    """H = 2, F = 3, top-1, float32: an expert has 12 weights, 48 bytes; a token 8 bytes."""
    return ModelShape(
        **{
            "name": "tiny",
            "num_layers": 2,
            "hidden_size": 2,
            "attention_params": 16,
            "attention_width": 2,
            "num_experts": 4,
            "topk": 1,
            "expert_hidden_size": 3,
            "shared_expert_hidden_size": 0,
            "is_gated": False,
            "vocab_size": 0,
            "sequence_length": 4,
            "precision": "fp32",
            "pp_size": 1,
            "vpp_size": 1,
            "recompute": "none",
            "distributed_optimizer": False,
            "num_microbatches": 1,
            **changes,
        }
    )


def a_machine(**changes) -> Hardware:
    """24 FLOPs, an assignment's, in a second, of what all ranks have 12; moving costs next to
    nothing unless it is said.
    """
    numbers = {
        "domain_ranks": 64,
        "server_ranks": 4,
        "memory_bytes": 1e9,
        "peak_flops_per_s": 48.0,
        "expert_efficiency": 0.5,
        "dense_efficiency": 0.25,
        "memory_bandwidth": 1e15,
        "optimizer_bandwidth": 1e15,
        "token_bandwidth": 16.0,
        "weight_bandwidth": 48.0,
        "outer_bandwidth": 4.0,
        "overlap": 0.0,
        "relay_threshold": 4,
        "solve_us": {"quota": 1000.0},
        **changes,
    }
    return Hardware(
        name="hand", summary="", sources=dict.fromkeys(constants(), "by hand"), **numbers
    )


def times_of(hardware, plan, load, *, shape=None, solve_s=0.0, slots=1, placed=None):
    machine = Machine(shape or a_shape(), hardware, 2, 2, tokens=8.0)
    planned = [Planned(plan, placed, 0.0)]
    parts = _layer_times(machine, load[None], planned, solve_s=solve_s, slots=slots)
    return [{name: float(value) for name, value in part.items()} for part in parts]


@pytest.fixture
def load():
    return worked_example().load


def simulated(loads, *strategies, hardware=None, shape=None, num_gpus=None, slots=1, **settings):
    setting = Setting(
        shape=shape or a_shape(),
        hardware=hardware or a_machine(),
        num_gpus=num_gpus,
        planning=PlanSettings(**settings),
        slots=slots,
        nvlink_domain=None,
    )
    return simulate(loads, strategies, setting)


def test_equations_by_hand(load):
    """A replica is 48 bytes at 48 a second; 2 tokens of 8 bytes go there and back at 16 a second;
    8 assignments at a second each.
    """
    plan = solve(load, ep_size=2, slots=1)
    forward, backward = times_of(a_machine(), plan, load, solve_s=0.25)
    assert forward["solve"] == 0.25
    assert forward["weights"] == 1.0  # Eq. 5
    assert forward["tokens"] == 2 * 2 * 8 / 16  # Eq. 4
    assert forward["experts"] == pytest.approx(8.0, rel=1e-9)  # Eq. 3
    # 8 tokens, each 2 x (16 attention + 8 router) + 2 x 4 x 2 FLOPs of attention, 12 in a second.
    assert forward["dense"] == pytest.approx(8 * (2 * 24 + 16) / 12)
    # Eq. 2 and 3; without overlap the replicas come again, and their gradients go back.
    assert backward["tokens"] == forward["tokens"]
    assert backward["experts"] == pytest.approx(16.0, rel=1e-9)
    assert backward["dense"] == pytest.approx(2 * forward["dense"])
    assert (backward["weights"], backward["reduce"]) == (1.0, 1.0)


def test_without_balancing_by_hand(load):
    """Rank 0 computes 13 and receives 6 from rank 1."""
    none = solve(load, ep_size=2, slots=1, strategy="none")
    forward, backward = times_of(a_machine(), none, load, slots=0)
    assert (forward["weights"], backward["weights"], backward["reduce"]) == (0, 0, 0)
    assert forward["tokens"] == 2 * 6 * 8 / 16
    assert forward["experts"] == pytest.approx(13.0, rel=1e-9)


def test_reroute_hides_weights_or_is_hidden(load):
    """Eq. 1 takes the longer one; 5 x 8 x (4 + 6) bytes at 100 a second are 4 seconds."""
    plan = solve(load, ep_size=2, slots=1)
    forward, _ = times_of(a_machine(memory_bandwidth=100.0), plan, load)
    assert forward["weights"] == 4.0
    forward, _ = times_of(a_machine(memory_bandwidth=1000.0), plan, load)
    assert forward["weights"] == 1.0


def test_backward_hides_what_fits_beside_dense_parts(load):
    """They take 2 x 42.7 s; gradients come first, and are as many bytes as weights."""
    plan = solve(load, ep_size=2, slots=1)
    window = 2 * 8 * 64 / 12
    for seconds, weights, reduce in (
        (90, 90, 90 - window),
        (50, 2 * 50 - window, 0),
        (40, 0, 0),
    ):
        hardware = a_machine(overlap=1.0, weight_bandwidth=48 / seconds)
        _, backward = times_of(hardware, plan, load)
        assert backward["weights"] == pytest.approx(weights)
        assert backward["reduce"] == pytest.approx(reduce)


@pytest.mark.parametrize(
    ("overlap", "solve_s", "memory_bandwidth", "exposed"),
    [
        (0.0, 6.0, 1e15, (6, 20)),
        (1.0, 6.0, 1e15, (0, 20 - (16 - 6))),
        (1.0, 18.0, 1e15, (18 - 16, 20)),
        (0.5, 6.0, 1e15, (0, 20 - (8 - 6))),
        (1.0, 6.0, 400 / 15, (0, 15)),  # Reroute waits for the plan, not for the replicas.
    ],
)
def test_shared_experts_hide_plan_and_replicas(load, overlap, solve_s, memory_bandwidth, exposed):
    """8 tokens of 24 FLOPs, 12 in a second: 16 s, beside a plan and then 20 s of weights."""
    plan = solve(load, ep_size=2, slots=1)
    hardware = a_machine(
        overlap=overlap, weight_bandwidth=48 / 20, memory_bandwidth=memory_bandwidth
    )
    shape = a_shape(shared_expert_hidden_size=3)
    forward, _ = times_of(hardware, plan, load, shape=shape, solve_s=solve_s)
    assert (forward["solve"], forward["weights"]) == pytest.approx(exposed)


@pytest.mark.parametrize(("overlap", "seconds"), [(0.0, 6.0), (1.0, 6.0), (1.0, 70.0), (0.5, 70.0)])
def test_what_was_placed_by_a_prediction_has_moved_before(load, overlap, seconds):
    """8 s of the experts of the layer before and 58.7 s of what is dense hide it, of which 16 are
    the shared expert, behind the plan; used or not, and what was not placed moves as ever."""
    plan = solve(load, ep_size=2, slots=1)
    hardware = a_machine(overlap=overlap, weight_bandwidth=48 / seconds)
    shape = a_shape(shared_expert_hidden_size=3)
    window = overlap * (8 + 8 * 88 / 12)
    for held, exposed in (
        (plan.experts_in_slots, seconds - window),
        (torch.full_like(plan.experts_in_slots, -1), seconds - overlap * 16),
        (torch.tensor([[2], [1]], dtype=torch.int32), None),
    ):
        forward, backward = times_of(hardware, plan, load, shape=shape, placed=held)
        if exposed is None:  # Wasted, and then the plan's own.
            exposed = max(seconds - window + overlap * 16, 0) + seconds - overlap * 16
        assert forward["weights"] == pytest.approx(max(exposed, 0), abs=1e-9)
        assert backward == times_of(hardware, plan, load, shape=shape)[1]


def test_recompute_does_the_forward_again(load):
    """Of 64 FLOPs of a token's dense parts, the router in the MoE layer has 16."""
    none = solve(load, ep_size=2, slots=1, strategy="none")
    passes = {}
    for recompute in ("none", "selective", "full"):
        forward, backward = times_of(
            a_machine(), none, load, shape=a_shape(recompute=recompute), slots=0
        )
        passes[recompute] = [backward[p] / forward[p] for p in ("tokens", "experts", "dense")]
    assert passes == {"none": [1, 2, 2], "selective": [2, 3, 2.25], "full": [2, 3, 3]}


@pytest.mark.parametrize("seconds", [50, 70, 80, 130])
def test_a_recomputed_layer_has_its_second_forward_to_hide_in(load, seconds):
    """Gradients take as long as weights, and come first.

    Of a token's 88 FLOPs in dense parts, router and shared expert have 40 in the MoE layer; twice
    all of them are the backward of the layer above.
    """
    plan = solve(load, ep_size=2, slots=1)
    hardware = a_machine(overlap=1.0, weight_bandwidth=48 / seconds)
    above = 2 * 88 * 8 / 12
    for recompute, flops in (("none", 0), ("selective", 40), ("full", 88)):
        shape = a_shape(shared_expert_hidden_size=3, recompute=recompute)
        _, backward = times_of(hardware, plan, load, shape=shape, solve_s=6.0)
        left = seconds - max(above - seconds, 0) - flops * 8 / 12
        assert backward["weights"] == pytest.approx(max(left, 0), abs=1e-9)
        assert backward["reduce"] == pytest.approx(max(seconds - above, 0))


def test_relays_halve_and_outer_links_slow():
    """8 replicas of expert 0 on 9 ranks; with relays its rank sends ceil(8 / sqrt(8)) = 3."""
    plan = solve(torch.ones(9, 9, dtype=torch.int64), ep_size=9, slots=1, strategy="none")
    slots = torch.full((9, 1), -1, dtype=torch.int32)
    slots[1:] = 0
    plan = BalancePlan(plan.layout, plan.quota, slots)
    assert int(relayed_sends(plan, 8).max()) == 8
    assert int(relayed_sends(plan, 4).max()) == 3
    # Domains of 3: 2 replicas stay inside, 6 go outside, 48 / 4 = 12 times as slow.
    assert int(timed_sends(plan, a_machine(domain_ranks=3)).max()) == 6 * 12
    assert int(timed_sends(plan, a_machine(domain_ranks=9, relay_threshold=8)).max()) == 8


def test_receivers_have_outer_links_too():
    """Ranks 0 and 1 send an expert each, rank 2 receives both, 12 times as slow."""
    plan = solve(torch.ones(3, 3, dtype=torch.int64), ep_size=3, slots=2, strategy="none")
    slots = torch.full((3, 2), -1, dtype=torch.int32)
    slots[2] = torch.tensor([0, 1])
    plan = BalancePlan(plan.layout, plan.quota, slots)
    assert timed_sends(plan, a_machine(domain_ranks=1)).tolist() == [12, 12, 24]


def test_tokens_out_of_the_domain():
    """Of 3 other ranks 2 are outside: two thirds of the bytes at 4 a second, a third at 16."""
    machine = Machine(a_shape(), a_machine(domain_ranks=2), 4, 4, tokens=1.0)
    assert machine.costs.token_bandwidth == pytest.approx(4 / (2 / 3))
    inside = Machine(a_shape(), a_machine(domain_ranks=4), 4, 4, tokens=1.0)
    assert inside.costs.token_bandwidth == 16.0
    # Of 4 ranks the last is alone in its domain: all its bytes go out.
    alone = Machine(a_shape(), a_machine(domain_ranks=3), 4, 4, tokens=1.0)
    assert alone.costs.token_bandwidth == 4.0


@pytest.mark.parametrize("ranks", [1, 4, 8, 12, 16, 96])
def test_replicas_stay_where_a_run_on_the_machine_would_keep_them(ranks):
    loads = Loads(torch.ones(1, ranks, ranks, dtype=torch.int64))
    asked = Asked(planning=PlanSettings(), slots=1, nvlink_domain=None)
    config = TrainConfig(parallel=ParallelConfig(ep_size=ranks))
    for domain_ranks in (1, 8, 64, 72):
        hardware = a_machine(domain_ranks=domain_ranks)
        known = {"shape": a_shape(num_experts=ranks), "hardware": hardware, "num_gpus": None}
        chosen = forecast_transport(config, hardware).domain_ranks
        assert Setting.of(asked, loads, **known).nvlink_domain == chosen
        told = dataclasses.replace(asked, nvlink_domain=ranks)
        assert Setting.of(told, loads, **known).nvlink_domain == ranks


def test_step_by_hand(load):
    """2 layers, 3 microbatches on 2 stages: 4 turns of one layer; then Adam."""
    shape = a_shape(pp_size=2, num_microbatches=3)
    hardware = a_machine(optimizer_bandwidth=1e3)
    report = simulated(Loads(load[None]), "quota", hardware=hardware, shape=shape)
    quota = report["strategies"]["quota"]
    # A rank: 2 experts of 12, 16 + 8 of the rest; the rest over 2 ranks, 8 bytes a weight.
    reduction = 24 / 2 * 8 / 48
    adam = 48 * (7 * 4 + 4) / 1e3
    layer_s = quota["layer_ms"]["total"] / 1e3
    assert quota["step_ms"] == pytest.approx(1e3 * (4 * layer_s + reduction + adam))
    parts = [ms for name, ms in quota["layer_ms"].items() if name != "total"]
    assert sum(parts) == pytest.approx(quota["layer_ms"]["total"])
    # 3 microbatches of 8 tokens on each of 2 data-parallel ranks, 4 ranks in all.
    tokens = 3 * 8 * 2 / 4 / (quota["step_ms"] / 1e3)
    assert quota["tokens_per_s_per_gpu"] == pytest.approx(tokens)


def test_chunks_fill_the_pipeline_in_smaller_steps(load):
    """On 2 stages one chunk waits for one microbatch, of 2 layers; two chunks for half of one."""
    one, two = (
        simulated(
            Loads(load[None]),
            shape=a_shape(num_layers=4, pp_size=2, vpp_size=chunks, num_microbatches=4),
        )["strategies"]["none"]
        for chunks in (1, 2)
    )
    assert one["step_ms"] - two["step_ms"] == pytest.approx(2 * one["layer_ms"]["total"] / 2)


def test_what_is_beside_moe_layers_by_hand():
    """Of 2 layers one is dense; 8 tokens, 12 FLOPs of them in a second, three or four times."""
    shape = a_shape(num_dense_layers=1, dense_hidden_size=5, vocab_size=7)
    dense = 8 * (2 * (16 + 2 * 2 * 5) + 16) / 12
    logits = 8 * 2 * 2 * 7 / 12
    machine = Machine(shape, a_machine(), 2, 2, tokens=8.0)
    assert machine.outside_layers_s() == pytest.approx(3 * (dense + logits))
    again = dataclasses.replace(shape, recompute="full")
    machine = Machine(again, a_machine(), 2, 2, tokens=8.0)
    assert machine.outside_layers_s() == pytest.approx(4 * dense + 3 * logits)


def test_solving_takes_the_machines_time_for_as_many_ranks(load):
    quota = simulated(Loads(load[None]), "quota")["strategies"]["quota"]
    assert quota["layer_ms"]["forward_solve"] == pytest.approx(1.0 * (0.42 + 0.58 * 2 / 64))
    exact = simulated(Loads(load[None]), "exact")["strategies"]["exact"]
    assert exact["layer_ms"]["forward_solve"] > 0.001  # Not named there: as it took here.
    both = layer_table(simulated(Loads(load[None]), "exact", "quota", "eplb_exact"))
    assert "Solving of exact, eplb_exact as it took on this machine: hand does not say." in both
    assert "Solving of" not in layer_table(simulated(Loads(load[None]), "quota"))


def test_one_stage_has_both_embeddings():
    for pp_size, embeddings in ((1, 2 * 7 * 2), (2, 7 * 2)):
        machine = Machine(a_shape(vocab_size=7, pp_size=pp_size), a_machine(), 2, 4, tokens=8.0)
        assert machine.params()[1] == 2 * (16 + 8) / pp_size + embeddings


def test_memory_of_slots_by_hand():
    """An expert of 12 weights, float32 as their gradients."""
    assert Machine(a_shape(), a_machine(), 2, 2, tokens=8.0).slot_bytes(3) == 3 * 12 * 8


def test_rates_that_a_run_has_measured_replace_the_machines():
    """An assignment has 24 FLOPs; three times as long as at the peak is a third of it."""
    hardware, shape = a_machine(), a_shape()
    assert as_measured(hardware, shape, BalanceConfig()) == hardware
    peak = hardware.peak_flops_per_s
    told = BalanceConfig(link_bandwidth=7.0, assignment_time=3 * 24 / peak)
    measured = as_measured(hardware, shape, told)
    assert measured.weight_bandwidth == 7.0
    assert measured.expert_efficiency == pytest.approx(1 / 3)
    assert "a run with balance.objective=time" in measured.sources["weight_bandwidth"]
    assert measured.sources["dense_efficiency"] == hardware.sources["dense_efficiency"]
    with pytest.raises(ValueError, match=r"expert_efficiency .* must be > 0 and <= 1"):
        as_measured(hardware, shape, BalanceConfig(assignment_time=24 / peak / 2))


@pytest.fixture
def skewed():
    return Loads(torch.stack([workloads.zipf(16, 64, 512, 0.8, seed) for seed in range(3)]))


@pytest.fixture
def model():
    return a_shape(num_experts=64, hidden_size=64, expert_hidden_size=64)


REAL = {
    "peak_flops_per_s": 1e12,
    "memory_bandwidth": 1e11,
    "optimizer_bandwidth": 1e11,
    "token_bandwidth": 1e10,
    "weight_bandwidth": 1e10,
    "outer_bandwidth": 1e9,
}


@pytest.mark.parametrize(
    "name",
    [
        "peak_flops_per_s",
        "expert_efficiency",
        "dense_efficiency",
        "memory_bandwidth",
        "optimizer_bandwidth",
        "token_bandwidth",
        "weight_bandwidth",
    ],
)
def test_what_is_slower_takes_longer(name, skewed, model):
    hardware = a_machine(**REAL)
    slower = dataclasses.replace(hardware, **{name: getattr(hardware, name) / 4})
    step_ms = [
        simulated(skewed, "quota", hardware=each, shape=model)["strategies"]["quota"]["step_ms"]
        for each in (hardware, slower)
    ]
    assert step_ms[1] > step_ms[0]


def test_small_domains_take_longer(skewed, model):
    step_ms = [
        simulated(
            skewed, "quota", hardware=a_machine(**REAL, domain_ranks=domain_ranks), shape=model
        )["strategies"]["quota"]["step_ms"]
        for domain_ranks in (16, 4)
    ]
    assert step_ms[1] > step_ms[0]


def test_ideal_is_fastest_and_none_slowest(skewed, model):
    """With links that are fast enough for balancing to be worth it."""
    links = {"weight_bandwidth": 1e12, "token_bandwidth": 1e11}
    fast = a_machine(**(REAL | links), solve_us={"quota": 1.0, "eplb_exact": 1.0})
    report = simulated(skewed, "quota", "eplb_exact", hardware=fast, shape=model, slots=2)
    step_ms = {name: of["step_ms"] for name, of in report["strategies"].items()}
    assert list(step_ms) == ["none", "quota", "eplb_exact", "ideal"]
    assert min(step_ms, key=step_ms.get) == "ideal"
    assert max(step_ms, key=step_ms.get) == "none"
    ideal = report["strategies"]["ideal"]
    assert (ideal["share_of_ideal"], ideal["imbalance_mean"]) == (1.0, pytest.approx(1, abs=0.02))
    assert report["strategies"]["none"]["gain_over_none"] == 0


def test_even_load_keeps_what_ranks_send(skewed):
    even = even_load(skewed.load)
    assert torch.equal(even.sum(-1), skewed.load.sum(-1))
    assert int(even.amax(-1).sub(even.amin(-1)).max()) <= 1
    of_all_ranks = even.sum(-2)
    assert int(of_all_ranks.amax(-1).sub(of_all_ranks.amin(-1)).max()) <= 1


def test_time_takes_the_machines_costs(skewed, model):
    """Where weights are dear, no replica is worth it."""
    dear = a_machine(**(REAL | {"weight_bandwidth": 1.0}))
    of = simulated(skewed, "quota:time", "quota", hardware=dear, shape=model)["strategies"]
    assert of["quota:time"]["imbalance_mean"] == of["none"]["imbalance_mean"]
    assert of["quota"]["imbalance_mean"] < of["none"]["imbalance_mean"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": a_shape(num_experts=8)}, "the loads have 4 experts, the model tiny has 8"),
        ({"num_gpus": 3}, r"gpus \(3\) must be a multiple of EP x PP \(2 x 1\)"),
        (
            {"hardware": a_machine(weight_bandwidth=1e-300)},
            r"expert_bytes / link_bandwidth \(4\.8e\+301 s\) must be <= 100000 s",
        ),
    ],
)
def test_sizes_that_do_not_fit(load, changes, message):
    with pytest.raises(ValueError, match=message):
        simulated(Loads(load[None]), "quota", **changes)


def test_strategies_that_do_not_fit(load):
    with pytest.raises(ValueError, match="unknown strategy 'best'"):
        simulated(Loads(load[None]), "best")
    with pytest.raises(ValueError, match="the loads are all zero"):
        simulated(Loads(torch.zeros(1, 2, 4, dtype=torch.int64)), "quota")


# Files


def test_hardware_file_round_trip(tmp_path):
    hardware = a_machine()
    write_hardware(tmp_path / "hand.yaml", hardware)
    read = read_hardware(str(tmp_path / "hand.yaml"))
    assert dataclasses.asdict(read) == dataclasses.asdict(hardware)


@pytest.mark.parametrize("name", ["rack_64", "server_8_h200"])
def test_hardware_of_the_repository(name):
    hardware = read_hardware(name)
    assert hardware.name == name
    assert all(hardware.sources[constant] for constant in constants())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("overlap", "overlay", "unknown constant 'overlay'"),
        ("value: 1000000000.0", "value: -1.0", r"memory_bytes \(-1.0\) must be > 0"),
        ("value: 1000000000.0", "value: much", r"memory_bytes \('much'\) must be a finite"),
        ("value: 1000000000.0", "value: .nan", "must be a finite number"),
        ("value: 64", "value: 6.5", r"domain_ranks \(6.5\) must be a whole number"),
        ("value: 48.0", "value: 5.0e-324", r"peak_flops_per_s \(5e-324\) must be >= 1"),
        ("value: 0.5", "value: 1.5", r"expert_efficiency \(1.5\) must be > 0 and <= 1"),
        ("value: 0.25", "value: 0.0", r"dense_efficiency \(0.0\) must be > 0 and <= 1"),
        ("optimizer_bandwidth", "gemm_efficiency", "unknown constant 'gemm_efficiency'"),
        ("value: 64", "value: 1e30", "domain_ranks .* must be a whole number"),
        ("value: 64", f"value: {10**30}", "10000.* is beyond 64 bits"),
        ("quota: 1000.0", "quota: -1", r"solve_us.quota \(-1\) must be >= 0"),
        ("quota: 1000.0", "qota: 1", "solve_us of unknown strategy 'qota'; known: craft, eplb"),
        ("source: by hand", "source: ''", "must say its source"),
        ("constants:", "numbers:", "has no section 'constants'"),
        ("constants:", "constants: [", "is no readable YAML"),
    ],
)
def test_wrong_hardware_files(tmp_path, old, new, message):
    path = tmp_path / "hand.yaml"
    write_hardware(path, a_machine())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_hardware(str(path))


@pytest.mark.parametrize("instead", [[], ["  overlap: ${constants.relay_threshold.value}"]])
def test_a_constant_is_missing(instead, tmp_path):
    path = tmp_path / "hand.yaml"
    write_hardware(path, a_machine())
    lines = path.read_text().splitlines()
    at = lines.index("  overlap:")
    path.write_text("\n".join(lines[:at] + instead + lines[at + 3 :]))
    with pytest.raises(ValueError, match="overlap must be there"):
        read_hardware(str(path))


def test_shape_of_a_recipe():
    shape = read_shape("quickstart", ["model.num_layers=5", "data.path=nowhere"])
    assert (shape.num_layers, shape.hidden_size, shape.topk) == (5, 128, 1)
    assert (shape.expert_params, shape.num_microbatches, shape.vocab_size) == (2 * 128 * 1024, 1, 0)
    # This recipe leaves the data to the caller.
    assert read_shape("gpt_8x64e", []).num_microbatches == 16
    with pytest.raises(ValueError, match=r"parallel.tp_size \(2\) must be 1"):
        read_shape("quickstart", ["parallel.tp_size=2", "data.path=nowhere"])
    with pytest.raises(ValueError, match=r"expert_tensor_parallel_size \(2\) must be 1"):
        read_shape("qwen3_30b", ["+megatron.expert_tensor_parallel_size=2"])


def test_shape_by_settings_of_megatron():
    plain = read_shape("qwen3_30b", [])
    latent = read_shape("qwen3_30b", ["+megatron.moe_latent_size=512"])
    # A token goes into the latent width and back once, and meets 8 experts of 3 matrices.
    saved = 8 * 3 * 768 * (2048 - 512) - 2 * 2048 * 512
    assert plain.token_flops - latent.token_flops == 48 * 2 * saved
    assert (latent.expert_params, latent.token_bytes) == (3 * 512 * 768, 2 * 512)
    every_second = read_shape("qwen3_30b", ["+megatron.moe_layer_freq=2"])
    assert (every_second.num_moe_layers, every_second.num_dense_layers) == (24, 24)


@pytest.mark.parametrize(
    ("settings", "windowed"),
    [
        (["+megatron.window_size=[127,0]"], 48),
        (["+megatron.window_size=[127,0]", "+megatron.window_attn_skip_freq=4"], 36),
        (["+megatron.window_size=[9999,0]"], 48),
        (["+megatron.window_size=[-1,0]"], 0),
    ],
)
def test_tokens_attend_to_those_of_their_window(settings, windowed):
    plain, shape = read_shape("qwen3_30b", []), read_shape("qwen3_30b", settings)
    length = plain.sequence_length
    seen = sum(min(128 if "127" in settings[0] else length, 1 + token) for token in range(length))
    # Of the tokens that each sees, itself counts as half.
    fewer = windowed * ((length + 1) / 2 - seen / length)
    of_one = 4 * plain.attention_width
    assert (plain.token_flops - shape.token_flops) / of_one == pytest.approx(fewer, abs=windowed)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_235b", 235),
        ("glm45_106b", 106),
        ("deepseek_v3", 671),
        ("glm47_358b", 358),
        ("refmoe_288b", 288),
        ("qwen3_30b", 30.5),
        ("mixtral_8x7b", 46.7),
    ],
)
def test_shapes_have_the_parameters_of_their_names(name, billions):
    """All layers and both embeddings. Norms and biases are left out; DeepSeek-V3 has its third
    dense layer counted as MoE (UltraEP, Table 3), Qwen3 two dense ones that it has not.
    """
    shape = read_shape(name, [])
    params = (
        shape.num_moe_layers * (shape.moe_dense_params + shape.num_experts * shape.expert_params)
        + shape.num_dense_layers * shape.dense_layer_params
        + 2 * shape.vocab_size * shape.hidden_size
    )
    assert params / 1e9 == pytest.approx(billions, rel=0.04)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["topk=0"], r"topk \(0\) must be >= 1"),
        (["topk=200"], r"topk \(200\) must be <= num_experts \(128\)"),
        (["precision=fp8"], r"precision \('fp8'\) must be one of fp32, bf16"),
        (["width=3"], "width"),
        (["hidden_size=much"], "yaml: hidden_size: Value 'much' of type 'str' could not"),
        (["num_microbatches"], "yaml: num_microbatches: Incompatible value 'None'"),
        (["pp_size=95"], r"pp_size x vpp_size \(95 x 1\) must be <= num_layers \(94\)"),
        (["num_dense_layers=94"], r"num_dense_layers \(94\) must be < num_layers \(94\)"),
    ],
)
def test_wrong_shapes(overrides, message, tmp_path):
    file = tmp_path / "sizes.yaml"
    sizes = dataclasses.asdict(read_shape("qwen3_235b", []))
    OmegaConf.save(OmegaConf.create(sizes), file)
    with pytest.raises(ValueError, match=message) as caught:
        read_shape(str(file), overrides)
    assert "\n" not in str(caught.value)


def test_a_recipe_by_its_path():
    assert read_shape("recipes/traced.yaml", []) == read_shape("traced", [])


# The command


@pytest.fixture
def files(tmp_path, load):
    write_loads(tmp_path / "loads.npz", Loads(load[None]))
    write_hardware(tmp_path / "hand.yaml", a_machine())
    shape = dataclasses.asdict(a_shape())
    (tmp_path / "tiny.yaml").write_text(json.dumps(shape))
    return tmp_path


def words(files, *more, model="tiny.yaml", hardware="hand.yaml", strategies="quota"):
    return [
        *("simulate", str(files / "loads.npz"), "--slots", "1"),
        *("--model", str(files / model), "--hardware", str(files / hardware)),
        *("--strategies", strategies),
        *more,
    ]


def test_command_writes_what_it_says(files, capsys):
    out = files / "out"
    assert main(words(files, "--set", "num_microbatches=4", "--json", "--out", str(out))) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads((out / "simulate.json").read_text()) == report
    assert report["model"]["num_microbatches"] == 4
    assert report["hardware"]["constants"]["overlap"] == {"value": 0.0, "source": "by hand"}
    assert list(report["strategies"]) == ["none", "quota", "ideal"]
    assert set(report["strategies"]["quota"]) == {
        *("imbalance_mean", "imbalance_before", "layer_ms", "step_ms", "tokens_per_s_per_gpu"),
        *("solve_from", "share_of_ideal", "gain_over_none"),
    }
    text = (out / "simulate.md").read_text()
    assert all(name in text for name in constants())
    assert re.search(r"\| memory_bytes +\| +1e\+09 \|", text)
    assert re.search(r"\| solve_us +\| +quota 1000 \|", text)
    assert LEGEND in text
    assert all(what in text for what in report["left_out"])
    assert main(words(files, "--out", str(out))) == 2
    assert "replace it with --overwrite" in capsys.readouterr().err
    assert main(words(files, "--out", str(out), "--overwrite")) == 0
    shown = capsys.readouterr().out
    assert LEGEND in shown
    assert "Left out:" in shown


def test_tokens_that_choose_fewer_experts_than_the_models(files, capsys):
    """Rank 0 has 6 of 8 assignments on one expert: no token of 2 choices has two of them there."""
    assert main(words(files, "--set", "topk=2")) == 2
    said = "choose at most 1.33 experts each, those of the model tiny 2: --set topk"
    assert said in capsys.readouterr().err
    load = worked_example().load.clone()
    load[1] = 0  # A rank without tokens says nothing.
    write_loads(files / "loads.npz", Loads(load[None]), overwrite=True)
    assert main(words(files)) == 0


def test_command_names_the_size_that_would_fit(files, capsys):
    assert main(words(files, "--set", "num_experts=8")) == 2
    assert "has 8: --set num_experts=4\n" in capsys.readouterr().err
    assert main(words(files, "--set", "num_experts=4")) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hardware": "abacus"}, "no hardware"),
        ({"model": "mind"}, "no model"),
        ({"strategies": "best"}, "unknown strategy 'best'"),
        ({"hardware": "tiny.yaml"}, "has no section 'constants'"),
        ({"model": "hand.yaml"}, "Key 'summary' not in"),
    ],
)
def test_command_says_what_is_wrong(files, capsys, change, message):
    assert main(words(files, **change)) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.count("\n") == 1
    assert message in stderr


def test_the_example_of_the_help_runs(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    (example,) = re.findall(
        r"example:\n  megatron-ext (.*?)\n\n", capsys.readouterr().out, re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    spec = make_spec("zipf", ranks=64, experts=128, imbalance=2.0)
    write_loads(tmp_path / "loads.npz", generate("zipf", spec))
    assert main(shlex.split(example.replace("\\\n", ""))) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title.endswith("8192 tokens a rank in a microbatch, 4 microbatches, 1 load, 2 slots")
