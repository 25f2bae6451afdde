"""Makes one good file or folder of each kind that commands read, all small, in a moment."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
import yaml
from torch.distributed import checkpoint

from checkpoints_tools.folder import hash_file, write_checksums
from megatron_ext.cli import main
from megatron_ext.files.loads import Loads, write_loads
from megatron_ext.files.recipes import shipped_recipes
from megatron_ext.files.routes import write_routes
from megatron_ext.lab.shape import read_shape
from megatron_ext.telemetry.heartbeat import DONE, Note, own_status
from tests import workloads
from tests.run_folders import write_run

RECIPE = """\
defaults: [train, _self_]
steps: 8
run_dir: trained
data: {path: text, sequence_length: 32}
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 2
  num_experts: 8
  topk: 2
  expert_hidden_size: 32
parallel: {ep_size: 2}
balance: {strategy: quota, slots: 1}
checkpoint: {every: 4}
megatron: {moe_router_pre_softmax: true}
"""


def make_good(folder: Path) -> None:
    """Make all of them in the working directory, which is `folder`."""
    for number, strategy in enumerate(("quota", "none"), 1):
        write_run(folder / f"run{number}", strategy=strategy, steps=12, layers=2, ranks=2)
    _write_statuses(folder / "run1")
    _write_traces(folder)
    write_routes(
        folder / "routes.npz",
        workloads.topical_routes(
            samples=16, topics=2, layers=2, experts=8, top_k=2, fidelity=0.8, sample_tokens=16
        ),
    )
    _write_texts(folder)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "my.yaml").write_text(RECIPE)
    shape = asdict(read_shape("quickstart", ["model.num_experts=8"]))
    (folder / "model.yaml").write_text(yaml.safe_dump(shape))
    shutil.copy(shipped_recipes() / "hardware" / "server_8_h100.yaml", folder / "hardware.yaml")
    write_checkpoint(folder / "step_00000008")
    for words in (
        "place craft trace --out placement.npz",
        "place eplb trace --out layout.npz",
        "place sem_moe routes.npz --ranks 2 --out semantics.npz",
    ):
        assert main(words.split()) == 0


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint as a run saves it: 2 MoE layers, 8 experts, and an object."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{layer}.mlp.router.weight": (8, 4) for layer in range(2)}
    for layer, expert in itertools.product(range(2), range(8)):
        of_expert = f"{layer}.mlp.experts.experts.{expert}"
        shapes |= {
            f"{of_expert}.linear_fc1.weight": (6, 4),
            f"{of_expert}.linear_fc2.weight": (4, 6),
        }
    state = {
        f"decoder.layers.{name}": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True)
    checkpoint.save(state | {"generators": [b"x" * 40]}, checkpoint_id=str(folder), no_dist=True)
    table = folder / ".metadata"  # Megatron's do not say where the folder was.
    found = pickle.loads(table.read_bytes())
    table.write_bytes(pickle.dumps(replace(found, storage_meta=None)))
    torch.save({"iteration": 8}, folder / "common.pt")
    run = {"step": 8, "num_ranks": 2, "parallel": {"ep_size": 2}, "model": {"num_layers": 2}}
    (folder / "run.json").write_text(json.dumps(run))
    kind = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(kind))
    write_checksums(folder, {path.name: hash_file(path) for path in sorted(folder.iterdir())})


def _write_statuses(run: Path) -> None:
    for folder in ("status", "logs"):
        (run / folder).mkdir()
    for rank in range(2):
        status = asdict(own_status(rank=rank, num_ranks=2, limit_s=600.0))
        done = status | {"state": DONE, "note": Note("save", 12), "time": 1.0}
        (run / "status" / f"rank_{rank:05d}.json").write_text(json.dumps(done))
        (run / "logs" / f"rank_{rank:05d}.log").write_text(f"rank {rank} speaks\n" * 20)


def _write_traces(folder: Path) -> None:
    load = torch.stack([workloads.zipf(2, 8, 256, 1.0, seed=seed) for seed in range(6)])
    fields = {
        "step": torch.arange(6) // 2 + 1,
        "microbatch": torch.zeros(6, dtype=torch.int64),
        "layer": torch.arange(6) % 2 + 1,
    }
    write_loads(folder / "loads.npz", Loads(load))
    write_loads(folder / "trace" / "step_00000003_stage_0.npz", Loads(load, fields))
    (folder / "megatron_trace").mkdir()
    chooser = random.Random(1)
    for rank in range(2):
        lines = [
            {
                "step": step,
                "stage": "pre_dispatch",
                "block": "decoder",
                "layer": layer,
                "rank": rank,
                "num_tokens": 16,
                "topk": 2,
                "top_indices": [chooser.sample(range(8), 2) for _ in range(16)],
            }
            for step in (1, 2)
            for layer in (0, 1)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "megatron_trace" / f"router_trace_rank{rank}.jsonl").write_text(text)


def _write_texts(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "few").mkdir()
    (folder / "few" / "a.py").write_text("print('hello world')\n" * 20)
    (folder / "few" / "b.py").write_text("x = 1\n")
    assert main(["data", "build", "few", "--out", "text"]) == 0
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<eod>": 3, "[UNK]": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eod>"])
    tokenizer.save(str(folder / "tokenizer.json"))
