"""`megatron-ext train --dry-run`: every recipe, totals of published models, and wrong words.

In a kept rank, where Megatron is imported already and no other test meets what a run leaves.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megatron_ext.files.recipes import recipe_names, shipped_recipes
from tests.ranks import run_ranks


def _main(rank: int, words: list[str]) -> tuple[int, str, str]:
    """Run the command; return its status, its output and its errors."""
    from megatron_ext.cli import main

    dist.destroy_process_group()
    number = os.environ.pop("RANK")
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            status = main(["train", *words])
        except SystemExit as error:
            status = error.code
    os.environ["RANK"] = number
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    return status, out.getvalue(), said.getvalue()


def _dry_run(*words: str) -> tuple[int, str, str]:
    (found,) = run_ranks(_main, 1, [*words, "--dry-run"])
    return found


def _gqa(*, vocab: int, hidden: int, layers: int, heads: int, groups: int, experts: int, ffn: int):
    """Parameters of a published model: all but experts, and experts."""
    width = 128
    attention = hidden * width * 2 * (heads + groups)
    dense = 2 * vocab * hidden + hidden + layers * (2 * hidden + attention + hidden * experts)
    return dense, layers * experts * 3 * hidden * ffn


QWEN3_30B = _gqa(vocab=151936, hidden=2048, layers=48, heads=32, groups=4, experts=128, ffn=768)
MIXTRAL_8X7B = _gqa(vocab=32000, hidden=4096, layers=32, heads=32, groups=8, experts=8, ffn=14336)
# Qwen3 has two norms in each layer's attention, as wide as a head.
PUBLISHED = {
    "qwen3_30b_8_h200_bf16": (QWEN3_30B[0] + 48 * 2 * 128, QWEN3_30B[1], 8 / 128),
    "mixtral_8x7b_8_h200_bf16": (*MIXTRAL_8X7B, 2 / 8),
}
"""Parameters besides experts, of experts, and the part of these that a token meets."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_names(shipped_recipes()))
def test_every_recipe_says_what_it_would_need(recipe: str) -> None:
    status, out, said = _dry_run("--config-name", recipe, "--json")
    assert status == 0, said
    report: dict[str, Any] = json.loads(out)
    parallel = report["config"]["parallel"]
    assert len(report["stages"]) == parallel["pp_size"]
    model = report["config"]["model"]
    layers = sorted(layer for stage in report["stages"] for layer in stage["layers"])
    assert layers == list(range(1, model["num_layers"] + 1))
    for stage in report["stages"]:
        assert stage["memory"]["uneven"] > stage["memory"]["even"] > stage["weights"] > 0
    assert report["layers"] == ("transformer_engine" if report["machine"] else "local")
    if report["machine"] is not None:
        assert report["auto"]["transport"] == "cuda"
        moved = report["replication"]
        assert moved["imbalance_after"] < moved["imbalance_before"]
        assert moved["experts_ms"] < moved["experts_before_ms"]
        assert report["auto"]["push_blocks"] == {"9.x": 32, "10.x": 64}
        if parallel["tp_size"] == 1:
            step = report["step"]
            assert step["speed_up"] == pytest.approx(step["without_ms"] / step["step_ms"])
            assert step["speed_up"] > 1
            assert 0.9 < step["share_of_ideal"] <= 1
        assert 0 < report["auto"]["assignment_time"] < 1e-5 < report["auto"]["link_bandwidth"]
    if recipe in PUBLISHED:
        dense, experts, share = PUBLISHED[recipe]
        assert report["params"]["total"] == dense + experts
        assert report["params"]["active"] == dense + experts * share


def test_text_is_for_people_and_wrong_words_are_said_at_once() -> None:
    status, out, said = _dry_run("--config-name", "quickstart", "data.path=nowhere")
    assert (status, "Parameters: 12,885,760" in out) == (0, True), said
    assert "transport shared_memory" in out
    assert "slots, slot grads: weights and gradients of replicas" in out
    assert "num_layers:" not in out  # The settings are for --print.
    assert "only with a machine, as in hardware=server_8_h100" in out

    wrong = ["model.layers=1", "balance.slots=-1", "steps=many", "optimizer.beta1=1.5"]
    status, out, said = _dry_run("--config-name", "quickstart", *wrong)
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 2
    for named in ("layers", "balance.slots (-1)", "steps", "optimizer.beta1 (1.5)"):
        assert any(named in line for line in lines), said

    for words, problem in (
        (["--imbalance", "3"], "--imbalance (3.0) must be from 1 to parallel.ep_size (2)"),
        (["data.path=x", "model.vocab_size=-1"], "model.vocab_size (-1) must be >= 0"),
        (["model.num_experts=65538"], "model.num_experts (65538) must be from 1 to 65536"),
        ([f"model.hidden_size={2**32}"], "error: the model is too large for any machine: "),
    ):
        status, _, said = _dry_run("--config-name", "quickstart", *words)
        assert status == 2
        assert problem in said


def test_sizes_that_cannot_be_as_uneven_as_usual_are_counted() -> None:
    """The imbalance is the command's own, so it is no error of the user's."""
    tiny = ["--config-name", "gpt_8x64e_8_h100_bf16", "size=tiny", "precision=fp32"]
    status, out, said = _dry_run(*tiny)
    assert (status, "Parameters: " in out) == (0, True), said
    assert "no forecast of replicas and steps: imbalance (1.5) cannot be had" in said
    status, _, said = _dry_run(*tiny, "--imbalance", "1.5")
    assert status == 2
    assert "error: --imbalance (1.5): imbalance (1.5) cannot be had" in said


def _main_with_old_torch(rank: int, words: list[str]) -> tuple[int, str, str]:
    with mock.patch.object(torch, "__version__", TorchVersion("2.10.0+cu128")):
        return _main(rank, words)


def test_a_torch_that_cannot_count_is_named() -> None:
    words = ["--config-name", "quickstart", "data.path=nowhere", "--dry-run"]
    ((status, out, said),) = run_ranks(_main_with_old_torch, 1, words)
    assert (status, out) == (2, "")
    assert "error: torch (2.10.0+cu128): a dry run needs torch >= 2.11; training" in said


def test_the_least_buffers_of_fixed_size_are_recommended() -> None:
    """The numbers are those of `RankCapacity.least_factor`, in words."""
    recipe = "qwen3_30b_8_h200_bf16"
    status, out, said = _dry_run("--config-name", recipe, "--json")
    assert status == 0, said
    report: dict[str, Any] = json.loads(out)
    buffers, config = report["buffers"], report["config"]
    tokens = config["data"]["micro_batch_size"] * config["data"]["sequence_length"]
    choices = tokens // config["parallel"]["tp_size"] * config["model"]["topk"]
    assert 1 + config["balance"]["tolerance"] <= buffers["factor"] < 1.1
    assert choices < buffers["rows"] < buffers["usual_rows"] < 1.6 * choices
    assert buffers["saved_bytes"] > 0
    status, out, said = _dry_run("--config-name", recipe)
    assert f"plans need moe_expert_rank_capacity_factor {buffers['factor']:g}: " in out
    step = report["step"]
    assert (
        f"A step takes {step['step_ms']:.0f} ms by the simulator's model (not measured) at an "
        f"imbalance of 1.5, {step['speed_up']:.2f} x as fast as without balancing"
    ) in out
    timed_here = "Plans take as long as on this machine."
    assert timed_here not in out
    status, out, said = _dry_run("--config-name", recipe, "balance.strategy=llep")
    assert "moe_expert_rank_capacity_factor" not in out
    assert timed_here in out  # The hardware file does not have its time.


def test_what_does_not_fit_comes_with_what_would() -> None:
    words = ["--config-name", "qwen3_30b_8_h200_bf16", "hardware=server_8_h100"]
    status, out, said = _dry_run(*words, "model.num_layers=32", "--json")
    assert status == 0, said
    report = json.loads(out)
    assert max(stage["memory"]["uneven"] for stage in report["stages"]) > report["memory_bytes"]
    assert report["fits_with"]["overrides"] == ["parallel.recompute=full"]
    assert report["fits_with"]["bytes"] < report["memory_bytes"]
    status, out, _ = _dry_run(*words)
    assert "does NOT fit" in out
    assert "Neither parallel.recompute=full nor larger EP groups" in out
    again = [*words, "model.num_layers=32", "parallel.recompute=full", "--json"]
    fitting = json.loads(_dry_run(*again)[1])
    assert fitting["fits_with"] is None
    assert report["fits_with"]["bytes"] == max(
        stage["memory"]["uneven"] for stage in fitting["stages"]
    )
