"""Measures this machine's constants for `simulate`, on CPU ranks that work at the same time.

    python tests/perf/calibrate.py --out HARDWARE.yaml [--json FILE]

There are as many ranks as cores, but two at least, with one thread each, as in a training here. The
rates of experts, dense parts, tokens and optimizer are measured on the parts of the quickstart's
step, never on a whole step, which a simulation is to predict. The parts are the objects of a run's
own model, as Megatron makes them, so each part takes as long as in the run: its unfused attention,
its permutations, its DDP hooks, its optimizer.

Ranks wait for each other between the parts of a step. So a round takes as long as its slowest rank.
The median of the rounds counts: the machine as it is, with everything else that runs on it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from megatron_ext.cpu_platform import enable_cpu_platform  # noqa: E402
from megatron_ext.lab.hardware import Hardware, constants  # noqa: E402
from megatron_ext.mcore.measure import slowest_s  # noqa: E402
from megatron_ext.trainer.compose import load_config  # noqa: E402
from megatron_ext.trainer.config import TrainConfig  # noqa: E402
from megatron_ext.trainer.model.shape import shape_of  # noqa: E402
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks, quiet_megatron  # noqa: E402
from megatron_ext.transport.one_sided import RELAY_THRESHOLD  # noqa: E402
from tests.perf.planner import describe_machine  # noqa: E402

ROUNDS = 100
"""Rounds of each measurement. The first fifth does not count: by then the allocator has what it
needs."""

_SQUARE = 1024
"""Side of the matrices whose product gives the peak."""
_COPIED_BYTES = 32 << 20
"""Bytes moved at a time: more than caches hold."""
_EXPERTS = 8
"""Experts of a layer on a rank."""
_VOCAB_SIZE = 257
"""Token ids: all bytes, and the end of a document."""


def calibration_run(num_ranks: int) -> TrainConfig:
    """Return the run whose parts are measured: the recipe `quickstart` without balancing.

    On more than two ranks the run has more experts.
    """
    config = load_config(
        [
            "balance=none",
            "data.path=",
            f"parallel.ep_size={num_ranks}",
            f"model.num_experts={_EXPERTS * num_ranks}",
        ],
        config_name="quickstart",
    )
    config.data.global_batch_size = config.data.micro_batch_size * num_ranks
    return config


def calibrate(name: str, *, num_ranks: int | None = None, rounds: int = ROUNDS) -> Hardware:
    """Measure this machine.

    Args:
        name: Name of the hardware.
        num_ranks: Ranks that work at the same time; by default one for each core, two at least.
        rounds: Rounds of each measurement.

    Raises:
        RuntimeError: There is a GPU, which is not measured here.
        SystemExit: With status 1 if a rank failed.
    """
    if torch.cuda.is_available():
        raise RuntimeError("CPU ranks are measured, and this machine has a GPU")
    cores = len(os.sched_getaffinity(0))
    num_ranks = max(2, cores) if num_ranks is None else num_ranks
    with tempfile.TemporaryDirectory() as folder:
        launch_ranks(_measure, folder, rounds, num_ranks=num_ranks)
        measured = json.loads((Path(folder) / "measured.json").read_text())
    summary = f"{num_ranks} CPU ranks at a time on {cores} cores, one thread each"
    return Hardware(
        name=name,
        summary=summary,
        sources=_sources(),
        domain_ranks=num_ranks,
        server_ranks=num_ranks,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks,
        outer_bandwidth=measured["token_bandwidth"],
        overlap=0.0,
        relay_threshold=RELAY_THRESHOLD,
        solve_us=measured.pop("solve_us"),
        **measured,
    )


def _sources() -> dict[str, str]:
    """Where each constant comes from."""
    rate = "measured by tests/perf/calibrate.py: "
    part = f"{rate}the quickstart's "
    return {
        "domain_ranks": "ranks of this machine that were measured",
        "server_ranks": "ranks of this machine that were measured",
        "memory_bytes": "physical memory / ranks",
        "peak_flops_per_s": f"{rate}float32 product of {_SQUARE} x {_SQUARE}, or the next",
        "expert_efficiency": f"{part}experts, each round with other loads, / peak",
        "dense_efficiency": f"{part}layer without experts, / peak",
        "memory_bandwidth": f"{rate}sums of new tensors",
        "optimizer_bandwidth": f"{part}Adam, gradients clipped and cleared",
        "token_bandwidth": f"{part}dispatch and combine over gloo, evenly routed",
        "weight_bandwidth": f"{rate}copies into shared memory",
        "outer_bandwidth": "that of tokens: nothing outside was measured",
        "overlap": "ranks of a CPU copy themselves: nothing hides",
        "relay_threshold": "this package's",
        "solve_us": f"{rate}Zipf 0.8, 64 ranks, 256 experts, 2 slots, on one rank",
    }


def _measure(folder: str, rounds: int) -> None:
    """Measure on one rank of a launch; rank 0 writes what was measured."""
    with join_ranks(TrainConfig().group_timeout):
        rates = _part_rates(calibration_run(dist.get_world_size()), rounds)
        peak = max(_matrix_rate(rounds), rates["expert"], rates["dense"])
        measured = {
            "peak_flops_per_s": peak,
            "expert_efficiency": rates["expert"] / peak,
            "dense_efficiency": rates["dense"] / peak,
            "memory_bandwidth": _memory_bandwidth(rounds),
            "optimizer_bandwidth": rates["optimizer"],
            "token_bandwidth": rates["tokens"],
            "weight_bandwidth": _weight_bandwidth(Path(folder), rounds),
        }
        if dist.get_rank() == 0:
            rounded = {name: float(f"{value:.4g}") for name, value in measured.items()}
            report = rounded | {"solve_us": _solve_us(rounds)}
            (Path(folder) / "measured.json").write_text(json.dumps(report))
        dist.barrier()


def _median_s(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of a round."""
    return _median([slowest_s(work) for _ in range(rounds)])


def _median(values: list[float]) -> float:
    """Median of the rounds that count."""
    return statistics.median(values[len(values) // 5 :])


def _matrix_rate(rounds: int) -> float:
    left, right = torch.randn(2, _SQUARE, _SQUARE)
    return 2 * _SQUARE**3 / _median_s(lambda: left @ right, rounds)


def _part_rates(config: TrainConfig, rounds: int) -> dict[str, float]:
    """FLOPs or bytes per second of a step's parts, as the shape of the run counts them.

    A round is all parts in the order of a step, so that each part finds caches and allocator as in
    a step.
    """
    shape, ranks = shape_of(config, ""), config.parallel.ep_size
    num_tokens = config.data.sequence_length * config.data.micro_batch_size
    blocks = StepBlocks(config, _VOCAB_SIZE)
    times: dict[str, list[float]] = {"dense": [], "tokens": [], "expert": [], "optimizer": []}
    for load in _uneven_loads(num_tokens * ranks, ranks, rounds):
        times["dense"].append(slowest_s(blocks.run_dense))
        times["tokens"].append(slowest_s(blocks.run_tokens))
        expert_s = slowest_s(partial(blocks.run_experts, load[dist.get_rank()]))
        times["expert"].append(expert_s / int(load.sum(-1).max()))
        times["optimizer"].append(slowest_s(blocks.run_optimizer))
    # Forward is a third of the FLOPs, and half of the transfers: there, back, and both again.
    dense_flops = 3 * shape.dense_flops(shape.moe_dense_params) * num_tokens
    sent_bytes = 4 * shape.token_bytes * num_tokens * (ranks - 1) / ranks
    return {
        "dense": dense_flops / _median(times["dense"]),
        "tokens": sent_bytes / _median(times["tokens"]),
        "expert": 3 * shape.expert_flops / _median(times["expert"]),
        "optimizer": shape.optimizer_bytes * blocks.optimizer_params / _median(times["optimizer"]),
    }


class StepBlocks:
    """One rank's model, and one of its layers run in parts. Made on all ranks of a launch.

    Letters: N tokens of a rank, H hidden, E logical experts, M mains per rank.

    Args:
        config: The run, without balancing and with one choice a token; its data are not read.
        vocab_size: Size of the tokenizer's vocabulary.
    """

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        # With Megatron, which a process imports after the CPU platform.
        from megatron.core.transformer.transformer_layer import TransformerLayer

        from megatron_ext.trainer.model import build

        build.start_parallelism(config)
        self._chunks = build.build_model(config, vocab_size)
        self._optimizer = build.build_optimizer(config, self._chunks)
        model = self._chunks[0].module
        self._layer: Any = next(m for m in model.modules() if isinstance(m, TransformerLayer))
        self._moe: Any = self._layer.mlp
        self._layer.mlp = _RouterAlone(self._moe)
        data, hidden = config.data, config.model.hidden_size
        self._rotary = model.rotary_pos_emb(data.sequence_length)
        self._hidden = torch.randn(
            data.sequence_length, data.micro_batch_size, hidden, requires_grad=True
        )
        num_tokens, experts = data.sequence_length * data.micro_batch_size, config.model.num_experts
        self._routing = nn.functional.one_hot(torch.arange(num_tokens) % experts, experts).bool()
        self._probs = torch.rand(num_tokens, experts).mul(self._routing).requires_grad_()

    @property
    def optimizer_params(self) -> int:
        """Weights whose optimizer state this rank has."""
        groups = self._optimizer.param_groups
        return sum(parameter.numel() for group in groups for parameter in group["params"])

    def run_dense(self) -> None:
        """Run a layer without its experts forward and backward: attention, norms, sums, router."""
        output, _ = self._layer(self._hidden, attention_mask=None, rotary_pos_emb=self._rotary)
        output.backward(output.detach())

    def run_tokens(self) -> None:
        """Dispatch and combine evenly routed tokens, with their probabilities, and back."""
        dispatcher = self._moe.token_dispatcher
        tokens, probs = dispatcher.dispatch_preprocess(self._hidden, self._routing, self._probs)
        tokens, probs = dispatcher.token_dispatch(tokens, probs)
        tokens, _, probs = dispatcher.dispatch_postprocess(tokens, probs)
        output = dispatcher.token_combine(dispatcher.combine_preprocess(tokens))
        output = dispatcher.combine_postprocess(output)
        torch.autograd.backward([output, probs], [output.detach(), probs.detach()])

    def run_experts(self, tokens_per_expert: Tensor) -> None:
        """Run this rank's experts forward and backward.

        Args:
            tokens_per_expert: Tokens of each main, int64 [M].
        """
        num_tokens = int(tokens_per_expert.sum())
        tokens = torch.ones(num_tokens, self._hidden.shape[-1], requires_grad=True)
        probs = torch.ones(num_tokens, requires_grad=True)
        output, _ = self._moe.experts(tokens, tokens_per_expert, probs)
        output.backward(output.detach())

    def run_optimizer(self) -> None:
        """Clip the gradients, make an optimizer step, and clear the gradients."""
        self._optimizer.step()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()


class _RouterAlone(nn.Module):
    """Replaces a MoE layer by its router, whose probabilities scale the tokens."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self._moe = moe

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        probs, _ = self._moe.route(hidden)
        return hidden * probs.sum(-1).view(*hidden.shape[:-1], 1), None


def _uneven_loads(assignments: int, ranks: int, rounds: int) -> Tensor:
    """Random loads of all experts, with a new popularity in every round: int64 [rounds, R, M].

    No sizes come twice, as in a training. The rounds with the busiest ranks come first, so that the
    allocator has seen the largest blocks when the warm-up ends.
    """
    generator = np.random.default_rng(0)
    experts = ranks * _EXPERTS
    popularity = generator.dirichlet(np.ones(experts), size=rounds)
    loads = generator.multinomial(assignments, popularity).reshape(rounds, ranks, _EXPERTS)
    busiest = loads.sum(-1).max(-1)
    heaviest = np.argsort(-busiest, kind="stable")[: rounds // 5]
    order = [*heaviest, *np.setdiff1d(np.arange(rounds), heaviest)]
    return torch.from_numpy(loads[order].astype(np.int64))


def _memory_bandwidth(rounds: int) -> float:
    """Bytes per second of adding two arrays: two reads and a write."""
    one = torch.ones(_COPIED_BYTES // 4)
    return 3 * _COPIED_BYTES / _median_s(lambda: one + one, rounds)


def _weight_bandwidth(folder: Path, rounds: int) -> float:
    """Bytes per second that a rank copies into memory that a neighbour reads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = _COPIED_BYTES // 4
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    names = [shared / f"{folder.name}.{each}" for each in range(ranks)]
    mine = torch.from_file(str(names[rank]), shared=True, size=size).fill_(0)
    dist.barrier()
    try:
        theirs = torch.from_file(str(names[(rank + 1) % ranks]), shared=True, size=size)
        weights = torch.ones(size)
        elapsed_s = _median_s(lambda: theirs.copy_(weights), rounds)
    finally:
        names[rank].unlink()
    assert mine[-1] == 1, "what a neighbour copies here arrives here"
    return _COPIED_BYTES / elapsed_s


def _solve_us(rounds: int) -> dict[str, float]:
    """Microseconds of a plan for 64 ranks and 256 experts, for strategies that need only a load."""
    from megatron_ext.balance.solve import solve
    from megatron_ext.balance.strategies import STRATEGIES
    from megatron_ext.balance.strategies.strategy import Solves

    generator = np.random.default_rng(0)
    popularity = np.arange(1, 257) ** -0.8
    generator.shuffle(popularity)
    load = torch.from_numpy(
        generator.multinomial(8192 * 8, popularity / popularity.sum(), size=64).astype(np.int64)
    )
    times_us = {}
    for name, strategy in STRATEGIES.items():
        if not isinstance(strategy.kind, Solves) or strategy.package:
            continue
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            solve(load, ep_size=64, strategy=name)
            times.append(time.perf_counter() - started)
        times_us[name] = float(f"{1e6 * _median(times):.4g}")
    return times_us


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Write a hardware file, which `read_hardware` reads."""
    content = {
        "summary": hardware.summary,
        "constants": {
            name: {"value": _plain(getattr(hardware, name)), "source": hardware.sources[name]}
            for name in constants()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(content), path)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def main(words: list[str] | None = None) -> None:
    """Measure, print the constants, and write them as asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="HARDWARE.yaml")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the same as JSON")
    options = parser.parse_args(words)
    quiet_megatron()
    enable_cpu_platform()
    hardware = calibrate(options.out.stem, rounds=options.rounds)
    write_hardware(options.out, hardware)
    print(describe_machine())
    print(options.out.read_text())
    if options.json:
        report = {"machine": describe_machine()} | dataclasses.asdict(hardware)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
