"""A wait that fails on one rank only, where the host hears of it late: no rank changes a weight.

Layer 2 (four gloo ranks: two pipeline stages of two EP ranks, the first stage without MoE layers).
The transport is one of CPU ranks that fails as one between GPUs does: its sums are wrong, its calls
go on, and a word tells.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config import BalanceConfig
from megatron_ext.transport.collective import CollectiveTransport
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers  # first: enables the CPU platform
from tests.ranks import run_ranks

from megatron_ext.mcore import failures, models, planning_group, process_hooks  # isort: skip
from megatron_ext.mcore.between_steps import check_agreement, reset_after_abort  # isort: skip

MESSAGE = "rank 1 waited 0.2 s for rank 0 to offer the gradient of slot 0"
EXPECTED = f"the step ends on all ranks before it changes a weight: global rank 3: {MESSAGE}$"


class LateTransport(CollectiveTransport):
    """Fails in one pull, as a kernel does."""

    def __init__(self, ep_group: Any) -> None:
        super().__init__(ep_group)
        self.failed = torch.zeros(1, dtype=torch.int32)
        self.fails_next = False

    def pull_add(self, transfers: Any, slot_grads: Any, *totals: Any) -> Any:
        if self.fails_next:
            self.failed.fill_(1)
            for segment in slot_grads:
                segment.fill_(1e9)
        return super().pull_add(transfers, slot_grads, *totals)

    def raise_failure(self) -> None:
        if self.failed.item():
            raise RuntimeError(MESSAGE)

    def reset(self) -> None:
        self.failed.zero_()
        self.fails_next = False


def _fail_late(rank: int, case: dict[str, Any]) -> None:
    made: list[LateTransport] = []

    def make(name: str, ep_group: Any, *_: Any) -> LateTransport:
        made.append(LateTransport(ep_group))
        return made[-1]

    balance = BalanceConfig(slots=1, tolerance=0.0, transport="collective")
    with mock.patch(inside.MAKE_TRANSPORT, make):
        gpt = balanced_gpt(case, balance)
        gpt.train_step(0, num_microbatches=2)
    assert len(made) == (1 if rank >= 2 else 0), "the first stage has no MoE layer"
    before = gpt.parameters()
    for one in made:
        one.fails_next = rank == 3
    reports = gpt.forward_backward(1, num_microbatches=2)
    if rank >= 2:
        assert reports, "the step goes on to its end"
        assert sum(layer.num_replicas for layer in balanced_layers(gpt)) > 0
    with pytest.raises(RuntimeError, match=EXPECTED):
        gpt.optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in gpt.parameters().items())
    # Where an optimizer skips its step, the next one ends before it begins.
    gpt.forward_backward(1, num_microbatches=2)
    with pytest.raises(RuntimeError, match=EXPECTED):
        gpt.forward_backward(2, num_microbatches=2)
    # What fails in an evaluation is not saved behind.
    with pytest.raises(RuntimeError, match=EXPECTED):
        check_agreement(gpt.chunks)
    dist.barrier()

    reset_after_abort(gpt.chunks)
    gpt.train_step(1, num_microbatches=2)
    assert not all(torch.equal(value, before[name]) for name, value in gpt.parameters().items())


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_failed_wait_changes_no_weight_on_any_rank(distributed_optimizer: bool) -> None:
    case = dict(
        ep=2,
        pp=2,
        topk=1,
        experts=8,
        moe_layer_freq=[0, 1],
        distributed_optimizer=distributed_optimizer,
        overlap_grad_reduce=distributed_optimizer,
    )
    run_ranks(_fail_late, 4, case)


class _Grid(SimpleNamespace):
    """Groups of a model as its DDP has them; a rank alone in a group needs none."""

    tp_group = pp_group = SimpleNamespace(size=lambda: 1)


def _two_models(rank: int) -> None:
    """A model of both ranks, then one of rank 0 alone, where nothing has failed."""
    transport = mock.Mock(failed=torch.tensor([rank], dtype=torch.int32))
    transport.raise_failure.side_effect = RuntimeError(MESSAGE) if rank else None
    with mock.patch.object(failures, "transports_in_use", return_value=[transport]):
        failures.start_count(_Grid(dp_cp_group=dist.group.WORLD))
        if rank == 0:
            failures.start_count(_Grid(dp_cp_group=SimpleNamespace(size=lambda: 1)))
        with pytest.raises(RuntimeError, match=f"weight: global rank 1: {MESSAGE}$"):
            failures.look()
        failures.look()  # Each count once.


def test_a_model_of_some_ranks_hides_no_failure_of_another() -> None:
    run_ranks(_two_models, 2, timeout_s=20)


def _answer_late(rank: int, folder: str) -> list[str]:
    """Rank 1 answers only when rank 0 has warned."""
    failures.forget()  # What an earlier test has counted in this process.
    said: list[str] = []

    def note(text: str) -> None:
        said.append(text)
        Path(folder, str(len(said))).touch()

    calls = [
        partial(planning_group.check_equal_config, BalanceConfig(), dist.group.WORLD),
        partial(failures.start_count, _Grid(dp_cp_group=dist.group.WORLD)),
    ]
    with (
        mock.patch.object(planning_group, "LATE_S", 60.0 * rank),
        mock.patch.object(planning_group.logger, "warning", note),
    ):
        for number, call in enumerate(calls, 1):
            while rank == 1 and not Path(folder, str(number)).exists():
                time.sleep(0.01)
            call()
    failures.look()
    return said


def test_a_rank_that_waits_for_ranks_without_balancing_says_so(tmp_path: Path) -> None:
    said, nothing = run_ranks(_answer_late, 2, str(tmp_path), timeout_s=20)
    assert not nothing
    built, counted = said
    assert built.startswith("rank 0 has waited 0 s for the other ranks of an EP group to build")
    assert counted.startswith("rank 0 has waited 0 s for the other ranks of the model to count")
    assert all("must call balance_spec or balance_models" in text for text in said)


def test_a_program_counts_on_stages_that_have_nothing_to_balance() -> None:
    with (
        mock.patch.object(models, "MODELS", ()),
        mock.patch.object(process_hooks, "install") as install,
    ):
        models.balance_models(BalanceConfig(), lambda layer: None)
    install.assert_called_once()
