"""Megatron's own traces of routing: what they say, torn ends left out, strangers refused."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.files.routing_trace import is_routing_trace, read_routing_trace
from tests.cli.command import run
from tests.ranks import run_ranks

EXPERTS = 4


def line(at_rank: int, at_step: int, layer: int, chosen: Any, **other: Any) -> str:
    record = {
        **{"step": at_step, "stage": "pre_dispatch", "block": "decoder", "layer": layer},
        **{"rank": at_rank, "num_tokens": len(chosen), "topk": 2},
        **other,
        "top_indices": chosen,
    }
    return json.dumps(record) + "\n"


def write(folder: Path, *lines_of_ranks: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, lines in enumerate(lines_of_ranks):
        (folder / f"router_trace_rank{rank}.jsonl").write_text("".join(lines))
    return folder


def keys(loads) -> list[tuple[int, ...]]:
    return list(zip(*(values.tolist() for values in loads.trace.values()), strict=True))


def test_ranks_are_put_together(tmp_path: Path) -> None:
    """Two microbatches of two layers and one of MTP; rank 1 had no token in one of them."""
    rank_0 = [
        line(0, 5, 0, [[0, 1], [0, 2]]),
        line(0, 5, 1, [[3, 1]]),
        line(0, 5, 0, [[2, 3]], block="mtp", mtp_idx=0),
        line(0, 5, 0, [[0, 3]]),
        line(0, 5, 1, [[1, 2]]),
    ]
    rank_1 = [
        line(1, 5, 0, [[0, 3]]),
        line(1, 5, 1, []),
        line(1, 5, 0, [[0, 1]], block="mtp", mtp_idx=0),
        line(1, 5, 0, [[2, 3]]),
        line(1, 5, 1, [[0, 1]]),
        line(1, 5, 9, [[0, 1]], stage="of another kind"),
    ]
    loads = read_routing_trace(write(tmp_path / "trace", rank_0, rank_1), ep_size=2)
    assert keys(loads) == [(5, 0, 1), (5, 0, 2), (5, 0, 3), (5, 1, 1), (5, 1, 2)]
    assert loads.load.tolist() == [
        [[2, 1, 1, 0], [1, 0, 0, 1]],
        [[0, 1, 0, 1], [0, 0, 0, 0]],
        [[0, 0, 1, 1], [1, 1, 0, 0]],
        [[1, 0, 0, 1], [0, 0, 1, 1]],
        [[0, 1, 1, 0], [1, 1, 0, 0]],
    ]


def test_groups_are_microbatches_and_stages_are_layers(tmp_path: Path) -> None:
    """Four ranks: as two EP groups of a stage, as two stages, and as one EP group."""
    chosen = [[0, 1], [0, 2], [0, 3], [1, 2]]
    folder = write(tmp_path / "trace", *([line(r, 1, 0, [chosen[r]])] for r in range(4)))
    groups = read_routing_trace(folder, ep_size=2)
    assert keys(groups) == [(1, 0, 1), (1, 1, 1)]
    stages = read_routing_trace(folder, ep_size=2, pp_size=2)
    assert keys(stages) == [(1, 0, 1), (1, 0, 2)]
    assert torch.equal(groups.load, stages.load)
    one = read_routing_trace(folder, ep_size=4, num_experts=8)
    assert keys(one) == [(1, 0, 1)]
    assert torch.equal(one.load[0, :, :4], groups.load.flatten(0, 1))
    assert not one.load[0, :, 4:].any()


def test_what_a_killed_run_tore_is_left_out(tmp_path: Path) -> None:
    """Rank 0 was a step ahead; rank 1 died in a line of step 2."""
    whole = [[line(rank, step, 0, [[0, 3]]) for step in (1, 2, 3)] for rank in range(2)]
    torn = [whole[1][0], whole[1][1][:-9]]
    loads = read_routing_trace(write(tmp_path / "trace", whole[0], torn), ep_size=2)
    assert keys(loads) == [(1, 0, 1)]
    # The lines of a step are written at once: some of them may be there.
    rank_0 = [*whole[0][:2], line(0, 2, 1, [[0, 3]])]
    loads = read_routing_trace(write(tmp_path / "trace", rank_0, whole[1][:2]), ep_size=2)
    assert keys(loads) == [(1, 0, 1)]
    # But not in the middle of a run.
    rank_0.append(line(0, 3, 0, [[0, 3]]))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 .*not as many .*step 2.*--ep-size"):
        read_routing_trace(write(tmp_path / "trace", rank_0, whole[1]), ep_size=2)


GOOD = line(0, 1, 0, [[0, 3]])


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("[" * 100_000 + "\n", "line 1 is not of Megatron's routing trace: "),
        ("\x00\x00 no JSON\n", "line 1 is not of Megatron's routing trace: "),
        ("7\n", "it has no 'stage'"),
        (line(0, 1, 0, [[0, 3]], block="<script>"), "block ('<script>') must be decoder or mtp"),
        (line(0, 1, 0, [[0, 3]], rank=1), "rank (1) must be that of the file's name"),
        (line(0, 1, 0, [[0, 3]], step=-1), "step (-1) must be a whole number >= 0"),
        (line(0, 1, 0, [[0, 3]], num_tokens=2), "top_indices must be 2 x 2 (num_tokens x topk)"),
        (line(0, 1, 0, [[0, 3], [1]], num_tokens=2), "is not of Megatron's routing trace: "),
        (line(0, 1, 0, [[0, 0.5]]), "top_indices must be 1 x 2 (num_tokens x topk) experts"),
        (line(0, 1, 0, [[0, 10**9]]), "top_indices must be >= 0 and < 65536"),
        (line(0, 1, 0, [[0, 10**30]]), "top_indices must be 1 x 2"),
        (line(0, 1, 0, [], num_tokens=2**40), "top_indices must be 1099511627776 x 2"),
        (line(0, 1, 0, [[0, 3]], stage="no"), "has no line of stage 'pre_dispatch'"),
    ],
)
def test_strangers_are_refused_in_one_line(tmp_path: Path, first: str, said: str) -> None:
    folder = write(tmp_path / "trace", [first])
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read_routing_trace(folder, ep_size=1)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_commands_read_it(tmp_path: Path, capsys) -> None:
    """Where a file of loads is taken; what does not fit is said with the option."""
    folder = write(tmp_path / "trace", [GOOD] * 2, [GOOD.replace('"rank": 0', '"rank": 1')] * 2)
    assert is_routing_trace(folder)
    words = ["replay", folder, "--strategies", "quota", "--json"]
    status, stdout, stderr = run(capsys, *words, "--ep-size", 2)
    assert status == 0
    report = json.loads(stdout)
    assert (report["loads"], report["ranks"], report["experts"]) == (2, 2, EXPERTS)
    assert stderr.splitlines()[0].startswith("warning: 4 experts, by the highest that was chosen")
    for further, said in (
        ([], "is of Megatron's routing: --ep-size must say the EP group"),
        (["--ep-size", 3], "is of 2 ranks: that must be a multiple of --ep-size x --pp-size"),
        (["--ep-size", 2, "--pp-size", 2], "must be a multiple of --ep-size x --pp-size (2 x 2)"),
        (["--ep-size", 2, "--experts", 2], "expert 3 was chosen (from 0), so the experts (2) must"),
        (["--ep-size", 2, "--experts", 5], "experts (5) must be a multiple of --ep-size (2)"),
    ):
        status, stdout, stderr = run(capsys, *words, *further)
        assert (status, stdout, stderr.count("\n")) == (2, "", 1)
        assert said in stderr
    for command in ("craft", "eplb"):
        out = tmp_path / f"{command}.npz"
        status, _, _ = run(capsys, "place", command, folder, "--ep-size", 2, "--out", out)
        assert (status, out.exists()) == (0, True)
    (folder / "router_trace_rank0.jsonl").unlink()
    status, _, stderr = run(capsys, *words, "--ep-size", 1)
    assert (status, "has no router_trace_rank0.jsonl" in stderr) == (2, True)


def _train(rank: int, folder: str) -> Any:
    """Three microbatches a step, as Megatron's own tracer and as the recorder see them."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_trace import RouterTracer

    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.spec import balance_spec
    from megatron_ext.telemetry.recorder import LoadRecorder
    from megatron_ext.trainer.model.build import moe_layers
    from tests.gpt import build_gpt

    gpt = build_gpt(
        ep=2,
        experts=EXPERTS,
        mtp_num_layers=1,
        spec_transform=lambda spec: balance_spec(spec, BalanceConfig(slots=1)),
    )
    recorder = LoadRecorder(
        moe_layers(gpt.chunks), parallel_state.get_expert_model_parallel_group()
    )
    tracer = RouterTracer(folder, max_steps=9, rank=rank, training_mode=True)
    tracer.register_hooks(gpt.chunks)
    counted = {}
    for step in (1, 2):
        gpt.train_step(step, num_microbatches=3)
        tracer.advance_step(step)
        for one in recorder.take_step().computed:
            microbatch = sum(key[::2] == (step, one.layer_number) for key in counted)
            counted[step, microbatch, one.layer_number] = one.load.tolist()
    tracer.flush()
    tracer.remove_hooks()
    return counted


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core.transformer.moe.router_trace") is None,
    reason="this Megatron-Core writes no traces of routing; 0.19 does",
)
def test_megatrons_trace_holds_what_the_recorder_counted(tmp_path: Path) -> None:
    counted, _ = run_ranks(_train, 2, str(tmp_path / "trace"))
    loads = read_routing_trace(tmp_path / "trace", ep_size=2, num_experts=EXPERTS)
    traced = dict(zip(keys(loads), loads.load.tolist(), strict=True))
    assert traced == counted
    assert len(traced) == 2 * 3 * 3
