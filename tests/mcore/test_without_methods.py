"""The plug-in trains where the folder of papers' methods is not there.

A copy of the package without `megatron_ext/methods/` trains a tiny model on two ranks with
balancing, and as Megatron does without it.
"""

from __future__ import annotations

import json
import shutil

from tests.copies import copy_packages, run_in_copy
from tests.mcore.test_parity import GRADIENT_TOLERANCE, STEP_TOLERANCE

PROGRAM = """
import importlib.util
import json
import os
from pathlib import Path

import torch
from torch.multiprocessing import spawn

HERE = Path(__file__).parent


def compare(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{HERE}/store", rank=rank, world_size=2
    )
    import megatron_ext
    from tests.mcore.parity import gradient_difference, step_difference

    assert Path(megatron_ext.__file__).is_relative_to(HERE), megatron_ext.__file__
    assert importlib.util.find_spec("megatron_ext.methods") is None, "the folder is there"
    found = [
        gradient_difference(dict(ep=2)),
        step_difference(dict(ep=2, optimizer="sgd"), num_microbatches=2),
    ]
    (HERE / f"{rank}.json").write_text(json.dumps([vars(one) for one in found]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    spawn(compare, nprocs=2)
    print(json.dumps([json.loads((HERE / f"{rank}.json").read_text()) for rank in range(2)]))
"""


def test_training_without_methods_equals_unbalanced_megatron(tmp_path):
    copy = copy_packages(tmp_path, "tests/gpt.py", "tests/ranks.py", "tests/mcore/parity.py")
    shutil.rmtree(copy / "megatron_ext" / "methods")
    run = run_in_copy(copy, PROGRAM)
    assert run.returncode == 0, run.stderr
    ranks = json.loads(run.stdout.splitlines()[-1])
    for gradients, steps in ranks:
        assert gradients["worst"] <= GRADIENT_TOLERANCE, gradients
        assert steps["worst"] <= STEP_TOLERANCE, steps
    for kind in zip(*ranks, strict=True):
        assert sum(one["replicas"] for one in kind) > 0, "nothing was balanced"
