"""What a trace says about balancing: the numbers are replay's and simulate's, the advice holds."""

import dataclasses
import json
import math

import torch

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.solve import solve
from megatron_ext.balance.strategies.strategy import PlanSettings
from megatron_ext.files.loads import Loads, write_loads
from megatron_ext.lab.planning import Asked
from megatron_ext.lab.simulate import Setting, simulate
from megatron_ext.lab.whatif import answers, page, sample, what_if
from megatron_ext.mcore.capacity import RankCapacity
from tests import browser, workloads
from tests.cli.command import run
from tests.lab.test_simulate import a_machine, a_shape

PLANNING = PlanSettings(tolerance=0.01, min_quota=1)


def hot_in_layer_2() -> Loads:
    """Four microbatches of two layers: the first is even, the second has one hot rank."""
    even = torch.full((4, 8), 1000)
    load = torch.stack([even if layer == 1 else skewed(mb) for mb in range(4) for layer in (1, 2)])
    keys = [(1, mb, layer) for mb in range(4) for layer in (1, 2)]
    step, microbatch, layer = torch.tensor(keys).T
    return Loads(load, {"step": step, "microbatch": microbatch, "layer": layer})


def skewed(microbatch: int) -> torch.Tensor:
    load = torch.full((4, 8), 500)
    load[:, :2] += torch.tensor([[1500 + 10 * microbatch, 500]])
    return load


ASKED = Asked(planning=PLANNING, slots=1, nvlink_domain=None)


def setting(**changes) -> Setting:
    known = {"shape": a_shape(num_experts=8), "hardware": a_machine(), "num_gpus": 4}
    return Setting(**vars(ASKED), **(known | changes))


def test_numbers_are_the_simulations() -> None:
    loads, asked = hot_in_layer_2(), setting()
    report = what_if(loads, asked)
    assert [one["slots"] for one in report["tried"]] == [1, 2, 4]
    for one in report["tried"]:
        of = simulate(loads, ["quota"], dataclasses.replace(asked, slots=one["slots"]))[
            "strategies"
        ]
        assert one["step_ms"] == of["quota"]["step_ms"]
        assert one["speed_up"] == of["none"]["step_ms"] / of["quota"]["step_ms"]
        assert one["share_of_ideal"] == of["quota"]["share_of_ideal"]
        assert one["slot_bytes"] == asked.machine(loads).slot_bytes(one["slots"]) > 0
    best = min(one["step_ms"] for one in report["tried"])
    assert report["slots"] == next(
        one["slots"] for one in report["tried"] if one["step_ms"] <= 1.01 * best
    )
    first, second = report["layers"]
    assert (first["layer"], second["layer"]) == (1, 2)
    assert first["imbalance_before"] == first["imbalance"] == 1
    assert second["imbalance_before"] > 1.3 > 1.02 > second["imbalance"]
    assert second["speed_up"] > 1.1 > first["speed_up"]
    assert dict(answers(report))["layers that gain"] == "1 of 2: 2"
    gain = report["speed_up"]
    said = f"{gain:.2f} x {{}}({0.9 * gain:.2f} to {1.1 * gain:.2f} if the model is 10 % off)"
    assert said.format("as fast ") in report["verdict"]
    assert dict(answers(report))["speed-up of a step"] == said.format("")
    # Columns that are absent are not explained.
    assert "Of ideal" in page(report)
    assert "Of ideal" not in page(what_if(loads, ASKED))


def test_no_token_is_beyond_the_capacity() -> None:
    """And of a smaller one some are: counted in plans made by themselves."""
    loads = hot_in_layer_2()
    report = what_if(loads, setting())
    plan = solve(
        loads.load,
        ep_size=4,
        slots=report["slots"],
        strategy="quota",
        tolerance=PLANNING.tolerance,
        min_quota=PLANNING.min_quota,
    )
    balanced = loads.load.sum((1, 2), keepdim=True)[:, 0] / 4
    home = loads.load.sum(1).view(len(loads), 4, 2).sum(-1)
    for which, rank_loads in (("before", home), ("after", plan.rank_loads())):
        factor = report["capacity_factor"][which]
        assert (rank_loads <= factor * balanced).all()
        assert (rank_loads > (factor - 0.011) * balanced).any()
    assert report["capacity_factor"]["before"] > report["capacity_factor"]["after"]


def test_a_layer_takes_the_capacity_and_drops_nothing() -> None:
    """Where loads are even: of HybridEP's rows one stays empty, and plans may be within 1 %."""
    loads = Loads(torch.full((1, 4, 8), 1024))
    quota = solve(loads.load[0], ep_size=4, slots=1).quota
    for which, factor in what_if(loads, ASKED)["capacity_factor"].items():
        capacity = RankCapacity(factor=factor, align=256, pad=1)
        assert not capacity.rows_over(quota, 8192).any(), which
        layout = ExpertLayout(num_experts=8, ep_size=4, slots=1, nvlink_domain=4)
        assert factor >= capacity.least_factor(8192, layout, PLANNING.tolerance)


def test_break_even_is_where_the_gain_begins() -> None:
    """Slower links move it up; where nothing is even uneven, balancing never gains."""
    loads = Loads(torch.stack([skewed(mb) for mb in range(4)]))
    found = []
    for weight_bandwidth in (0.2, 0.05):
        hardware = dataclasses.replace(a_machine(), weight_bandwidth=weight_bandwidth)
        asked = setting(hardware=hardware)
        report = what_if(loads, asked)
        tokens = report["break_even"]["tokens"]
        found.append(tokens)
        for factor, gains in ((1.1, True), (0.9, False)):
            scale = factor * tokens / report["tokens_per_expert"]
            scaled = Loads((loads.load * scale).round().long())
            of = simulate(scaled, ["quota"], dataclasses.replace(asked, slots=report["slots"]))[
                "strategies"
            ]
            faster = of["quota"]["layer_ms"]["total"] < of["none"]["layer_ms"]["total"]
            assert faster == gains
    assert found[0] < found[1]
    even = what_if(Loads(torch.full((1, 4, 8), 1000)), setting())
    assert even["break_even"] == {"gains": "never", "tokens": None}
    assert even["verdict"].startswith("Balancing would not pay here")
    assert dict(answers(even))["slots to take"] == "none"


def test_more_slots_where_they_are_needed() -> None:
    """Without a model, by how even ranks become: six of eight experts of a rank are hot."""
    load = torch.full((1, 4, 32), 10)
    load[:, :, :8] = 200
    report = what_if(Loads(load), ASKED)
    after = {one["slots"]: one["imbalance"] for one in report["tried"]}
    best = min(after.values())
    assert report["slots"] > 1
    assert after[report["slots"]] <= 1.01 * best
    assert all(value > 1.01 * best for slots, value in after.items() if slots < report["slots"])
    assert report["speed_up"] is report["break_even"] is None


def test_long_traces_are_sampled_by_whole_microbatches() -> None:
    layers, microbatches = 3, 2000
    keys = [(mb // 4, mb % 4, layer) for mb in range(microbatches) for layer in range(layers)]
    names = ("step", "microbatch", "layer")
    trace = dict(zip(names, torch.tensor(keys).T, strict=True))
    load = torch.arange(len(keys))[:, None, None].expand(-1, 2, 2)
    some = sample(Loads(load, trace))
    assert 1000 < len(some) <= 1024
    assert some.layers() == [0, 1, 2] * (len(some) // layers)
    assert int(some.load[0, 0, 0]) == 0
    assert int(some.load[-1, 0, 0]) == len(keys) - 1


def test_command(tmp_path, capsys) -> None:
    """On the terminal, as JSON and as a page, in which names stand as text."""
    write_loads(tmp_path / "loads.npz", Loads(workloads.zipf(4, 8, 500, 1.0, seed=1)[None]))
    words = ["whatif", tmp_path / "loads.npz"]
    status, stdout, _ = run(capsys, *words, "--out", tmp_path / "page.html")
    assert status == 0
    assert stdout.startswith("The busiest rank computes ")
    _look_at(tmp_path / "page.html")
    status, stdout, _ = run(capsys, *words, "--json", "--ep-size", 4)
    report = json.loads(stdout)
    assert (status, report["ranks"], report["speed_up"]) == (0, 4, None)
    assert math.isclose(report["imbalance"], report["tried"][0]["imbalance"], rel_tol=0.01)
    named = report | {"model": "<script>alert(1)</script>", "machine": None}
    assert "alert(1)" in page(named)
    assert "<script>alert" not in page(named)
    for further, said in (
        (["--ep-size", 2], "--ep-size (2) must be that of"),
        (["--model", "quickstart"], "--model and --hardware are given together, or neither"),
        (
            ["--model", "quickstart", "--hardware", "rack_64"],
            "the loads have 8 experts, the model quickstart has 16: --set model.num_experts=8",
        ),
        (["--out", tmp_path / "page.html"], "exists already: replace it with --overwrite"),
    ):
        status, stdout, stderr = run(capsys, *words, *further)
        assert (status, stdout, stderr.count("\n")) == (2, "", 1)
        assert said in stderr
    write_loads(tmp_path / "one.npz", Loads(torch.ones(1, 1, 8, dtype=torch.int64)))
    status, _, stderr = run(capsys, "whatif", tmp_path / "one.npz")
    assert (status, "EP group of 1 rank has nobody" in stderr) == (2, True)


def _look_at(file) -> None:
    """The page has its tables, and charts whose bars can be hidden by the keyboard."""
    assert file.read_text().count("<table>") == 3
    if browser.CHROMIUM is None:
        return
    with browser.opened(file, width=420, dark=True) as shown:
        shown.wait_for_selector("body[data-drawn]")
        bars = shown.locator("figure .bars .point")
        before = bars.count()
        assert browser.cut_off(shown) == []
        # Bars of both charts start at 1 and compare.
        assert (
            shown.evaluate(
                "charts.map(({ host }) => [host.data[0].base, host.layout.yaxis.range[0]])"
            )
            == [[1, 1]] * 2
        )
        assert before == 2 + 4  # One layer before and after; no slots, and three numbers of them.
        shown.locator("#show-0").press("Enter")
        shown.wait_for_function("document.querySelectorAll('figure .bars .point').length < 6")
        assert bars.count() == before - 2
