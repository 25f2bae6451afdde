"""Makes tiny Hugging Face models and converts them with the commands; a process of its own.

    python conversions.py FOLDER

For each family in FOLDER: `hub` (transformers' folder), `logits.pt` (tokens and transformers'
logits), `imported` (by `checkpoint import-hf`), `exported` (by `checkpoint export-hf`). What the
commands said, and their exit status, is in `said.json`; also of folders that are `WRONG`, and what
Bridge itself did with a balanced model.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

_COMMON = {
    "vocab_size": 300,  # No multiple of 128: the embedding is padded.
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_DEEPSEEK = _COMMON | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_QWEN = _COMMON | {
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 10000.0,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_QWEN),
    "qwen3_moe_bf16": lambda: transformers.Qwen3MoeConfig(**_QWEN, dtype=torch.bfloat16),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**_DEEPSEEK, num_nextn_predict_layers=0),
    "deepseek_v3_yarn": lambda: transformers.DeepseekV3Config(
        **_DEEPSEEK, num_nextn_predict_layers=0, rope_parameters=_YARN
    ),
    "deepseek_v3_mtp": lambda: transformers.DeepseekV3Config(
        **_DEEPSEEK, num_nextn_predict_layers=1
    ),
    "deepseek_v3_fp8": lambda: transformers.DeepseekV3Config(
        **_DEEPSEEK, num_nextn_predict_layers=0, dtype=torch.bfloat16
    ),
    "kimi_k2": lambda: transformers.DeepseekV3Config(**_DEEPSEEK, num_nextn_predict_layers=0),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_COMMON,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=128,
        moe_intermediate_size=32,
        head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        use_qk_norm=True,
        attention_bias=True,
        norm_topk_prob=True,
        num_nextn_predict_layers=0,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON,
        num_hidden_layers=2,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        num_hidden_layers=2,
        intermediate_size=64,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=8,
    ),
}


def main(folder: Path) -> None:
    """Make, convert and convert back every family."""
    families = {name: folder / name for name in CONFIGS}
    for name, here in families.items():
        make(name, here)

    from megatron_ext.cli import main as command
    from megatron_ext.trainer.hugging_face import files
    from tests.damage.hub import hub_tries

    said: dict[str, Any] = {}
    for name, here in families.items():
        hub, imported, exported = (here / each for each in ("hub", "imported", "exported"))
        words = ["checkpoint", "import-hf", hub, "--out", imported, "--json"]
        said[name] = [_run(command, words)]
        files.SHARD_BYTES = 200_000 if name == "qwen3_moe_bf16" else 2 << 30
        if said[name][0]["status"] == 0:
            words = ["checkpoint", "export-hf", imported, "--like", hub, "--out", exported]
            said[name].append(_run(command, words))
    for case, harm in WRONG.items():
        here = folder / case  # Bridge remembers what a folder had.
        shutil.copytree(folder / "qwen3_moe_bf16" / "hub", here / "hub")
        with harm(here / "hub") or contextlib.nullcontext():
            words = ["checkpoint", "import-hf", here / "hub", "--out", here / "imported"]
            said[case] = _run(command, words) | {"left": _listed(here)}
    other = folder / "of a head of its own"
    shutil.copytree(families["deepseek_v3_mtp"] / "hub", other / "hub")
    _lift(other / "hub" / "model.safetensors", "model.layers.3.shared_head.head.weight")
    words = ["checkpoint", "import-hf", other / "hub", "--out", other / "imported"]
    said[other.name] = _run(command, words) | {"left": _listed(other)}
    imported, out = families["mixtral"] / "imported", folder / "mixed"
    words = ["checkpoint", "export-hf", imported, "--like", families["kimi_k2"] / "hub"]
    said["of another model"] = _run(command, [*words, "--out", out]) | {"left": _listed(out)}
    like = _with_one_layer(families["qwen3_moe"] / "hub", folder / "of one layer")
    words = ["checkpoint", "export-hf", families["qwen3_moe"] / "imported", "--like", like]
    said["of more layers"] = _run(command, [*words, "--out", out]) | {"left": _listed(out)}
    flipped = _with_a_flipped_bit(families["mixtral"] / "imported", folder / "flipped")
    words = ["checkpoint", "export-hf", flipped, "--like", families["mixtral"] / "hub"]
    said["of a flipped bit"] = _run(command, [*words, "--out", out]) | {"left": _listed(out)}
    _forget_the_checksum(flipped)
    words = ["checkpoint", "export-hf", flipped, "--like", families["mixtral"] / "hub"]
    said["of a lost checksum"] = _run(command, [*words, "--out", out]) | {"left": _listed(out)}
    words = ["checkpoint", "import-hf", families["mixtral"] / "hub", "--out", out, "--dry-run"]
    said["dry run"] = _run(command, words) | {"left": _listed(out)}
    (folder / "damaged").mkdir()
    damaged = list(hub_tries(folder / "damaged", 120, seed=0, limit_s=60))
    said["refused"] = sum(each.verdict == "refused" for each in damaged)
    said["faults"] = [str(each) for each in damaged if each.is_fault]
    said["bridge"] = _in_bridge(families["qwen3_moe"] / "hub")
    (folder / "said.json").write_text(json.dumps(said))


def _with_a_flipped_bit(imported: Path, there: Path) -> Path:
    shutil.copytree(imported, there)
    (file,) = there.glob("checkpoints/*/*.distcp")
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        (byte,) = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    return there


def _forget_the_checksum(imported: Path) -> None:
    (file,) = imported.glob("checkpoints/*/checksums.json")
    content = json.loads(file.read_text())
    del content["files"]["__0_0.distcp"]
    file.write_text(json.dumps(content))


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _cut(hub: Path) -> None:
    (file, *_) = sorted(hub.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)


def _lose(hub: Path) -> None:
    sorted(hub.glob("*.safetensors"))[1].unlink()


def _forget(hub: Path) -> None:
    index = hub / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    for file in hub.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop("model.norm.weight", None) is not None:
            save_file(tensors, file, {"format": "pt"})


def _take_for_whole(hub: Path) -> None:
    (file, *_) = sorted(hub.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"I16" ', 1))


def _lead_outside(hub: Path) -> None:
    index = hub / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))


def _with_one_layer(hub: Path, like: Path) -> Path:
    """Copy a model as if it had its first layer only."""
    shutil.copytree(hub, like)
    _change(like / "config.json", num_hidden_layers=1, layer_types=["full_attention"])
    tensors = load_file(like / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.startswith("model.layers.1.")}
    save_file(kept, like / "model.safetensors")
    return like


def _full_disk(hub: Path) -> Any:
    return mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=100_000))


def _writing_fails(hub: Path) -> Any:
    from megatron_ext.trainer.hugging_face import convert

    return mock.patch.object(
        convert._CheckpointFile, "finish", side_effect=OSError(28, "No space left on device")
    )


WRONG: dict[str, Callable[[Path], Any]] = {
    "a cut shard": _cut,
    "a lost shard": _lose,
    "a missing tensor": _forget,
    "whole numbers": _take_for_whole,
    "an index that leads outside": _lead_outside,
    "a damaged configuration": lambda hub: os.truncate(hub / "config.json", 40),
    "no configuration": lambda hub: (hub / "config.json").unlink(),
    "a family that nobody knows": lambda hub: _change(
        hub / "config.json", model_type="new", architectures=["NewForCausalLM"]
    ),
    "another size": lambda hub: _change(hub / "config.json", moe_intermediate_size=48),
    "another vocabulary": lambda hub: _change(hub / "config.json", vocab_size=700),
    "fewer layers": lambda hub: _change(hub / "config.json", num_hidden_layers=1),
    "thousands of layers": lambda hub: _change(hub / "config.json", num_hidden_layers=9000),
    "no layers": lambda hub: _change(hub / "config.json", num_hidden_layers=-3),
    "scaled positions": lambda hub: _change(
        hub / "config.json", rope_parameters={"rope_type": "linear", "factor": 4.0}
    ),
    "windows": lambda hub: _change(
        hub / "config.json", use_sliding_window=True, sliding_window=8, max_window_layers=0
    ),
    "queries without a latent": lambda hub: transformers.DeepseekV3Config(
        **_DEEPSEEK | {"q_lora_rank": None}, architectures=["DeepseekV3ForCausalLM"]
    ).save_pretrained(hub),
    "weights in FP8": lambda hub: any(map(_quantize, hub.glob("*.safetensors"))),
    "tied embeddings": lambda hub: _change(hub / "config.json", tie_word_embeddings=True),
    "a full disk": _full_disk,
    "a disk that fills up": _writing_fails,
}


def _in_bridge(hub: Path) -> dict[str, Any]:
    """Let Bridge build the model balanced, write its settings, read them, and export the model."""
    import torch.distributed as dist
    import yaml
    from megatron.bridge.utils.instantiate_utils import instantiate
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.config.container import ConfigContainerBase
    from megatron.training.config.yaml_utils import safe_yaml_representers

    from megatron_ext import BalanceConfig, balanced_provider_spec
    from megatron_ext.trainer.hugging_face.bridge import open_bridge

    bridge = open_bridge(hub)
    provider = bridge.to_megatron_provider(load_weights=True)
    stock = functools.partial(
        get_gpt_decoder_block_spec, use_transformer_engine=False, normalization="RMSNorm"
    )
    provider.transformer_layer_spec = balanced_provider_spec(stock, BalanceConfig())
    for name in ("moe_grouped_gemm", "moe_permute_fusion", "bias_dropout_fusion"):
        setattr(provider, name, False)
    for name in ("bias_activation_fusion", "masked_softmax_fusion", "persist_layer_norm"):
        setattr(provider, name, False)
    provider.use_cpu_initialization, provider.gradient_accumulation_fusion = True, False
    provider.transformer_impl = "local"
    provider.finalize()
    written = {"spec": ConfigContainerBase._convert_value_to_dict(provider.transformer_layer_spec)}
    with safe_yaml_representers():
        text = yaml.safe_dump(written)
    read = instantiate(yaml.safe_load(text))["spec"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    exported = dict(bridge.export_hf_weights(models, show_progress=False))
    dist.destroy_process_group()
    there = load_file(hub / "model.safetensors")
    return {
        "settings": text,
        "read": [read.func.__name__, read.keywords],
        "layers": sorted({type(layer).__name__ for layer in models[0].modules()}),
        "same": exported.keys() == there.keys()
        and all(torch.equal(exported[name], there[name]) for name in there),
    }


def _run(command: Callable[[list[str]], int], words: list[Any]) -> dict[str, Any]:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = command([str(word) for word in words])
        except SystemExit as stop:
            status = stop.code
    return {"status": status, "stdout": stdout.getvalue(), "stderr": stderr.getvalue()}


def make(name: str, here: Path) -> None:
    """Write a model with random weights, a tokenizer, and the model's logits."""
    torch.manual_seed(1)
    hub, config = here / "hub", CONFIGS[name]()
    dtype = torch.bfloat16 if name.endswith(("bf16", "fp8")) else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # Norms are ones at first, and biases zeros: an error would not show.
        for weight, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in weight:
                value.uniform_(0.5, 1.5)
            elif "bias" in weight or "sinks" in weight:
                value.normal_(0, 0.1)
    model.save_pretrained(hub, max_shard_size="200KB" if name == "qwen3_moe_bf16" else "1GB")
    letters = {chr(letter): letter for letter in range(250)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [], unk_token=chr(1)))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(hub)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.save((tokens, model(tokens).logits.float()), here / "logits.pt")
    if name == "kimi_k2":
        _change(hub / "config.json", model_type="kimi_k2")
    if name == "deepseek_v3_fp8":
        quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        _change(hub / "config.json", quantization_config=quantization)
        _quantize(hub / "model.safetensors")
    if name == "deepseek_v3_mtp":
        _add_prediction(hub / "model.safetensors")


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _quantize(path: Path) -> None:
    """Put the matrices of layers into FP8, with a scale for each block of 128 x 128."""
    tensors = load_file(path)
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = (-(-size // 128) for size in tensors[name].shape)
        scales = torch.rand(rows, columns) / 16
        tensors[name] = (8 * tensors[name]).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = tensors[name].float()  # So more tensors are in float32 than in FP8.
    save_file(tensors, path, {"format": "pt"})


def _add_prediction(path: Path) -> None:
    """Add the layer that predicts a second token, as DeepSeek publishes it: behind the last one."""
    tensors = load_file(path)
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace("layers.2", "layers.3")] = torch.rand_like(tensors[name])
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.3.{name}.weight"] = torch.rand(64)
    tensors["model.layers.3.eh_proj.weight"] = torch.rand(64, 128)
    save_file(tensors, path, {"format": "pt"})


def _lift(path: Path, name: str) -> None:
    tensors = load_file(path)
    tensors[name] += 1
    save_file(tensors, path, {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
