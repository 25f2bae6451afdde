"""Calibration: the blocks do what they are named for, on the quickstart's model, and give all
constants. Layer 2. No number can be checked on a machine whatever it is; only its magnitude.
"""

import json

import pytest
import torch

from megatron_ext.cli import main
from megatron_ext.lab.hardware import constants, read_hardware
from megatron_ext.trainer.compose import load_config
from tests.perf import calibrate
from tests.perf.calibrate import StepBlocks, _uneven_loads, calibration_run
from tests.ranks import run_ranks

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="only CPU ranks are calibrated")


def test_the_run_is_the_quickstarts_with_as_many_experts_on_each_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load_config(["balance=none", "data.path="], config_name="quickstart")
    assert calibration_run(2) == recipe
    run = calibration_run(4)
    assert (run.parallel.ep_size, run.model.num_experts) == (4, 2 * recipe.model.num_experts)
    assert run.data.global_batch_size == 2 * recipe.data.global_batch_size


def test_loads_are_those_of_all_tokens_and_never_the_same():
    loads = _uneven_loads(1000, 4, 20)
    assert loads.shape == (20, 4, 8)
    assert (loads.sum((1, 2)) == 1000).all()
    assert len({tuple(load.flatten().tolist()) for load in loads}) == 20


def _blocks(rank: int) -> None:
    import tests.gpt  # noqa: F401  Enables the CPU platform, and drops the model afterwards.

    config = calibration_run(2)
    config.model.num_layers = 1
    config.data.sequence_length, config.data.micro_batch_size = 16, 2
    blocks = StepBlocks(config, vocab_size=257)
    layer = blocks._layer
    expert_weights = list(blocks._moe.experts.parameters())
    params = torch.tensor(blocks.optimizer_params)
    torch.distributed.all_reduce(params)
    # Both ranks' mains; once attention, router, norms with their biases, and two embeddings.
    dense = 4 * 128**2 + 128 * 16 + 3 * 2 * 128 + 2 * 384 * 128
    assert int(params) == 2 * 8 * 2 * 128 * 1024 + dense

    blocks.run_tokens()
    # Each token comes back to its place, and so does its gradient.
    assert torch.equal(blocks._hidden.grad, blocks._hidden.detach())
    assert torch.equal(blocks._probs.grad, blocks._probs.detach())

    blocks.run_dense()
    for weight in (layer.self_attention.linear_qkv.weight, blocks._moe.router.weight):
        assert weight.main_grad.any()
    assert not any(weight.main_grad.any() for weight in expert_weights)

    blocks.run_experts(torch.tensor([3, 0, 1, 2, 5, 0, 0, 4]))
    reached = [bool(weight.main_grad.any()) for weight in expert_weights]
    assert reached == [count > 0 for count in (3, 0, 1, 2, 5, 0, 0, 4) for _ in range(2)]

    before = expert_weights[0].detach().clone()
    blocks.run_optimizer()
    assert not torch.equal(expert_weights[0], before)
    assert not any(weight.main_grad.any() for weight in expert_weights)


@on_a_cpu
def test_blocks_run_what_they_are_named_for():
    run_ranks(_blocks, 2)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "here.yaml"
    calibrate.main(["--out", str(out), "--rounds", "5"])
    return out


@pytest.mark.slow
@on_a_cpu
def test_all_constants_are_there_and_plausible(calibrated):
    read = read_hardware(str(calibrated))
    assert read.name == "here"
    assert {"quota", "exact", "quota_paper"} <= set(read.solve_us)
    assert all(read.sources[name] for name in constants())
    assert 1e8 < read.peak_flops_per_s < 1e13
    assert 0.01 < read.dense_efficiency <= 1
    assert 0.01 < read.expert_efficiency <= 1
    for name in ("memory", "optimizer", "token", "weight", "outer"):
        assert 1e5 < getattr(read, f"{name}_bandwidth") < 1e12


@pytest.mark.slow
@on_a_cpu
def test_a_calibration_is_hardware_to_simulate_on(calibrated, capsys, tmp_path):
    out = tmp_path / "loads.npz"
    words = ["synth", "zipf", "--ranks", "2", "--experts", "16", "--batch", "2", "--out", str(out)]
    assert main(words) == 0
    capsys.readouterr()
    words = ["simulate", str(out), "--slots", "1", "--model", "quickstart", "--json"]
    assert main([*words, "--hardware", str(calibrated), "--strategies", "quota"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hardware"]["name"] == "here"
    assert report["strategies"]["none"]["step_ms"] > report["strategies"]["ideal"]["step_ms"]
