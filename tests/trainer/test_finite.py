"""Numbers that are not finite, put into running ranks: what becomes of the run by each policy.

Layers 2 to 4: 2 and 4 gloo ranks.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.ranks.launch import NO_RESTART
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides

EVERY_2 = ["checkpoint.every=2", "checkpoint.keep=2"]
PIPELINE = ["model.num_layers=4", "parallel.pp_size=2"]


@contextmanager
def training_of(arguments: list[str]) -> Iterator[Any]:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.loop import Training

    parallel_state.destroy_model_parallel()
    yield Training(load_config(arguments))


def attacked(rank: int, arguments: list[str], attack: Attack, *where: Any) -> tuple[Any, list[str]]:
    """Train under attack; return the exit status, None after the last step, and what was said."""
    status, said = None, io.StringIO()
    with training_of(arguments) as training, redirect_stderr(said), attack(training, rank, *where):
        try:
            training.run()
        except SystemExit as error:
            status = error.code
    assert "Traceback" not in said.getvalue()
    # Not the display of the steps, nor Megatron's advice.
    return status, re.findall(r"^(?:error|warning): .*", said.getvalue(), re.MULTILINE)


@contextmanager
def before_step(training: Any, step: int, change: Callable[[], None]) -> Iterator[None]:
    train_step = training.train_step

    def changed() -> Any:
        if training.step == step - 1:
            change()
        return train_step()

    with mock.patch.object(training, "train_step", changed):
        yield


def a_weight(training: Any, rank: int, of_rank: int, name: str, step: int) -> Any:
    """One number of one weight becomes NaN before a step."""
    weights = [one for chunk in training.chunks for one in chunk.named_parameters()]

    def spoil() -> None:
        if rank == of_rank:
            (weight,) = [weight for each, weight in weights if each.endswith(name)]
            weight.data.view(-1)[3] = float("nan")

    return before_step(training, step, spoil)


def a_loss(training: Any, rank: int, of_rank: int, number: int, value: float) -> Any:
    """The loss of one microbatch is multiplied by this value, and with it its gradients."""
    from megatron_ext.trainer import loop

    mean_loss, calls = loop._mean_loss, iter(range(10**6))

    def spoiled(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        is_it = rank == of_rank and next(calls) == number
        return mean_loss(loss_mask, losses * value if is_it else losses)

    return mock.patch.object(loop, "_mean_loss", spoiled)


Attack = Callable[..., Any]


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics as a strict reader of JSON has them."""
    refuse = mock.Mock(side_effect=AssertionError("no JSON"))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


GOOD = ["step_00000002", "step_00000004"]
WEIGHT = "layers.0.mlp.experts.local_experts.1.linear_fc1.weight"


@pytest.mark.parametrize(
    ("num_ranks", "settings", "rank", "weight", "place"),
    [
        (2, ["on_nan=stop"], 1, WEIGHT, "linear_fc1.weight of layer 1, expert 3, of rank 1"),
        (2, ["on_nan=skip"], 0, WEIGHT, "linear_fc1.weight of layer 1, expert 1, of rank 0"),
        (
            4,
            [*PIPELINE, "model.experts=grouped_mm", "parallel.distributed_optimizer=false"],
            3,
            "layers.1.mlp.experts.fc2",
            "mlp.experts.fc2 of layer 4, expert 2, of rank 3",
        ),
        (
            4,
            [*PIPELINE, "parallel.vpp_size=2", "model.precision=bf16"],
            3,
            "final_layernorm.weight",
            "weight decoder.final_layernorm.weight of rank 3",
        ),
    ],
    ids=["stop", "skip", "pipeline", "interleaved"],
)
def test_a_weight_ends_the_run_with_its_name(
    num_ranks: int,
    settings: list[str],
    rank: int,
    weight: str,
    place: str,
    data: Path,
    tmp_path: Path,
) -> None:
    arguments = [*overrides(data, tmp_path), *EVERY_2, *settings]
    ended = run_ranks(attacked, num_ranks, arguments, a_weight, rank, weight, 5)
    assert [status for status, _ in ended] == [NO_RESTART] * num_ranks
    (line,), *others = [said for _, said in ended]
    assert not any(others)
    assert line.startswith("error: step 5: the gradient norm is nan: weight ")
    assert place in line
    assert checkpoints(tmp_path) == GOOD
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [(2, []), (2, ["optimizer.clip_grad=0"]), (4, PIPELINE), (2, ["parallel.tp_size=2"])],
    ids=["EP2", "no clipping", "EP2 x PP2", "TP2"],
)
def test_a_loss_ends_the_run_with_its_microbatch(
    num_ranks: int, settings: list[str], data: Path, tmp_path: Path
) -> None:
    """Loss 9 of the last rank, which has 2 microbatches a step, or 4 where all data is its own."""
    arguments = [*overrides(data, tmp_path), *EVERY_2, *settings]
    ended = run_ranks(attacked, num_ranks, arguments, a_loss, num_ranks - 1, 9, float("nan"))
    assert [status for status, _ in ended] == [NO_RESTART] * num_ranks
    step, number = (3, 1) if "parallel.tp_size=2" in settings else (5, 1)
    (line,) = ended[0][1]
    assert f"error: step {step}: the gradient norm is nan: loss of microbatch {number}" in line
    assert f"rank {num_ranks - 1} (nan)" in line
    assert checkpoints(tmp_path) == GOOD[: (step - 1) // 2]


def test_a_norm_too_large_for_its_type(data: Path, tmp_path: Path) -> None:
    """Gradients of 1e25 are numbers, the sum of their squares is none."""
    arguments = [*overrides(data, tmp_path), "parallel.distributed_optimizer=false"]
    arguments += ["optimizer.clip_grad=0"]
    ended = run_ranks(attacked, 2, arguments, a_loss, 1, 2, 1e25)
    assert [status for status, _ in ended] == [NO_RESTART] * 2
    assert "step 2: the gradient norm is inf: every gradient by itself is finite" in ended[0][1][0]


def states_around(rank: int, arguments: list[str]) -> tuple[Any, ...]:
    """The state before and after a step whose loss is NaN, as text of its bits; and the metrics."""
    with training_of(arguments) as training, a_loss(training, rank, 1, 4, float("nan")):
        lines = [training.train_step() for _ in range(2)]
        before = bits_of(training)
        lines.append(training.train_step())
        after = bits_of(training)
        lines.append(training.train_step())
    return before, after, bits_of(training), lines


def bits_of(training: Any) -> list[bytes]:
    from megatron_ext.trainer import finite

    parts = [*finite._weights(training.chunks), *finite._optimizer_state(training.optimizer)]
    flat = [part.tensor.detach().reshape(-1) for part in parts]
    return [one.view(torch.uint8).numpy().tobytes() for one in flat]


@pytest.mark.parametrize("settings", [[], ["model.precision=bf16", "balance.strategy=none"]])
def test_a_skipped_step_changes_no_bit(settings: list[str], data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), "on_nan=skip", *settings]
    for before, after, later, lines in run_ranks(states_around, 2, arguments):
        assert before == after
        assert len(before) > 20
        assert later != after
        assert [line["skipped"] for line in lines] == [0, 0, 1, 0]


def test_a_run_with_a_skipped_step_continues_exactly(data: Path, tmp_path: Path) -> None:
    """The step is not counted by Adam, before and after the run was stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = ["on_nan=skip", "steps=6"]
    arguments = [*overrides(data, whole), *EVERY_2, *settings]
    ended = run_ranks(attacked, 2, arguments, a_loss, 0, 4, float("nan"))
    assert [status for status, _ in ended] == [None, None]
    (line,) = ended[0][1]
    assert line == (
        "warning: step 3: the gradient norm is nan: loss of microbatch 0, rank 0 (nan); "
        "the optimizer step was not made"
    )
    lines = lines_of(whole)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert [line["step"] for line in lines if line["loss"] is None] == [3]
    assert checkpoints(whole) == ["step_00000004", "step_00000006"]
    start = f"checkpoint.load={whole}/checkpoints/step_00000004"
    run_ranks(attacked, 2, [*overrides(data, stopped), *settings, start], a_loss, 0, -1, 1.0)
    losses = [line["loss"] for line in read_metrics(stopped)]
    assert losses == [line["loss"] for line in read_metrics(whole)][4:]


def test_ignored_numbers_are_not_saved(data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), *EVERY_2, "on_nan=ignore"]
    ended = run_ranks(attacked, 2, arguments, a_weight, 1, WEIGHT, 5)
    assert [status for status, _ in ended] == [None, None]
    lines = ended[0][1]
    assert [line.split(": ")[1] for line in lines] == ["step 6", "step 8"]
    assert all("the state is not saved: weight" in line for line in lines)
    assert checkpoints(tmp_path) == GOOD
    assert [line["loss"] is None for line in lines_of(tmp_path)] == [False] * 4 + [True] * 4


def a_reported_loss(training: Any, rank: int, of_rank: int, number: int) -> Any:
    """The loss of one microbatch is said to be NaN, and its gradients are good."""
    from megatron_ext.trainer import loop

    mean_loss, calls = loop._mean_loss, iter(range(10**6))

    def misreported(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        loss, report = mean_loss(loss_mask, losses)
        is_it = rank == of_rank and next(calls) == number
        return loss, {"loss": report["loss"] * float("nan")} if is_it else report

    return mock.patch.object(loop, "_mean_loss", misreported)


def test_a_state_behind_such_a_loss_is_not_saved(data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), *EVERY_2, "on_nan=skip", "steps=4"]
    ended = run_ranks(attacked, 2, arguments, a_reported_loss, 0, 2)
    assert [status for status, _ in ended] == [None, None]
    assert ended[0][1] == [
        "warning: step 2: the loss is nan: loss of microbatch 0, rank 0 (nan); the optimizer step "
        "was made",
        "warning: step 2: the state is not saved: the loss is nan",
    ]
    assert checkpoints(tmp_path) == ["step_00000004"]


def a_state(training: Any, rank: int, of_rank: int, step: int) -> Any:
    """One of Adam's numbers becomes infinite: its weight stays as it is, for ever."""

    def spoil() -> None:
        if rank == of_rank:
            part = training.optimizer.chained_optimizers[0]
            next(iter(part.optimizer.state.values()))["exp_avg_sq"].view(-1)[0] = float("inf")

    return before_step(training, step, spoil)


def test_a_state_that_no_gradient_shows_is_not_saved(data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), *EVERY_2]
    ended = run_ranks(attacked, 2, arguments, a_state, 1, 5)
    assert [status for status, _ in ended] == [NO_RESTART] * 2
    (line,) = ended[0][1]
    assert line == (
        "error: step 6: the state is not saved: state exp_avg_sq of the optimizer of rank 1"
    )
    assert checkpoints(tmp_path) == GOOD


READS = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
"""Methods of tensors that make the host wait for a device."""


def reads_of_a_step(rank: int, arguments: list[str]) -> int:
    calls = mock.Mock()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any) -> Any:
            calls()
            return method(tensor, *args)

        return read

    with training_of(arguments) as training, ExitStack() as stack:
        training.train_step()
        for name in READS:
            method = counted(getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(torch.Tensor, name, method))
        training.train_step()
    return calls.call_count


def test_watching_reads_nothing_more(data: Path, tmp_path: Path) -> None:
    arguments = overrides(data, tmp_path)
    counts = {
        policy: run_ranks(reads_of_a_step, 2, [*arguments, f"on_nan={policy}"])
        for policy in ("stop", "skip", "ignore")
    }
    assert counts["stop"] == counts["skip"] == counts["ignore"]
    assert min(counts["ignore"]) > 0
