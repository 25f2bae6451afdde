"""The CPU platform restores what it replaced, refuses CUDA, and carries a training of stock
Megatron-Core.

Trainings run on 2 or 4 gloo ranks. They are compared with themselves under another parallel layout:
the same weights and tokens must give the same loss wherever the experts and layers live.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.cpu_platform import FusedWeightGradient, enable_cpu_platform
from tests.ranks import run_ranks

STEPS = 3


def _attributes() -> dict[tuple[str, str], Any]:
    owners = {"torch": torch, "cuda": torch.cuda, "Tensor": torch.Tensor, "Module": torch.nn.Module}
    owners["gloo"] = torch.distributed.ProcessGroupGloo
    for name in (
        "tensor_parallel.layers",
        "tensor_parallel.mappings",
        "tensor_parallel.random",
        "transformer.moe.moe_utils",
        "transformer.moe.token_dispatcher",
    ):
        owners[name] = importlib.import_module(f"megatron.core.{name}")
    return {
        (owner, name): value
        for owner, holder in owners.items()
        for name, value in vars(holder).items()
    }


def test_undo_restores_every_attribute() -> None:
    importlib.import_module("tests.gpt")
    enable_cpu_platform().undo()
    before = _attributes()
    with enable_cpu_platform() as platform:
        assert enable_cpu_platform() is platform
        during = _attributes()
        assert during != before
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    after = _attributes()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []
    enable_cpu_platform()


def test_nothing_is_compiled() -> None:
    """The compiler is not even imported; a program may use it all the same."""
    program = """
import sys, torch
compile_ = torch.compile
from megatron_ext import enable_cpu_platform
enable_cpu_platform()
assert torch.compile is compile_
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu, swiglu
assert "torch._inductor" not in sys.modules
values = torch.randn(3, 8)
gate, linear = values.chunk(2, -1)
assert torch.equal(swiglu(values), torch.nn.functional.silu(gate) * linear)
assert "torch._inductor" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_refuses_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    enable_cpu_platform().undo()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(RuntimeError, match="machines without CUDA"):
            enable_cpu_platform()
    enable_cpu_platform()


def test_a_device_that_is_set_is_heeded() -> None:
    """As transformers does, which fills what a model has on `meta` by itself."""
    code = (
        "import torch; from megatron_ext import enable_cpu_platform; enable_cpu_platform()\n"
        "with torch.device('meta'): made = torch.ones(2), torch.empty(1, device='cuda')\n"
        "assert [each.device.type for each in made] == ['meta', 'cpu'], made"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_cuda_is_the_cpu() -> None:
    with enable_cpu_platform():
        device = torch.cuda.current_device()
        assert (
            torch.ones(2, device=device)
            .cuda()
            .to("cuda:0")
            .to(device=torch.device("cuda", 0))
            .device.type
            == "cpu"
        )
        assert (
            torch.nn.Linear(2, 2, device="cuda").cuda(device).to("cuda").weight.device.type == "cpu"
        )
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.float64).dtype == torch.float64
        assert not torch.zeros(1, pin_memory=True).is_pinned()
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(4), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_weight_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs, grad_output, before = (
        torch.randint(-4, 5, shape, generator=generator) for shape in ((3, 5, 8), (3, 5, 6), (6, 8))
    )
    before = before + 2**9  # where bfloat16 has steps of 4
    main_grad = before.to(dtype)
    exact = main_grad.long() + grad_output.flatten(0, 1).t() @ inputs.flatten(0, 1)
    kernel = {
        torch.float32: FusedWeightGradient.wgrad_gemm_accum_fp32,
        torch.bfloat16: FusedWeightGradient.wgrad_gemm_accum_fp16,
    }[dtype]
    kernel(inputs.bfloat16(), grad_output.bfloat16(), main_grad)
    assert torch.equal(main_grad, exact.to(dtype))


def _threads_and_sums(rank: int) -> tuple[list[int], list[float], timedelta]:
    enable_cpu_platform()
    threads, sums = [], []
    for members in ([0, 1], [0, 1], [1, 0], None):
        group = torch.distributed.new_group(members, timeout=timedelta(seconds=77))
        threads.append(_threads_of_gloo())
        mine = torch.tensor(float(rank + 1))
        torch.distributed.all_reduce(mine, group=group)
        sums.append(mine.item())
    return threads, sums, group._get_backend(torch.device("cpu")).options._timeout


def _threads_of_gloo() -> int:
    names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop\n")


def test_groups_share_a_thread_of_gloo() -> None:
    for threads, sums, timeout in run_ranks(_threads_and_sums, 2):
        assert len(set(threads)) == 1
        assert threads[0] >= 1
        assert sums == [3.0] * 4
        assert timeout == timedelta(seconds=77)


class _AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.ones(grad.shape, device="cuda").to("cuda")


def test_answers_inside_backward() -> None:
    with enable_cpu_platform():
        x = torch.ones(3, requires_grad=True)
        _AsksInBackward.apply(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(3))


def _train(rank: int, runs: list[dict[str, Any]]) -> list[list[float]]:
    from tests.gpt import build_gpt

    losses = []
    for settings in runs:
        gpt = build_gpt(**settings)
        losses.append([gpt.train_step(step, num_microbatches=2) for step in range(STEPS)])
    return losses


def test_trains_moe_alike_in_every_layout() -> None:
    """Pairs of runs that may differ only by the order of float32 sums."""
    shared = {"shared_ffn": 24}
    deep = {"num_layers": 4}
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"ep": 2}, {}),
        ({"ep": 2, "overlap_grad_reduce": True}, {}),
        ({"ep": 2, "distributed_optimizer": True}, {}),
        (
            {
                "ep": 2,
                "distributed_optimizer": True,
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
            },
            {},
        ),
        ({"ep": 2, "dispatcher": "allgather", "recompute": "full", **shared}, shared),
    ]
    runs = [settings for pair in pairs for settings in pair] + [deep]
    losses = torch.tensor(run_ranks(_train, 2, runs)).mean(dim=0)
    for (settings, _), parallel, plain in zip(pairs, losses[::2], losses[1::2], strict=False):
        torch.testing.assert_close(
            parallel, plain, rtol=1e-5, atol=0, msg=lambda text, s=settings: f"{s}: {text}"
        )
        assert parallel[-1] != parallel[0]

    pipeline = deep | {
        "pp": 2,
        "vpp": 2,
        "ep": 2,
        "distributed_optimizer": True,
        "recompute": "selective",
    }
    piped = torch.tensor(run_ranks(_train, 4, [pipeline])).nanmean(dim=0)
    torch.testing.assert_close(piped[0], losses[-1], rtol=1e-5, atol=0)


def _gradients(rank: int, runs: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    from tests.gpt import build_gpt

    gradients = []
    for settings in runs:
        gpt = build_gpt(dtype=torch.float64, **settings)
        gpt.forward_backward()
        gradients.append(gpt.gradients())
    return gradients


def test_float64_gradients_do_not_depend_on_expert_parallelism() -> None:
    ranks = run_ranks(_gradients, 2, [{}, {"ep": 2}])
    expected = ranks[0][0]
    assert {name for _, gradients in ranks for name in gradients} == set(expected)
    for _, gradients in ranks:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-14)
