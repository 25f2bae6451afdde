"""Megatron-LM's own programs, as they are and with balanced layers, on CPU ranks.

    MEGATRON_LM=/path/to/Megatron-LM python -m tests.megatron_own.run

Prints what became of Megatron's own tests of its token dispatchers, and the losses of its
`pretrain_gpt.py`, stock and balanced. The wheels do not hold them. They import what Megatron-Core
does not need (`pip install pybind11 regex six triton`), and compile a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.megatron_own.balanced_dispatchers import BALANCED, NOTES
from tests.trainer.test_pretrain import COMMAND_LINE, launch, logged

CHECKOUT = os.environ.get("MEGATRON_LM")
"""Folder of a checkout of Megatron-LM; its Megatron-Core is run, not the installed one."""

DISPATCHER_TESTS = "tests/unit_tests/transformer/moe/test_token_dispatcher.py"
_WORST = ("failed", "passed", "skipped")
_HERE = Path(__file__).parent


def dispatcher_tests(checkout: Path, *, balanced: bool, ranks: int = 8) -> tuple[dict, int]:
    """Run Megatron's own tests of its dispatchers.

    Returns:
        What became of each test on the rank where it went worst; and the replicas that were made.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "balanced_dispatchers"]
    with tempfile.TemporaryDirectory() as notes:
        # `tests` is the checkout's there.
        environment = environment_with(checkout, _HERE) | {NOTES: notes}
        done = subprocess.run(
            [sys.executable, *torchrun, *pytest, DISPATCHER_TESTS],
            cwd=checkout,
            env=environment | ({BALANCED: "1"} if balanced else {}),
            capture_output=True,
            text=True,
            check=False,
        )
        found = [json.loads(file.read_text()) for file in Path(notes).iterdir()]
    outcomes: dict[str, str] = {}
    for rank in found:
        for test, outcome in rank["outcomes"].items():
            outcomes[test] = min(outcomes.get(test, outcome), outcome, key=_WORST.index)
    if not outcomes:
        raise RuntimeError(
            f"Megatron's tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return outcomes, sum(rank["replicas"] for rank in found)


def pretrain_gpt(checkout: Path, *, balanced: bool) -> tuple[list[float], list[float]]:
    """Run `pretrain_gpt.py` on two ranks; return its losses and, if balanced, its replicas."""
    words = [COMMAND_LINE, "--mock-data", "--moe-balance-slots 2" * balanced]
    done = launch(
        *words, program=checkout / "pretrain_gpt.py", environment=environment_with(checkout)
    )
    if done.returncode:
        raise RuntimeError(f"pretrain_gpt.py: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return logged(done.stdout, "lm loss"), logged(done.stdout, "balance/replicas")


def environment_with(*places: Path) -> dict[str, str]:
    """An environment where Python looks for modules in `places` first, and `make` finds it."""
    python = (Path(sys.executable).parent, Path(sys.base_prefix, "bin"))
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (*places, *filter(None, sys.path)))),
        "PATH": os.pathsep.join([*map(str, python), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }


def main() -> None:
    """Run all, and print."""
    if CHECKOUT is None:
        sys.exit("error: MEGATRON_LM must name a folder with a checkout of Megatron-LM")
    checkout = Path(CHECKOUT).absolute()
    for balanced in (False, True):
        name = "balanced" if balanced else "stock"
        outcomes, num_replicas = dispatcher_tests(checkout, balanced=balanced)
        counts = ", ".join(f"{n} {word}" for word, n in sorted(Counter(outcomes.values()).items()))
        print(f"{name}: token dispatchers: {counts}; {num_replicas} replicas", flush=True)
        losses, replicas = pretrain_gpt(checkout, balanced=balanced)
        print(f"{name}: pretrain_gpt.py: losses {losses}, replicas {replicas}", flush=True)


if __name__ == "__main__":
    main()
