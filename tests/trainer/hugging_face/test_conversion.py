"""Models of Hugging Face become checkpoints, train balanced, and become Hugging Face's again.

The commands run in processes of their own (`conversions.py`), with Bridge and transformers; ranks
are kept processes, which have neither. Layer 2.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.telemetry.step_lines import read_lines
from megatron_ext.trainer.compose import load_config
from tests.copies import ROOT
from tests.ranks import run_ranks
from tests.trainer.test_run import _losses, _train

pytest.importorskip("transformers", reason="Megatron-Bridge needs Python 3.12")
pytest.importorskip("safetensors")

from megatron_ext.trainer.hugging_face.settings import _unsaid_problems
from tests.trainer.hugging_face.conversions import CONFIGS

FAMILIES = ("qwen3_moe", "deepseek_v3", "deepseek_v3_yarn", "kimi_k2", "glm4_moe", "mixtral")
"""Those whose logits are compared; transformers has no prediction of a second token."""


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all families, converted and converted back."""
    folder = tmp_path_factory.mktemp("hugging_face")
    _in_a_process(Path(__file__).with_name("conversions.py"), folder)
    return folder


def _in_a_process(*words: Any, python: str | Path = sys.executable, **more: str) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }
    command = [str(word) for word in (python, *words)]
    done = subprocess.run(command, text=True, capture_output=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe_bf16", "deepseek_v3_mtp"])
def test_a_round_trip_changes_no_bit(family: str, converted: Path) -> None:
    imported, exported = json.loads((converted / "said.json").read_text())[family]
    assert (imported["status"], imported["stderr"]) == (0, "")
    assert (exported["status"], exported["stderr"]) == (0, "")
    there, back = (_tensors(converted / family / each) for each in ("hub", "exported"))
    # Copies of the embedding and of the output layer, which are the model's own.
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    left_out = copies if family.endswith("mtp") else set()
    assert there.keys() - back.keys() == left_out
    assert all(name in exported["stdout"] for name in left_out)
    assert back.keys() <= there.keys()
    for name, tensor in back.items():
        assert tensor.dtype == there[name].dtype
        assert torch.equal(tensor, there[name]), name
    files = {path.name for path in (converted / family / "exported").iterdir()}
    assert ("model.safetensors" in files) == (family != "qwen3_moe_bf16")  # Which has an index.
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= files


def test_weights_in_fp8_become_bf16(converted: Path) -> None:
    here = converted / "deepseek_v3_fp8"
    _, exported = json.loads((converted / "said.json").read_text())["deepseek_v3_fp8"]
    assert (exported["status"], exported["stderr"]) == (0, "")
    there, back = (_tensors(here / each) for each in ("hub", "exported"))
    assert back.keys() == {name for name in there if not name.endswith("_scale_inv")}
    quantized = [name for name in there if there[name].dtype == torch.float8_e4m3fn]
    assert len(quantized) > 50
    for name, tensor in back.items():
        expected = there[name]
        if name in quantized:
            scales = there[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = expected.shape
            expected = (expected.float() * scales[:rows, :columns]).bfloat16()
        assert torch.equal(tensor, expected), name
    config = json.loads((here / "exported" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


def test_a_model_that_the_trainer_cannot_make_is_refused(converted: Path) -> None:
    (imported,) = json.loads((converted / "said.json").read_text())["gpt_oss"]
    assert imported["status"] == 2
    (line,) = imported["stderr"].splitlines()
    assert "gpt_oss/hub: the trainer cannot make this model: it has no positions scaled by" in line
    assert "activation_func (quick_gelu) is no setting" in line
    assert not (converted / "gpt_oss" / "imported").exists()


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ({}, None),
        ({"rope_interleave": False}, r"rope_interleave \(False\) must be True"),
        ({"norm_topk_prob": False}, r"norm_topk_prob \(False\) must be True"),
        ({"num_experts_per_tok": 1, "n_group": 1}, r"norm_topk_prob \(True\) must be False"),
        ({"num_experts_per_tok": 4}, r"topk_group \(1\) must be half of num_experts_per_tok \(4\)"),
        ({"rope_parameters": {"attention_factor": 1.5}}, r"attention_factor \(1.5\) must be None"),
        ({"model_type": "ernie4_5_moe"}, "softmax for a sigmoid"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(
    described: dict[str, Any], problem: str | None
) -> None:
    """Bridge drops these settings, and logits would differ; each was compared with transformers."""
    config = CONFIGS["deepseek_v3"]()
    for name, value in described.items():
        setattr(config, name, value)
    provider = SimpleNamespace(
        moe_router_score_function="sigmoid",
        moe_router_topk=config.num_experts_per_tok,
        moe_router_num_groups=config.n_group,
        moe_router_group_topk=config.topk_group,
        rotary_percent=1.0,
    )
    problems = _unsaid_problems(config, provider)
    assert len(problems) == (problem is not None)
    assert all(re.search(str(problem), each) for each in problems)


WRONG = {
    "a cut shard": r"/hub/model-00001-of-00002\.safetensors is cut off or damaged .*",
    "a lost shard": r"/hub/model-00002-of-00002\.safetensors is missing",
    "a missing tensor": r"/hub lacks the tensor model\.norm\.weight",
    "whole numbers": r"/hub/model-00001-of-00002\.safetensors: .* is of I16, not floating point",
    "an index that leads outside": r"/hub/.*index\.json is damaged: \.\./elsewhere.*",
    "a damaged configuration": r"/hub/config\.json is no readable JSON: .*",
    "no configuration": r"/hub is no Hugging Face model: it has no config\.json",
    "a family that nobody knows": r"/hub/config\.json: .* model type `new` .*",
    "another size": r"/hub: .*experts\.0\.gate_proj.* have 4,096 numbers, .* has 6,144",
    "another vocabulary": r"/hub: model\.embed_tokens.* have 19,200 numbers, .* has 44,800",
    "fewer layers": r"/hub has 33 tensors that the model of its config\.json has not, such as .*",
    "thousands of layers": r"/hub: by config\.json num_layers is 9000, and there are 69 tensors",
    "no layers": r"/hub: model\.num_layers \(-3\) must be from 1 to 10000",
    "scaled positions": r"/hub: the trainer cannot make this model: .* scaled by linear",
    "windows": r"/hub: the trainer cannot make this model: it has no windows \(8 tokens\)",
    "queries without a latent": r"/hub: the trainer cannot .*: its latent .* \(q_lora_rank\)",
    "weights in FP8": r"/hub: model\.layers\.0\..*proj\.weight is in FP8, and .* in BF16",
    "tied embeddings": r"/hub: the trainer cannot make this model: share_embeddings_.*",
    "a full disk": r"/imported cannot be written: 100,000 bytes free, it needs 346,880",
    "a disk that fills up": r"/imported: No space left on device",
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_leaves_nothing(case: str, converted: Path) -> None:
    said = json.loads((converted / "said.json").read_text())[case]
    assert said["status"] != 0
    assert said["left"] == ["hub"]
    line = said["stderr"].replace(str(converted / case), "")
    assert re.fullmatch(rf"megatron-ext checkpoint import-hf: error: {WRONG[case]}\n", line)


def test_no_weights_of_its_own_are_left_out_as_a_copy(converted: Path) -> None:
    said = json.loads((converted / "said.json").read_text())["of a head of its own"]
    assert (said["status"], said["left"]) == (2, ["hub"])
    assert re.search(r"has 1 tensors .* such as .*3\.shared_head\.head\.weight$", said["stderr"])


def test_a_dry_run_and_a_refused_export_write_nothing(converted: Path) -> None:
    said = json.loads((converted / "said.json").read_text())
    assert said["dry run"]["status"] == 0
    assert "model.num_experts=8\n" in said["dry run"]["stdout"]
    assert "are free: enough\n" in said["dry run"]["stdout"]
    assert said["of another model"]["status"] == 2
    assert "step_00000000 is not of the model of" in said["of another model"]["stderr"]
    assert said["of more layers"]["status"] == 2
    assert re.search(r"is \[2, .*\], not \[1, .*\]\n$", said["of more layers"]["stderr"])
    assert said["of a flipped bit"]["status"] == 2
    assert said["of a flipped bit"]["stderr"].endswith(
        ".distcp was changed: its checksum is another\n"
    )
    assert said["of a lost checksum"]["status"] == 2
    assert "__0_0.distcp is not covered: " in said["of a lost checksum"]["stderr"]
    names = ("dry run", "of another model", "of more layers", "of a flipped bit")
    assert [said[name]["left"] for name in (*names, "of a lost checksum")] == [[]] * 5


def test_damaged_folders_and_checkpoints(converted: Path) -> None:
    said = json.loads((converted / "said.json").read_text())
    assert said["faults"] == []
    assert said["refused"] > 60


def test_bridge_exports_a_balanced_model_and_reads_its_settings(converted: Path) -> None:
    said = json.loads((converted / "said.json").read_text())["bridge"]
    assert "BalancedMoELayer" in said["layers"]
    assert said["same"]
    assert "megatron_ext" not in said["settings"]
    assert said["read"][0] == "get_gpt_decoder_block_spec"


def test_bridges_own_training_saves_loads_and_goes_on(converted: Path, tmp_path: Path) -> None:
    program, hub = Path(__file__).with_name("bridge_pretrain.py"), converted / "qwen3_moe" / "hub"

    def train(rank: str) -> None:
        _in_a_process(program, hub, tmp_path, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")

    with ThreadPoolExecutor() as threads:
        list(threads.map(train, "01"))
    first, again, stock = (
        {line["step"]: line for line in read_lines(tmp_path / run / "metrics.jsonl")}
        for run in ("first", "again", "stock")
    )
    assert (list(first), list(again), list(stock)) == ([1, 2, 3], [3, 4], [3, 4])
    for step in (*first.values(), *again.values()):
        assert step["imbalance_after"] < 1.02 < step["imbalance_before"]
        assert step["replicas"] > 0
    assert all(step["replicas"] == 0 for step in stock.values())
    # A step's loss is of the weights before it: those that were saved, and those of step 3.
    assert first[2]["loss"] > first[3]["loss"] > again[4]["loss"]
    assert again[3]["loss"] == pytest.approx(first[3]["loss"], rel=1e-6)
    assert [stock[step]["loss"] for step in stock] == pytest.approx(
        [again[step]["loss"] for step in again], rel=1e-6
    )
    saved = tmp_path / "checkpoints" / "iter_0000003" / "run_config.yaml"
    assert "get_gpt_decoder_block_spec" in saved.read_text()
    assert "megatron_ext" not in saved.read_text()
    before, after = _tensors(hub), _tensors(tmp_path / "exported")
    assert {name: each.shape for name, each in after.items()} == {
        name: each.shape for name, each in before.items()
    }


def _settings(family: Path, num_ranks: int) -> list[str]:
    return [
        f"parallel.num_ranks={num_ranks}",
        f"parallel.ep_size={num_ranks}",
        f"run_dir={family / 'run'}",
        "balance.slots=2",
        "balance.tolerance=0",
        "data.sequence_length=64",
        "data.micro_batch_size=2",
        "data.global_batch_size=8",
        # The recipe's, and the others.
        f"model.experts={'sequential' if num_ranks == 1 else 'grouped_mm'}",
    ]


def _logits(rank: int, family: Path, num_ranks: int, *more: str) -> tuple[torch.Tensor, float]:
    """Return the logits of the trainer's model, and the replicas of a layer."""
    from megatron.core import parallel_state

    from megatron_ext import StepMetrics
    from megatron_ext.trainer.checkpoints.checkpoint import Checkpoints
    from megatron_ext.trainer.model import build

    # Outside of Megatron's schedule, a backward of that loss would leave a scale in the process.
    settings = [*_settings(family, num_ranks), "data.path=none", "model.aux_loss=0", *more]
    config = load_config(settings, str(family / "imported"), "recipe", needs_data=False)
    parallel_state.destroy_model_parallel()
    build.start_parallelism(config)
    chunks = build.build_model(config, config.model.vocab_size)
    metrics = StepMetrics(chunks)
    Checkpoints(config, chunks, build.build_optimizer(config, chunks), 0).load_newest()
    tokens, _ = torch.load(family / "logits.pt")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    logits = chunks[0](tokens, positions, mask)
    logits.mean().backward()
    said = metrics.take()
    return logits.detach()[..., : config.model.vocab_size], said.get("balance/replicas", 0.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, num_ranks: int, converted: Path) -> None:
    _, expected = torch.load(converted / family / "logits.pt")
    for logits, replicas in run_ranks(_logits, num_ranks, converted / family, num_ranks):
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (replicas > 0) == (num_ranks > 1)


TRANSFORMERS = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])[0]).logits, sys.argv[3])
"""


def test_trained_and_exported(converted: Path, data: Path, tmp_path: Path) -> None:
    """What transformers computes from the exported folder is what was trained."""
    family, out = converted / "qwen3_moe", tmp_path / "exported"
    recipe = family / "imported" / "recipe.yaml"
    assert "precision: fp32" in recipe.read_text()
    training = ["steps=4", "checkpoint.every=4", "optimizer.warmup_steps=1", f"data.path={data}"]
    settings = [*_settings(family, 2), *training, f"run_dir={tmp_path / 'run'}"]
    run_ranks(_train_recipe, 2, settings, family / "imported", timeout_s=300)
    losses = _losses(tmp_path / "run")
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    words = ["checkpoint", "export-hf", tmp_path / "run", "--like", family / "hub", "--out", out]
    _in_a_process("-m", "megatron_ext", *words)
    _in_a_process("-c", TRANSFORMERS, out, family / "logits.pt", tmp_path / "logits.pt")
    theirs = torch.load(tmp_path / "logits.pt")
    load = f"checkpoint.load={tmp_path / 'run' / 'checkpoints' / 'step_00000004'}"
    for logits, _ in run_ranks(_logits, 2, family, 2, load):
        assert (logits - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    before, after = _tensors(family / "hub"), _tensors(out)
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before if "proj" in name)


def _train_recipe(rank: int, settings: list[str], folder: Path) -> None:
    _train(rank, settings, config_dir=str(folder), config_name="recipe")


def test_python_3_11_trains_what_3_12_imported(converted: Path, data: Path, tmp_path: Path) -> None:
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists() or sys.version_info[:2] != (3, 12):
        pytest.skip("there is no environment of Python 3.11 beside this one")
    family = converted / "mixtral"
    words = ["-m", "megatron_ext", "train", "--config-dir", family / "imported"]
    words += ["--config-name", "recipe", *_settings(family, 2), f"data.path={data}", "steps=2"]
    _in_a_process(*words, f"run_dir={tmp_path / 'run'}", python=python)
    assert len(_losses(tmp_path / "run")) == 2
