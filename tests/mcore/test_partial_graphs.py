"""Training with partial CUDA graphs is the same, bit by bit, as training without them.

Layer 2. Megatron's own code captures, hands over and resumes; only what captures and replays is
replaced (`graphs.py`).
"""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig, HistorySettings
from megatron_ext.telemetry.step_lines import read_lines
from tests.cli import command
from tests.gpt import SEQUENCE, TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.covering import of_this_version
from tests.mcore.graphs import CaptureError, Graphed, Recorder, graph_layers
from tests.mcore.parity import balanced, balanced_gpt, balanced_layers
from tests.mcore.test_agreement import spoil
from tests.ranks import run_ranks

ALL = ("attn", "moe_router", "moe_preprocess")


def with_graphs(*scopes: str, impl: str = "transformer_engine") -> dict[str, Any]:
    """The fields of TransformerConfig; this version's name of the scopes."""
    from megatron.core.transformer import TransformerConfig

    is_new = hasattr(TransformerConfig, "cuda_graph_modules")
    name = "cuda_graph_modules" if is_new else "cuda_graph_scope"
    return {"cuda_graph_impl": impl, name: list(scopes or ALL)}


@dataclass(frozen=True)
class Case:
    """A model and what its graphs hold."""

    settings: dict[str, Any] = field(default_factory=dict)
    scopes: tuple[str, ...] = ALL
    balance: dict[str, Any] = field(default_factory=dict)
    world_size: int = 2
    num_microbatches: int = 3


CASES = {
    "router and preprocess": Case(scopes=("moe_router", "moe_preprocess")),
    "attention and router": Case(scopes=("attn", "moe_router")),
}
"""With each version of Megatron-Core."""

HISTORY = HistorySettings(interval=1)
CASES_OF_ONE_VERSION = {
    "shared experts": Case(dict(shared_ffn=24)),
    "multi-token prediction": Case(dict(mtp_num_layers=1)),
    "interleaved": Case(dict(pp=2, vpp=2, num_layers=4), world_size=4, num_microbatches=4),
    "attention, with recomputed MoE layers": Case(dict(recompute="selective"), ("attn",)),
    "their overlap": Case(dict(shared_ffn=24, moe_shared_expert_overlap=True)),
    "allgather": Case(dict(dispatcher="allgather")),
    "DeepEP": Case(dict(dispatcher="flex", moe_flex_dispatcher_backend="deepep")),
    "HybridEP": Case(dict(dispatcher="flex", moe_flex_dispatcher_backend="hybridep")),
    "losses": Case(
        dict(
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
            moe_z_loss_coeff=0.01,
        )
    ),
    "expert bias": Case(
        dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    ),
    "capacity": Case(dict(moe_expert_capacity_factor=1.0), ("attn", "moe_router")),
    "dense layers": Case(dict(num_layers=4, moe_layer_freq=[1, 0, 1, 1]), (*ALL, "mlp")),
    "exact": Case(balance=dict(strategy="exact", slots=0)),
    "libra": Case(dict(num_layers=3), balance=dict(strategy="libra")),
    "eplb": Case(balance=dict(strategy="eplb", history=HISTORY)),
    "time": Case(balance=dict(objective="time")),
    "collective": Case(balance=dict(transport="collective", check_plans=True)),
    "own tokens first": Case(balance=dict(local_first=True)),
    "ideal": Case(balance=dict(strategy="ideal")),
    "pipeline": Case(dict(pp=2), world_size=4),
    "distributed optimizer": Case(
        dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True),
        world_size=4,
    ),
}
"""With one of the versions, in turn."""

CASES |= of_this_version(CASES_OF_ONE_VERSION)


def train_with_and_without(rank: int, case: Case) -> tuple[int, int]:
    """Train alike with and without graphs; return replicas and operations in graphs."""
    from tests.flex_on_cpu import flex_on_cpu

    is_flex = case.settings.get("dispatcher") == "flex"
    balance = BalanceConfig(**dict(tolerance=0.0) | case.balance)
    settings = dict(ep=2) | case.settings
    with flex_on_cpu() if is_flex else nullcontext():
        plain = balanced_gpt(settings, balance)
        graphed = balanced_gpt(settings, balance, **with_graphs(*case.scopes))
        for gpt in (plain, graphed):  # Megatron captures after some steps, too.
            gpt.train_step(0, num_microbatches=case.num_microbatches)
        graphs = graph_layers(graphed, case.num_microbatches)
        for step in range(1, 4):
            assert_equal_steps(plain, graphed, step, case.num_microbatches)
    for layer in balanced_layers(graphed):
        assert inside.in_flight(layer) == 0
    num_operations = sum(len(each.forward.operations) for each in graphs)
    return sum(layer.num_replicas for layer in balanced_layers(graphed)), num_operations


def assert_equal_steps(plain: TinyGPT, graphed: TinyGPT, step: int, num_microbatches: int) -> None:
    """Train a step and evaluate with both, and compare bit by bit."""
    outcomes = []
    for gpt in (plain, graphed):
        loss = torch.tensor(gpt.train_step(step, num_microbatches=num_microbatches))
        with torch.no_grad():
            reports = gpt.forward_backward(
                100 + step, num_microbatches=num_microbatches, forward_only=True
            )
        evaluated = {f"evaluated {number}": each["loss"] for number, each in enumerate(reports)}
        outcomes.append(gpt.parameters() | evaluated | {"loss": loss})
    for name, expected in outcomes[0].items():
        found = outcomes[1][name]
        assert torch.equal(expected, found) or expected.isnan().all(), f"step {step}: {name}"


@pytest.mark.option("partial_graphs")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_the_same(case: Case) -> None:
    for replicas, num_operations in run_ranks(train_with_and_without, case.world_size, case):
        assert num_operations > 0
        assert replicas > 0 or case.balance.get("strategy") == "ideal"


class LocalGraphs:
    """Stands in for Megatron's CudaGraphManager: graphs a method of a layer, at its second call."""

    def __init__(self, config: Any, layer: Any = None, function_name: str = "") -> None:
        if layer is None:  # Megatron's block makes one that is for decoding.
            return
        self._layer, self._function, self._num_calls = layer, getattr(layer, function_name), 0
        # What is behind the experts has nothing of ours.
        if function_name == "_forward_mlp_router":
            setattr(layer, function_name, self._run)

    def _run(self, hidden_states: torch.Tensor, **_: None) -> Any:
        self._num_calls += torch.is_grad_enabled()
        if self._num_calls == 1 or not torch.is_grad_enabled():
            return self._function(hidden_states)
        if self._num_calls == 2:
            covered = (self._layer.mlp.router, self._layer.pre_mlp_layernorm)
            parameters = [parameter for each in covered for parameter in each.parameters()]
            self.graphed = Graphed(self._function, [hidden_states], parameters)
        return self.graphed(hidden_states)


def _of_hybrid_models(spec: Any) -> Any:
    """Return the spec with the layers of hybrid models, which have partial graphs of Megatron."""
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    from megatron_ext.mcore.spec import replace_parts

    return replace_parts(
        spec,
        lambda part: getattr(part, "module", None) is TransformerLayer,
        lambda part: replace(part, module=MoETransformerLayer),
    )


def _compare_local(rank: int, recompute: str) -> tuple[int, bool]:
    from megatron.core.transformer import cuda_graphs

    def build(**graphs: Any) -> TinyGPT:
        balance = BalanceConfig(tolerance=0.0)
        with mock.patch.object(cuda_graphs, "CudaGraphManager", LocalGraphs):
            return build_gpt(
                ep=2,
                is_hybrid_model=True,
                recompute=recompute,
                overlap_grad_reduce=True,
                spec_transform=lambda spec: balanced(_of_hybrid_models(spec), balance),
                **graphs,
            )

    reports: list[Any] = []
    plain = build()
    graphed = build(**with_graphs("moe_router", "moe_preprocess", impl="local"))
    for layer in balanced_layers(graphed):
        layer.observers.append(reports.append)
    for step in range(4):
        assert_equal_steps(plain, graphed, step, 1)
    model: Any = graphed.chunks[0].module
    managers = [layer.cudagraph_manager_router for layer in model.decoder.layers]
    replicas = sum(report.num_replicas for report in reports)
    return replicas, all(hasattr(each, "graphed") for each in managers)


@pytest.mark.option("partial_graphs")
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_graphs_of_megatrons_own_change_nothing(recompute: str) -> None:
    for replicas, is_graphed in run_ranks(_compare_local, 2, recompute):
        assert replicas > 0
        assert is_graphed


def _capture_the_plan(rank: int) -> None:
    from megatron_ext.mcore.moe_layer import BalancedMoELayer

    gpt = balanced_gpt(dict(ep=2), BalanceConfig(), **with_graphs())
    gpt.train_step(0)
    behind = BalancedMoELayer.preprocess_behind_graph
    with mock.patch.object(BalancedMoELayer, "preprocess", behind):
        graph_layers(gpt)


def test_a_plan_inside_the_graph_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="CaptureError"):
        run_ranks(_capture_the_plan, 2)


def _joins(rank: int, scopes: tuple[str, ...]) -> list[bool]:
    """Whether backward waits at the layer's input, of every forward of a step."""
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(tolerance=0.0), **with_graphs(*scopes))
    gpt.train_step(0)
    graph_layers(gpt)
    joined, push = [], inside.original(inside.START_MATERIALIZE)

    def noted(forward: Any, there: Any = None) -> None:
        joined.append(forward.is_joined)
        push(forward, there)

    with mock.patch(inside.START_MATERIALIZE, noted):
        gpt.train_step(1, num_microbatches=2)
    return joined


@pytest.mark.parametrize("scopes", [ALL, ("moe_router", "moe_preprocess")])
def test_backward_waits_at_the_input_of_a_replayed_layer(scopes: tuple[str, ...]) -> None:
    for joined in run_ranks(_joins, 2, scopes):
        assert joined == [True] * 4  # 2 layers, 2 microbatches


def _evaluate_after_an_error(rank: int) -> bool:
    """Whether an evaluation after a replay that failed on all ranks is as before it."""
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(), **with_graphs("attn", "moe_router"))
    gpt.train_step(0)
    graph_layers(gpt)

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            (report,) = gpt.forward_backward(7, forward_only=True)
        return report["loss"]

    before = evaluate()
    with mock.patch(inside.SOLVE, side_effect=ArithmeticError), pytest.raises(ArithmeticError):
        gpt.forward_backward(1)
    return torch.equal(before, evaluate())


def test_a_failed_replay_leaves_nothing_to_the_next_forward() -> None:
    assert run_ranks(_evaluate_after_an_error, 2) == [True, True]


def _disagree(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2, num_layers=4), BalanceConfig(tolerance=0.0), **with_graphs())
    gpt.train_step(0)
    graph_layers(gpt)
    with spoil(gpt, "plan") if rank == 1 else nullcontext():
        gpt.train_step(1)
    gpt.train_step(2)


def test_ranks_that_differ_behind_a_graph_stop() -> None:
    with pytest.raises(RuntimeError, match=r"layer 2.*(another load or plan|different replicas)"):
        run_ranks(_disagree, 2)


FORBIDDEN = {
    "item": lambda x: x.sum().item(),
    "a condition": lambda x: bool(x.sum() > 0),
    "a number": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "a mask as index": lambda x: x[x > 2],
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "data of the host": lambda x: torch.tensor([len(x)]),
}


@pytest.mark.parametrize("function", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_the_recorder_finds_what_a_capture_forbids(function: Any) -> None:
    with pytest.raises(CaptureError), Recorder():
        function(torch.arange(6.0))


def test_a_replay_repeats_numbers_of_the_host_and_reads_memory_anew() -> None:
    steps, flag, counter = 0, torch.zeros(1), torch.zeros(1)
    with Recorder() as recorder:
        steps += 1
        flag.fill_(steps)
        counter.add_(1)
        unset = torch.empty(3) + 1
    found = []
    for _ in range(2):
        recorder.replay()
        found.append((flag.item(), counter.item()))
    assert found == [(1, 2), (1, 3)]
    assert unset.isnan().all()


def _metrics_of_stock_layers(
    rank: int, scopes: tuple[str, ...], run_dir: str
) -> tuple[list[str], set[bool]]:
    """Return the warnings, and whether steps have metrics, before and after a capture."""
    from megatron_ext import StepMetrics, balance_spec

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    spec = partial(balance_spec, balance=BalanceConfig(strategy="none"))
    gpt = build_gpt(ep=2, spec_transform=spec, **with_graphs(*scopes))
    steps = StepMetrics(gpt.chunks, run_dir=run_dir)
    found = set()
    for step in range(3):
        gpt.train_step(step, num_microbatches=2)
        found.add(bool(steps.take(loss=2.0)))
        if step == 0:
            graph_layers(gpt, 2)
    steps.close()
    logging.getLogger("megatron_ext").removeHandler(handler)
    return said, found


def test_stock_layers_whose_routers_are_in_graphs_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replays call no hook of a router, and a capture is no training. Steps have their times."""
    run_dirs = [str(tmp_path / name) for name in ("uncounted", "counted")]
    (said, found), (nothing, others) = run_ranks(
        _metrics_of_stock_layers, 2, ("moe_router",), run_dirs[0]
    )
    assert len(said) == 1
    assert "are not counted, for CUDA graphs hold their routers" in said[0]
    assert (nothing, found, others) == ([], {False}, {False})
    assert run_ranks(_metrics_of_stock_layers, 2, ("attn",), run_dirs[1]) == [([], {True})] * 2
    for run_dir, has_loads in zip(run_dirs, (False, True), strict=True):
        lines = list(read_lines(Path(run_dir) / "metrics.jsonl"))
        assert [(line["step"], line["strategy"]) for line in lines] == [
            (step, "none") for step in (1, 2, 3)
        ]
        assert all("step_ms" in line for line in lines[1:])
        assert ["imbalance_before" in line for line in lines] == [has_loads] * 3
    status, out, error = command.run(capsys, "report", *run_dirs, "--json")
    assert (status, error) == (0, "")
    assert json.loads(out)["runs"]["uncounted"]["step_ms"] > 0


def _stock_router(rank: int, dispatcher: str) -> float:
    gpt = build_gpt(ep=1, dispatcher=dispatcher)
    moe: Any = gpt.chunks[0].module.decoder.layers[0].mlp
    sample = torch.randn(SEQUENCE, 2, 16).requires_grad_()
    graphed = Graphed(moe.route, [sample], [*moe.router.parameters()])
    worst = 0.0
    for scale in (1.0, 2.0, 3.0):
        hidden = scale * torch.randn(SEQUENCE, 2, 16)
        outcomes = []
        for route in (moe.route, graphed):
            inputs = hidden.clone().requires_grad_()
            probs, routing_map = route(inputs)
            (grad,) = torch.autograd.grad(probs.square().sum(), inputs)
            outcomes.append((probs, routing_map, grad))
        for one, other in zip(*outcomes, strict=True):
            worst = max(worst, float((one.double() - other.double()).abs().max()))
    return worst


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_router_of_megatrons_replays_right(dispatcher: str) -> None:
    assert run_ranks(_stock_router, 1, dispatcher) == [0.0]
