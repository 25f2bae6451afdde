"""Times `checkpoint import-hf` and `export-hf` beside copying the same bytes, with their memory.

    python tests/perf/hugging_face.py FOLDER [--layers N]

Makes a model of Qwen3-MoE's kind in FOLDER (7 layers are 4.4 GB in BF16, in files of 1 GB), and
prints, for each command, seconds, the ratio to `cp`, and the largest resident memory. What was read
lies in the system's cache, as far as it has room. Needs Megatron-Bridge.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN, EXPERTS, WIDTH, VOCABULARY, HEADS, GROUPS, HEAD = 2048, 64, 768, 32_000, 32, 4, 128
FILE_BYTES = 1 << 30
TIMES = 3


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of the model, in the order of its files."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (GROUPS * HEAD, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (GROUPS * HEAD, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", (WIDTH, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, WIDTH)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def make(folder: Path, layers: int) -> None:
    """Write the model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 6144,
        "vocab_size": VOCABULARY,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    part: dict[str, Any] = {}
    files: dict[str, str] = {}
    for name, shape in [*shapes(layers), ("", ())]:
        if not name or sum(each.nbytes for each in part.values()) > FILE_BYTES:
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(part, folder / file, {"format": "pt"})
            files |= dict.fromkeys(part, file)
            part = {}
        if name:
            part[name] = torch.randn(shape).bfloat16()
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure(command: list[Any], out: Path) -> tuple[float, float]:
    """Return the seconds of a command that makes `out`, and its memory in GB."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    if status:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - begin, usage.ru_maxrss / 1e6


def main() -> None:
    """Make the model, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--only-make", action="store_true", help="make the model, measure nothing")
    given = parser.parse_args()
    hub, imported, exported, copied = (
        given.folder / name for name in ("hub", "imported", "exported", "copied")
    )
    if given.only_make:
        make(hub, given.layers)
        return
    if not hub.exists():  # In a process of its own: a child begins with its parent's memory.
        subprocess.run([sys.executable, *sys.argv, "--only-make"], check=True)
    num_bytes = sum(path.stat().st_size for path in hub.iterdir())
    tool = [sys.executable, "-m", "megatron_ext", "checkpoint"]
    commands = {
        "cp -r": (["cp", "-r", hub, copied], copied),
        "import-hf": ([*tool, "import-hf", hub, "--out", imported], imported),
        "export-hf": ([*tool, "export-hf", imported, "--like", hub, "--out", exported], exported),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(TIMES):
        for name, (command, out) in commands.items():
            times[name].append(measure(command, out))
    copying = statistics.median(seconds for seconds, _ in times["cp -r"])
    print(f"{num_bytes / 1e9:.2f} GB; medians of {TIMES}")
    for name, each in times.items():
        seconds = statistics.median(seconds for seconds, _ in each)
        memory = max(memory for _, memory in each)
        print(f"{name:10} {seconds:6.1f} s  {copying / seconds:.2f} of cp  {memory:.2f} GB")


if __name__ == "__main__":
    main()
