"""Launches, allocations and host syncs of one MoE layer, balanced and as Megatron has it.

    python tests/perf/launches.py [--json FILE]

Two CPU ranks run the same layer, once with the strategy `quota` and once without balancing. What a
GPU would do is counted from what is dispatched: an operation on tensors is a launch, but views and
empty memory are none. Operations of this package, and its transfers, count as often as their CUDA
sources launch (`KERNELS`). Tensors that are on the host on a GPU machine too are known as such
where they come from (`_HostTensors`): whatever else makes the host read a tensor, or a GPU read the
host's memory at once, is a host sync. Megatron waits once in a forward, for the counts that its
dispatcher copies.

`routing` is the part of `forward` from the router's choices to choices of instances. On a machine
with two GPUs, CUDA's own calls are counted instead, by the profiler, of a training step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from megatron_ext.config import BalanceConfig  # noqa: E402
from megatron_ext.trainer.compose import load_config  # noqa: E402
from megatron_ext.trainer.quickstart import build_data  # noqa: E402
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks  # noqa: E402
from tests.mcore import inside  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

WARMUP = 5
"""Steps of a GPU that do not count: memory is allocated in them."""

KERNELS = {
    "count_load": 2,  # mark, count
    "solve_quota": 1,  # of one NVLink domain
    "gather_rows": 1,
    "share_and_seal": 1,
    "reroute": 1,
    "place_back": 1,
    "push": 1,
    "pull_add": 2,  # lists what to pull, pulls
    "wait": 1,  # for a push
    "set_aside": 1,
}
"""What each operation of `torch.ops.megatron_ext`, and each transfer, puts on a GPU's streams."""

_NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh"}
_NO_LAUNCH |= {"_unsafe_view", "_local_scalar_dense", "wait_tensor", "promote_types"}
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
"""Operations that a host waits for: their value, or the size of their result."""

QUOTA = BalanceConfig(tolerance=0.0)
"""Without slack, so that there are replicas."""

_SETTINGS = dict(ep=2, experts=8, topk=2, num_layers=1, add_bias_linear=False)


@dataclass
class Work:
    """What one phase gives a GPU to do, and how often it makes the host wait."""

    launches: int = 0
    allocations: int = 0
    megatrons_syncs: list[str] = field(default_factory=list)
    """Where Megatron makes the host wait: once for the counts that its dispatcher copies there, and
    in permutations that are not fused."""
    our_syncs: list[str] = field(default_factory=list)
    """The same of this package."""
    by_name: Counter[str] = field(default_factory=Counter)
    """Launches by what is launched."""

    def launch(self, name: str, count: int = 1) -> None:
        """Count a launch, or several of one name."""
        self.launches += count
        self.by_name[name] += count


class _HostTensors:
    """Tensors whose values would be on the host beside a GPU: copied there, or made from such."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}  # As long as one is known, its address is its own.

    def add(self, tensor: Tensor) -> Tensor:
        self._kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._kept


class Counting(TorchDispatchMode):
    """Counts into the phases under way what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.host = _HostTensors()
        self.under_way: list[Work] = []
        self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        outputs = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        # A number may come from anywhere.
        sources = [one for one in inputs if one.dim() > 0] or inputs
        if sources and all(one in self.host for one in sources):
            for one in outputs:
                self.host.add(one)
        else:
            self._count(func, inputs, outputs)
        return result

    def _count(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        name = func._schema.name.split("::")[1]
        if name in _READS:
            self.sync()
        returned = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if self._paused or is_view or name.startswith("_record_function"):
            return
        known = {one.untyped_storage()._cdata for one in inputs}
        new = sum(one.untyped_storage()._cdata not in known for one in outputs)
        for work in self.under_way:
            work.allocations += new
            if name not in _NO_LAUNCH:
                work.launch(name, KERNELS.get(name, 1) if func.namespace == "megatron_ext" else 1)

    def launch(self, name: str) -> None:
        """Count a transfer."""
        for work in self.under_way:
            work.launch(name, KERNELS[name])

    def sync(self) -> None:
        """Count a wait of the host, at the line of ours or of Megatron's that asked for it."""
        if self._paused or not self.under_way:
            return
        frames = [one for one in traceback.extract_stack() if "/megatron" in one.filename]
        place = Path(frames[-1].filename)
        for work in self.under_way:
            syncs = work.our_syncs if "megatron_ext" in place.parts else work.megatrons_syncs
            syncs.append(f"{place.parent.name}/{place.name}:{frames[-1].lineno}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


class _CountedTransport:
    """A transport between CPU ranks that counts as the one between GPUs."""

    def __init__(self, transport: Any, counting: Counting) -> None:
        self._transport = transport
        self._counting = counting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def rows(self) -> _CountedTransport | None:
        return None if self._transport.rows is None else self

    def gather(self, *args: Any) -> Tensor:
        self._counting.launch("gather_rows")
        with self._counting.paused():
            return self._transport.gather(*args)

    def push(self, *args: Any) -> Any:
        return self._start("push", *args)

    def pull_add(self, *args: Any) -> Any:
        return self._start("pull_add", *args)

    def _start(self, name: str, *args: Any) -> Any:
        self._counting.launch(name)
        with self._counting.paused():
            pending = getattr(self._transport, name)(*args)
        return mock.Mock(wait=partial(self._wait, name, pending))

    def _wait(self, name: str, pending: Any) -> None:
        if name == "push":  # A pull ends when its own launch does.
            self._counting.launch("wait")
        with self._counting.paused():
            pending.wait()


@contextmanager
def as_on_a_gpu(counting: Counting) -> Iterator[None]:
    """Let copies to the host be copies, and notice what would make a host wait for its GPU."""
    from megatron.core.transformer.moe import token_dispatcher as dispatchers

    from megatron_ext.balance import plan
    from megatron_ext.transport import HostCopy

    host = counting.host
    dispatcher = dispatchers.MoEAlltoAllTokenDispatcher
    wait_for_copy = HostCopy.wait
    wait_at = dispatcher._maybe_dtoh_and_synchronize

    def to_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        with counting.paused():
            copy = host.add(tensor.clone())
            return copy.numpy() if as_numpy else copy

    def at_point(self: Any, point: str, *args: Any) -> Any:
        if point == self.cuda_sync_point:
            for work in counting.under_way:
                work.megatrons_syncs.append("moe/token_dispatcher.py: counts")
        return wait_at(self, point, *args)

    def waited(self: Any) -> Tensor:
        return to_host(wait_for_copy(self))

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor not in host:
                counting.sync()
            with counting.paused():
                return method(tensor, *args, **kwargs)

        return read

    def copied(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        if tensor not in host:
            counting.sync()
        return to_host(tensor)

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        to_device = any(isinstance(one, (torch.device, str)) for one in (*args, *kwargs.values()))
        if tensor not in host or not to_device:
            return move(tensor, *args, **kwargs)
        if not kwargs.get("non_blocking"):
            counting.sync()
        for work in counting.under_way:
            work.launch("copy to the device")
        with counting.paused():
            return move(tensor, *args, **kwargs).clone()

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None:
            return host.add(make(data, *args, **kwargs))
        counting.sync()
        return make(data, *args, device=device, **kwargs)

    move, make = Tensor.to, torch.tensor
    with ExitStack() as stack:
        for owner, name, replacement in (
            (dispatchers, "maybe_move_tensor_to_cpu", to_host),
            (dispatcher, "_maybe_dtoh_and_synchronize", at_point),
            (HostCopy, "wait", waited),
            (plan, "check_counts", lambda load: None),  # Not of a load on a GPU.
            (Tensor, "tolist", reading(Tensor.tolist)),
            (Tensor, "numpy", reading(Tensor.numpy)),
            (Tensor, "cpu", copied),
            (Tensor, "to", moved),
            (torch, "tensor", made),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(counting)
        yield


def _spec(spec: Any, balance: BalanceConfig | None) -> Any:
    from megatron_ext.mcore.grouped_experts import grouped_mm_spec
    from megatron_ext.mcore.spec import balance_spec

    spec = grouped_mm_spec(spec)
    return balance_spec(spec, balance) if balance is not None else spec


def count_layer(rank: int, balance: BalanceConfig | None, **settings: Any) -> dict[str, Any]:
    """The work of one microbatch in one layer, by phase; one forward and backward come before."""
    from tests.gpt import build_gpt  # first: it enables the CPU platform

    from megatron.core.transformer.moe.moe_layer import MoELayer  # isort: skip

    gpt = build_gpt(**(_SETTINGS | settings), spec_transform=partial(_spec, balance=balance))
    layer: Any = gpt.chunks[0].module.decoder.layers[0].mlp
    counting = Counting()
    phases = {name: Work() for name in ("routing", "forward", "backward")}

    def forward(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * seed + rank)
        # What tokens have in common makes some experts hot.
        hidden = 1 + torch.randn(16, 2, gpt.config.hidden_size, generator=generator)
        hidden.requires_grad_()
        # As the transformer layer around it does.
        output, _ = layer(layer.join_reduction(hidden) if balance is not None else hidden)
        return output

    forward(0).sum().backward()
    layer.observers = []
    for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
        if hasattr(layer.token_dispatcher, name):  # of the all-to-all dispatcher
            counting.host.add(getattr(layer.token_dispatcher, name))
    if balance is not None:
        buffers = inside.slot_buffers(layer)
        buffers.transport = _CountedTransport(buffers.transport, counting)
    ours, megatrons = layer.preprocess, MoELayer.preprocess

    def preprocess(*args: Any) -> Any:
        counting.under_way.append(phases["routing"])
        return ours(*args)

    def megatrons_preprocess(*args: Any) -> Any:
        counting.under_way.remove(phases["routing"])
        return megatrons(*args)

    if balance is not None:
        layer.preprocess = preprocess
    replaced = MoELayer.preprocess if balance is None else megatrons_preprocess
    with mock.patch.object(MoELayer, "preprocess", replaced), as_on_a_gpu(counting):
        counting.under_way.append(phases["forward"])
        loss = forward(1).sum()
        counting.under_way[:] = [phases["backward"]]
        loss.backward()
    return {name: vars(work) for name, work in phases.items()}


def _count_layer(rank: int, balance: BalanceConfig | None, **settings: Any) -> dict[str, Any]:
    from tests.gpt import build_gpt  # noqa: F401  (first: it enables the CPU platform)
    from tests.flex_on_cpu import flex_on_cpu  # isort: skip

    with flex_on_cpu():
        return count_layer(rank, balance, **settings)


def count(balance: BalanceConfig | None = QUOTA, **settings: Any) -> dict[str, Any]:
    """The work of the rank of two that has more of it, by phase: see `Work`.

    Args:
        balance: None for Megatron's own layer.
        settings: As for `tests.gpt.build_gpt`.
    """
    ranks = run_ranks(partial(_count_layer, **settings), 2, balance)
    most: dict[str, Any] = max(ranks, key=lambda phases: phases["forward"]["launches"])
    return most


def work_of(calls: Mapping[str, int]) -> dict[str, int]:
    """What a profile of CUDA's functions counts as what: launches, allocations, host syncs.

    >>> work_of({"cudaLaunchKernel": 7, "cudaMemcpyAsync": 2, "cudaStreamSynchronize": 1})
    {'launches': 9, 'allocations': 0, 'syncs': 1}
    """

    def total(*names: str) -> int:
        return sum(count for call, count in calls.items() if call.startswith(names))

    return {
        "launches": total("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset"),
        "allocations": total("cudaMalloc", "cuMemCreate"),
        "syncs": total("cudaStreamSync", "cudaEventSync", "cudaDeviceSync"),
    }


def _profile(runs: list[Any], file: Path) -> None:
    """Profile a step of each run on this rank's GPU; rank 0 writes what it counted."""
    with join_ranks(runs[0].group_timeout):
        from megatron_ext.trainer.loop import Training

        counted = []
        for config in runs:
            training = Training(config)
            for _ in range(WARMUP):
                training.train_step()
            with torch.profiler.profile() as profiler:
                training.train_step()
            training.close()
            counted.append(work_of({each.key: each.count for each in profiler.key_averages()}))
        if torch.distributed.get_rank() == 0:
            file.write_text(json.dumps(counted))


def count_on_gpus() -> dict[str, dict[str, int]]:
    """The work of a step of the quickstart on rank 0 of two GPUs, with and without balancing."""
    names = {"quota": "quota", "stock": "none"}
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            load_config(
                [f"steps={WARMUP + 1}", f"run_dir={folder}/{name}", f"balance={balance}"],
                config_name="quickstart",
            )
            for name, balance in names.items()
        ]
        build_data(Path(runs[0].data.path))
        file = Path(folder) / "work.json"
        launch_ranks(_profile, runs, file, num_ranks=runs[0].parallel.ep_size)
        return dict(zip(names, json.loads(file.read_text()), strict=True))


def main() -> None:
    """Count, print a table, and write all numbers as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for all numbers")
    file = parser.parse_args().json
    rows: list[dict[str, Any]]
    if torch.cuda.is_available():
        if torch.cuda.device_count() < 2:
            parser.error("a layer is balanced over two GPUs or more, and here is one")
        file = file and file.absolute()
        os.chdir(ROOT)  # where the recipes are
        rows = [{"run": name, **work} for name, work in count_on_gpus().items()]
        for row in rows:
            print(row)
    else:
        layers = {"quota": count(), "stock": count(None)}
        rows = [
            {"layer": layer, "phase": phase, **work}
            for layer, phases in layers.items()
            for phase, work in phases.items()
        ]
        print(f"{'':18}{'launches':>10}{'allocations':>13}{'syncs: Megatron':>17}{'ours':>6}")
        for row in rows:
            print(
                f"{row['layer'] + ', ' + row['phase']:18}{row['launches']:10}"
                f"{row['allocations']:13}{len(row['megatrons_syncs']):17}{len(row['our_syncs']):6}"
            )
    if file is not None:
        file.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
