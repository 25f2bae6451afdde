"""Megatron's own programs train balanced what they train without, and say so in their own log.

Layer 4: `pretrain_program.py` under torchrun, with and without `--moe-balance-slots`. The wheels of
megatron-core from 0.19 on hold the training loop; without it, what the launcher attaches to models
is tested on kept ranks.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.config import BalanceConfig, ConfigError, Section
from megatron_ext.pretrain import PROGRAM, balance_parser, main, read_balance
from megatron_ext.trainer.reports.read import column, read_runs
from tests.boards import written_for_tensorboard, written_for_wandb
from tests.gpt import GPTModel, build_gpt, get_gpt_decoder_block_spec  # enables the CPU platform
from tests.mcore.parity import balancing_models
from tests.ranks import run_ranks

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec  # isort: skip
from megatron_ext.trainer import pretrain  # isort: skip

HERE = Path(__file__).parent
PROGRAM_FILE = HERE / "pretrain_program.py"

needs_training_loop = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="the wheel of this megatron-core has no megatron.training",
)

COMMAND_LINE = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 127
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none --mtp-num-layers 1
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --disable-bias-linear
    --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 0.01 --log-interval 1
    --lr-decay-style constant --eval-iters 1 --eval-interval 100 --tokenizer-type NullTokenizer
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local --num-workers 0
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-persist-layer-norm --attention-backend unfused
"""


def launch(
    *words: str, program: Path = PROGRAM_FILE, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program on two ranks, without PyTorch's compiler: it takes longer than training."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_ext.pretrain", str(program), *" ".join(words).split()]
    return subprocess.run(
        ["env", "TORCH_COMPILE_DISABLE=1", "WANDB_MODE=offline", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def logged(output: str, name: str) -> list[float]:
    """A value of every iteration, and of the evaluation at the end."""
    return [float(value) for value in re.findall(rf" {name}: ([\d.E+-]+) \|", output)]


@needs_training_loop
@pytest.mark.slow
def test_a_program_learns_the_same_balanced(tmp_path: Path) -> None:
    plain = launch(COMMAND_LINE)
    to_wandb = f"--wandb-project x --wandb-exp-name y --wandb-save-dir {tmp_path}"
    to_boards = f"{to_wandb} --tensorboard-dir {tmp_path / 'board'} --moe-per-layer-logging"
    ours = f"--moe-balance-tolerance 0 --moe-balance-run-dir {tmp_path / 'run'}"
    balanced = launch("--moe-balance-slots=2", COMMAND_LINE, ours, to_boards)
    assert plain.returncode == 0, plain.stderr
    assert balanced.returncode == 0, balanced.stderr
    for name in ("lm loss", "mtp_1 loss", "lm loss value"):
        expected = logged(plain.stdout, name)
        # Float32 sums in another order, printed with seven digits.
        assert logged(balanced.stdout, name) == pytest.approx(expected, rel=1e-6)
        assert len(expected) >= (1 if "value" in name else 4)
    values = {name: logged(balanced.stdout, name) for name in pretrain.CONSOLE}
    assert min(values["moe/avg_overload_factor_routed"]) > 1.01
    assert values["moe/avg_overload_factor"] == values["moe/max_overload_factor"] == [1.0] * 4
    assert min(values["balance/replicas"]) > 0
    assert "overload" not in plain.stdout
    for name, said in values.items():
        assert len(said) == 4
        # Printed with seven digits, and stored in float32.
        first, second, *later = written_for_tensorboard(tmp_path / "board", name)
        # Megatron prints the first iteration, and counts it once more in the next line.
        assert [first, (first + second) / 2, *later] == pytest.approx(said, rel=1e-6)
        in_wandb = written_for_wandb(tmp_path, name)
        assert in_wandb == pytest.approx([first, second, *later], rel=1e-6)
    (run,) = read_runs([tmp_path / "run"]).values()
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4]
    assert column(run.metrics, "imbalance_after") == [1.0] * 4
    assert all(milliseconds > 0 for milliseconds in column(run.metrics, "step_ms")[1:])
    for layer in (0, 1, 2):  # the last is of multi-token prediction
        name = f"moe/avg_overload_factor_routed_layer_{layer}"
        on_board = written_for_tensorboard(tmp_path / "board", name)
        assert len(on_board) == 4
        assert min(on_board) >= 1


@needs_training_loop
@pytest.mark.slow
def test_what_excludes_balancing_is_said_before_ranks_wait_for_each_other() -> None:
    words = ["-m", "megatron_ext.pretrain", str(PROGRAM_FILE), "--moe-balance-slots=2"]
    words += [*COMMAND_LINE.split(), "--cuda-graph-impl", "local"]
    # It says that there are two ranks, and not where the other is: it could not wait for it.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    refused = subprocess.run(
        [sys.executable, *words],
        env=alone | dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2, refused.stderr
    line = refused.stderr.splitlines()[-1]
    assert line.startswith(
        f"{PROGRAM}: error: cuda_graph_impl ('local') must be 'none' or 'transformer_engine'"
    )


def test_help_names_no_default_of_what_switches_balancing_on() -> None:
    said = " ".join(balance_parser().format_help().split())
    slots, _ = said.split("--moe-balance-slots X ")[1].split("--moe-balance-tolerance", 1)
    assert "Default" not in slots
    assert slots.strip().endswith("Without this argument the layers stay Megatron's own.")
    assert read_balance(["x.py"])[0] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_what_excludes_balancing_is_said_by_one_rank_in_the_words_of_its_flags(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(*args: Any) -> None:
        raise ConfigError(["balance.nvlink_domain (3) must divide x", "y (1) must be 2"])

    monkeypatch.setattr(pretrain, "run", build)
    monkeypatch.setattr(sys, "argv", ["pretrain", str(PROGRAM_FILE), "--moe-balance-slots=2"])
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    lines = [
        f"{PROGRAM}: error: --moe-balance-nvlink-domain (3) must divide x",
        f"{PROGRAM}: error: y (1) must be 2",
    ]
    assert capsys.readouterr().err.splitlines() == (lines if rank == 0 else [])


def settings_of(section: Section, names: list[str]) -> list[str]:
    for each in fields(section):  # type: ignore[arg-type]
        value = getattr(section, each.name)
        if isinstance(value, Section):
            settings_of(value, names)
        else:
            names.append(f"{section.NAME}.{each.name}")
    return names


def test_every_setting_is_an_argument_with_its_help() -> None:
    actions = balance_parser()._actions
    assert [each.dest for each in actions] == [*settings_of(BalanceConfig(), []), "run_dir"]
    assert all(len(str(each.help)) > 20 for each in actions)
    assert balance_parser().format_help()


def test_settings_are_taken_out_of_a_command_line() -> None:
    words = ["--num-layers", "2", "--moe-balance-slots", "3", "--lr", "-1", "--moe-balance-no"]
    ours = ["--moe-balance-check-plans", "--moe-balance-llep-alpha=2.5", "--help", "--x=--y"]
    with pytest.raises(ValueError, match="unknown argument --moe-balance-no"):
        read_balance(words)
    balance, run_dir, others = read_balance([*words[:-1], *ours, "--moe-balance-run-dir=runs/a"])
    expected = BalanceConfig(slots=3, check_plans=True)
    expected.llep.alpha = 2.5
    assert balance == expected
    assert run_dir == "runs/a"
    assert others == ["--num-layers", "2", "--lr", "-1", "--help", "--x=--y"]
    assert read_balance(["--lr", "1"]) == (None, None, ["--lr", "1"])
    assert read_balance(["--moe-balance-slots=0", "--moe-balance-tolerance=1"]) == (None, None, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("x.py --moe-balance-slotz 3", "--moe-balance-slotz; did you mean --moe-balance-slots?"),
        ("x.py --moe-balance-slots -1", "--moe-balance-slots (-1) must be >= 0"),
        ("x.py --moe-balance-slots x", "--moe-balance-slots ('x') must be a whole number >= 0"),
        ("x.py --moe-balance-tolerance 1", "--moe-balance-tolerance needs --moe-balance-slots: "),
        ("x.py --moe-balance-run-dir x", "--moe-balance-run-dir needs --moe-balance-slots; "),
        ("x.py --moe-balance-objective=x", "--moe-balance-objective: invalid choice: 'x'"),
        ("y.py", "SCRIPT (y.py) must be a file, and come first"),
    ],
)
def test_wrong_arguments_are_one_line(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pretrain", *words.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{PROGRAM}: error: ")
    assert message in line


class Writer:
    """Notes what Megatron writes for TensorBoard."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name] = float(value)


def _attached(rank: int) -> tuple[list[str], dict[str, float], dict[str, float], dict[str, float]]:
    """Classes of a model's MoE layers; what Megatron reported, and for its console; what the layers
    reported."""
    from megatron.core.transformer.moe import moe_utils

    from megatron_ext.mcore.step_metrics import StepMetrics

    reports: list[Any] = []
    steps = StepMetrics(())

    def attend(layer: Any) -> None:
        steps.watch(layer)
        layer.observers.append(reports.append)

    with balancing_models(BalanceConfig(slots=1, tolerance=0.0), attend):
        gpt = build_gpt(ep=2)
        gpt.config.mtp_num_layers = 1
        spec = get_gpt_decoder_block_spec(gpt.config, use_transformer_engine=False)
        mtp = get_gpt_mtp_block_spec(gpt.config, spec, use_transformer_engine=False)
        sizes = dict(vocab_size=32, max_sequence_length=16)
        model = GPTModel(gpt.config, spec, **sizes, mtp_block_spec=mtp)
        gpt.config.mtp_num_layers = None
        graphs, gpt.config.cuda_graph_impl = gpt.config.cuda_graph_impl, "local"
        with pytest.raises(ConfigError, match="--cuda-graph-impl transformer_engine"):
            GPTModel(gpt.config, spec, **sizes)
    gpt.config.cuda_graph_impl = graphs
    gpt.forward_backward(num_microbatches=2)
    writer, totals = Writer(), {"lm loss": torch.ones(1)}
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ModuleNotFoundError:
        report = moe_utils.track_moe_metrics
    else:
        report = get_moe_metrics_tracker().report
    pretrain._with_metrics(report, steps)(
        loss_scale=0.5,
        iteration=1,
        writer=writer,
        track_names=[],
        num_layers=2,
        per_layer_logging=True,
        total_loss_dict=totals,
    )
    steps.close()
    before = [imbalance(home_loads(report.load)) for report in reports]
    after = [imbalance(report.rank_loads_after) for report in reports]
    second = [place for place, report in enumerate(reports) if report.layer_number == 2]
    expected = {
        "moe/avg_overload_factor_routed": sum(before) / 4,
        "moe/max_overload_factor_routed": max(before),
        "moe/avg_overload_factor": sum(after) / 4,
        "moe/max_overload_factor": max(after),
        "moe/avg_overload_factor_routed_layer_1": sum(before[place] for place in second) / 2,
        "balance/replicas": sum(report.num_replicas for report in reports) / 4,
    }
    names = [type(layer).__name__ for layer in model.modules() if hasattr(layer, "router")]
    return names, writer.scalars, {name: float(one) for name, one in totals.items()}, expected


@pytest.mark.option("pretrain")
def test_models_are_balanced_and_megatron_reports_it() -> None:
    for names, reported, console, expected in run_ranks(_attached, 2):
        assert names == ["BalancedMoELayer"] * 3, "the last is of multi-token prediction"
        assert {name: reported[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert console["lm loss"] == 1
        said = {name: reported[name] for name in pretrain.CONSOLE}
        assert {name: console[name] for name in said} == pytest.approx(said, rel=1e-6)
        assert expected["balance/replicas"] > 0
        assert reported["cost/pulled_bytes"] > 0


def _unbalanced(rank: int, has_uncounted: bool) -> list[str]:
    """Warnings of two steps of a program whose models are none that can be balanced."""
    from megatron_ext.mcore.step_metrics import StepMetrics

    build_gpt(ep=2)
    steps = StepMetrics(())
    steps.has_uncounted = has_uncounted
    report = pretrain._with_metrics(lambda iteration: None, steps)
    pretrain._warn_of_no_layers.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report(iteration=1)
        report(iteration=2)
    steps.close()
    return [str(each.message) for each in seen]


def test_a_program_of_which_nothing_is_balanced_is_told_so_once() -> None:
    (told,), others = run_ranks(_unbalanced, 2, False)
    assert told.startswith("nothing is balanced: this program has trained no MoE layers in a model")
    assert others == []
    # Layers whose routers are in CUDA graphs have trained.
    assert run_ranks(_unbalanced, 2, True) == [[], []]
