"""What a user of the plug-in runs, and has to read to trust it: modules of fresh processes.

No linter sees what is imported by name, or when something is asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]

LINES = 8_525
"""Physical lines of our modules that a default training imports, when this was last recorded."""

GROWTH = 1.02
"""A change that makes it more is recorded above, in the commit that makes it."""

CEILING = 9_000
"""What one person can still audit: no record goes beyond it."""

TRAIN = """
import sys

# What the extra `train` installs, as `import` finds it absent: the plug-in does without.
sys.modules |= dict.fromkeys(
    "hydra matplotlib omegaconf plotly prettytable psutil rich tokenizers xxhash".split()
)
import torch
import torch.distributed as dist

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
from megatron_ext import enable_cpu_platform
enable_cpu_platform()

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron_ext import BalanceConfig, balance_spec

parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2,
    expert_model_parallel_size=2, add_bias_linear=False, moe_token_dispatcher_type="alltoall",
)
spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
model = GPTModel(
    config, balance_spec(spec, BalanceConfig()), vocab_size=32, max_sequence_length=16
)
for _ in range(2):
    tokens = torch.randint(32, (2, 16))
    places = torch.arange(16).expand(2, 16)
    model(tokens, places, None, labels=tokens).mean().backward()
assert all(value.grad is not None for value in model.parameters())
dist.barrier()
"""

TELL = """
import json, sys
ours = (name for name in sys.modules if name.split(".")[0] == "megatron_ext")
print(json.dumps({name: sys.modules[name].__file__ for name in ours}))
"""


def start(program: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program + TELL, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def modules_of(process: subprocess.Popen[str]) -> dict[str, Path]:
    """Our modules that a process has imported when its program was done, with their files."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return {name: Path(file) for name, file in json.loads(out.splitlines()[-1]).items()}


def test_settings_need_no_method() -> None:
    names = modules_of(start("from megatron_ext import BalanceConfig; BalanceConfig()"))
    assert names.keys() == {"megatron_ext", "megatron_ext.config"}


def test_the_arguments_of_megatrons_programs_need_no_command() -> None:
    names = modules_of(
        start("""
import sys
sys.modules["omegaconf"] = None  # What `import` finds absent.
from megatron_ext.pretrain import read_balance
words = ["--moe-balance-slots=3", "--moe-balance-tolerance", "0.5", "--lr"]
balance, run_dir, others = read_balance(words)
assert (balance.slots, balance.tolerance, run_dir, others) == (3, 0.5, None, ["--lr"])
import megatron_ext.trainer.pretrain
""")
    )
    assert not [name for name in names if name.startswith("megatron_ext.cli")]


def test_lines_that_a_default_training_imports(tmp_path: Path) -> None:
    ranks = [start(TRAIN, str(rank), str(tmp_path / "store")) for rank in range(2)]
    modules = {name: file for rank in ranks for name, file in modules_of(rank).items()}
    # It is there because this machine has no GPU, and the program has asked for it.
    del modules["megatron_ext.cpu_platform"]
    lines = {name: len(file.read_text().splitlines()) for name, file in modules.items()}
    rooms: Counter[str] = Counter()
    for name, number in sorted(lines.items()):
        rooms[name.split(".")[1] if "." in name else "megatron_ext"] += number
        print(f"{number:6} {name}")
    for room, number in rooms.most_common():
        print(f"{number:6} {room}")
    total = sum(lines.values())
    print(f"{total:6} in {len(lines)} files")
    assert not rooms.keys() & {"trainer", "lab", "data", "cli"}
    assert not [name for name in modules if name.startswith("megatron_ext.methods.")]
    assert total <= LINES * GROWTH
    assert total <= CEILING
