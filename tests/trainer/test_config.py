"""Wrong settings end with status 2 and one line a problem, before any process is started.

Every recipe of the repository composes and passes the same checks.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from checkpoints_tools.folder import hash_file, write_checksums
from megatron_ext import BalanceConfig
from megatron_ext.config import ConfigError, LlepSettings, Section
from megatron_ext.files.recipes import shipped_recipes
from megatron_ext.trainer.command import main
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.config import DataConfig, LoggingConfig, TrainConfig
from megatron_ext.trainer.train import check, train
from megatron_ext.trainer.validate import validate
from tests.trainer.dataset import overrides

RECIPES = shipped_recipes()


@pytest.fixture(autouse=True)
def outside_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("megatron_ext.trainer.train.launch_ranks", _must_not_start)


def _must_not_start(*args: object, **kwargs: object) -> None:
    raise AssertionError("ranks were started")


COSTS = ("balance.link_bandwidth=1e9", "balance.assignment_time=1e-6")

WRONG = {
    "experts not divisible": (
        ["model.num_experts=10", "parallel.ep_size=4", "data.global_batch_size=16"],
        ["model.num_experts (10) must be a multiple of parallel.ep_size (4)"],
    ),
    "negative slots": (["balance.slots=-1"], ["balance.slots (-1) must be >= 0"]),
    "a reduction on all of a GPU": (
        ["balance.grad_reduce_share=0.6", "balance.push_blocks=0"],
        [
            "balance.grad_reduce_share (0.6) must be 'auto' or a finite number > 0 and <= 0.5",
            "balance.push_blocks (0) must be 'auto' or a whole number >= 1",
        ],
    ),
    "waits that no clock counts": (
        ["timeout_s=1e10", "balance.timeout_s=1e10"],
        [
            "timeout_s (10000000000.0) must be from 1 to 4000000000.0",
            "balance.timeout_s (10000000000.0) must be 'auto' or a finite number > 0 and <=",
        ],
    ),
    "no interval": (["balance.history.interval=0"], ["balance.history.interval (0) must be >= 1"]),
    "capacity below the mean": (
        ["balance.llep.alpha=0.9"],
        ["balance.llep.alpha (0.9) must be from 1"],
    ),
    "time with a link that sends nothing": (
        ["balance.objective=time", "balance.link_bandwidth=0"],
        [
            "balance.link_bandwidth (0) must be > 0 with balance.objective=time, or "
            "'auto', which measures it"
        ],
    ),
    "an objective for a strategy": (
        ["balance.strategy=time"],
        ["'time' is no strategy but an objective: balance.objective=time"],
    ),
    "a cost that is no number": (
        ["balance.objective=time", "balance.assignment_time=short"],
        ["balance.assignment_time ('short') must be 'auto' or a finite number"],
    ),
    "time from history": (
        ["balance.strategy=eplb", "balance.objective=time", *COSTS],
        ["strategy 'eplb' fills replicas placed before, without a tolerance"],
    ),
    "negative steps of a trace": (
        ["logging.trace_steps=-1"],
        ["logging.trace_steps (-1) must be >= 0"],
    ),
    "strategy and transport": (
        ["balance.strategy=magic", "balance.transport=nvlink"],
        ["balance.transport ('nvlink') must be one of auto", "'magic'"],
    ),
    "transport": (
        ["balance.transport=nvlink"],
        ["balance.transport ('nvlink') must be one of auto, collective, shared_memory"],
    ),
    "craft without a placement": (
        ["balance.strategy=craft"],
        ["balance.placement must name a file with balance.strategy=craft"],
    ),
    "placement that is not there": (
        ["balance.placement=absent.npz"],
        ["balance.placement (absent.npz): absent.npz does not exist"],
    ),
    "affinity that is not there": (
        ["data.affinity=absent.npz"],
        ["data.affinity (absent.npz): absent.npz does not exist"],
    ),
    "routes with tensor parallelism": (
        ["logging.trace_steps=1", "logging.route_samples=1", "parallel.tp_size=2"],
        ["logging.route_samples (1) must be 0 with parallel.tp_size (2) > 1"],
    ),
    "routes with two microbatches at a time": (
        [
            *("logging.trace_steps=1", "logging.route_samples=1", "model.precision=bf16"),
            "+megatron.overlap_moe_expert_parallel_comm=true",
        ],
        ["logging.route_samples (1) must be 0 with megatron.overlap_moe_expert_parallel_comm"],
    ),
    "affinity with tensor parallelism": (
        ["data.affinity=absent.npz", "parallel.tp_size=2"],
        ["data.affinity (absent.npz): must be empty with tensor_model_parallel_size (2) > 1"],
    ),
    "re-batching without tensor parallelism": (
        ["data.rebatch=absent.npz"],
        [
            "data.rebatch (absent.npz): token re-batching needs a tensor-parallel group that is "
            "the EP group, with sequence parallelism: tensor_model_parallel_size (1) must be "
            "expert_model_parallel_size (2) and > 1",
        ],
    ),
    "re-batching by what is not there": (
        ["data.rebatch=absent.npz", "parallel.tp_size=2"],
        ["data.rebatch (absent.npz): absent.npz does not exist"],
    ),
    "heads and tokens of a sequence on too many ranks": (
        ["parallel.tp_size=4", "parallel.ep_size=4", "data.sequence_length=18"],
        [
            "model.num_attention_heads (2) must be a multiple of parallel.tp_size (4)",
            "data.sequence_length (18) must be a multiple of parallel.tp_size (4)",
        ],
    ),
    "graphs": (
        ["+megatron.cuda_graph_impl=local"],
        [
            "megatron.cuda_graph_impl (local) must be none: this program captures no graphs",
            "cuda_graph_impl ('local') must be 'none' or 'transformer_engine'",
        ],
    ),
    "graphs without balancing": (
        ["+megatron.cuda_graph_impl=transformer_engine", "balance.strategy=none"],
        ["megatron.cuda_graph_impl (transformer_engine) must be none: this program captures no"],
    ),
    "sharded experts": (
        ["+megatron.expert_tensor_parallel_size=2", "balance.local_first=true"],
        ["expert_tensor_parallel_size (2) must be 1 with balance.local_first: every token"],
    ),
    "experts that Megatron groups": (
        ["+megatron.moe_grouped_gemm=true"],
        [
            "megatron.moe_grouped_gemm (True) cannot be set there: it is False by the other "
            "sections; here it is model.experts=grouped_mm"
        ],
    ),
    "the same without balancing": (
        ["+megatron.moe_grouped_gemm=true", "balance.strategy=none"],
        ["megatron.moe_grouped_gemm (True) cannot be set there"],
    ),
    "Adam's decays and denominator": (
        ["optimizer.beta1=1.5", "optimizer.beta2=1", "optimizer.eps=0"],
        [
            "optimizer.beta1 (1.5) must be >= 0 and < 1",
            "optimizer.beta2 (1.0) must be >= 0 and < 1",
            "optimizer.eps (0.0) must be > 0",
        ],
    ),
    "more slots than have flags": (
        ["balance.slots=300"],
        ["balance.slots (300) must be <= 256: transport shared_memory has flags for no more"],
    ),
    "near names": (
        ["balance.strategy=quotaa"],
        ["unknown strategy 'quotaa'; known: craft, ", "; did you mean quota?"],
    ),
    "a transport that is nearly one": (
        ["balance.transport=colective"],
        ["; did you mean collective?"],
    ),
    "unknown Megatron key": (
        ["+megatron.moe_router_topkk=1"],
        ["megatron.moe_router_topkk", "has no setting of this name; did you mean"],
    ),
    "a setting of Megatron's without a plus": (
        ["megatron.kv_channels=64"],
        ["megatron.kv_channels: settings of Megatron are added with a plus: +megatron.kv_channels"],
    ),
    "Megatron's name of a setting": (
        ["megatron.moe_aux_loss_coeff=0.1", "megatron.num_layers=2"],
        [
            "megatron.moe_aux_loss_coeff: settings of Megatron are added with a plus; here it is "
            "model.aux_loss"
        ],
    ),
    "a value of no whole number": (["steps="], ["steps ('') must be a whole number >= 1"]),
    "a value that is nothing": (["model.topk=null"], ["model.topk (None) must be a whole number"]),
    "a plus too many": (
        ["+balance.slots=2"],
        ["balance.slots is a setting: write balance.slots=..., without a plus"],
    ),
    "a section that is nearly one": (
        ["balanc.slots=1"],
        ["balanc.slots: there is no section balanc; did you mean balance?"],
    ),
    "a recipe without its option": (
        ["quickstat"],
        ["quickstat: a setting is written name=value; did you mean --config-name quickstart?"],
    ),
    "Megatron key of another section": (
        ["+megatron.num_layers=3"],
        ["megatron.num_layers (3) cannot be set there: it is 2"],
    ),
    "Megatron's own rule": (
        ["balance.strategy=none", "+megatron.moe_pad_expert_input_to_capacity=true"],
        ["Megatron: moe_expert_capacity_factor must be set"],
    ),
    "missing data": (["data.path=/nowhere"], ["data.path (/nowhere)"]),
    "unknown domain": (["++data.weights.poems=1"], ["data.weights names poems"]),
    "unknown key": (
        ["balance.slo=1"],
        ["balance.slo: there is no setting of this name; did you mean slots?"],
    ),
    "wrong type": (["model.topk=two"], ["model.topk ('two') must be a whole number >= 1"]),
    "unknown recipe": (
        ["--config-name", "quickstar"],
        [
            f"--config-name (quickstar): no such recipe: {RECIPES} has deepseek_v3_256_gb200_bf16",
            "quickstart, qwen3_235b_256_gb200_bf16, ",
            "traced; did you mean quickstart?",
        ],
    ),
    "unknown option of a group": (
        ["--config-name", "quickstart", "balance=quotaa"],
        ["balance=quotaa: the group balance has ideal, libra, none, quota; did you mean quota?"],
    ),
    "an option without a recipe": (
        ["balance=none"],
        ["balance=none: a group has options in a recipe only (--config-name)"],
    ),
    "a number for a group": (
        ["--config-name", "quickstart", "balance=3"],
        ["balance=3: the group balance has ideal, libra, none, quota"],
    ),
    "nothing for a group": (
        ["--config-name", "quickstart", "balance="],
        ["balance=: the group balance has ideal, libra, none, quota"],
    ),
    "what cannot be taken away": (
        ["--config-name", "quickstart", "~steps", "~model.topk", "~balance"],
        [
            "~steps: steps cannot be taken away; give it another value, steps=...",
            "~model.topk: model.topk cannot be taken away",
            "~balance: balance cannot be taken away; the group balance has ideal, libra, none",
        ],
    ),
    "several values": (
        ["balance.slots=1,2"],
        ["balance.slots=1,2: a run has one value of each setting; -m makes a run for each value"],
    ),
    "a domain without a plus": (
        ["data.weights={letters:1}"],
        ["a domain is named with a plus, as in +data.weights.code=1"],
    ),
    "a setting that is nearly one": (
        ["balance.slot=1"],
        ["balance.slot: there is no setting of this name; did you mean slots?"],
    ),
    "a setting that is added": (
        ["+optimizer.weight_decy=1", "+foo=2", "+balance.llep.alfa=2"],
        [
            "foo: there is no setting of this name",
            "optimizer.weight_decy: there is no setting of this name; did you mean weight_decay?",
            "balance.llep.alfa: there is no setting of this name; did you mean alpha?",
        ],
    ),
    "a setting that is near none": (
        ["checkpoint.interval=1"],
        ["checkpoint.interval: there is no setting of this name; the settings here are every, "],
    ),
    "a word that does not parse": (
        ["steps=${a"],
        ["steps=${a: no value can be read here (mismatched input"],
    ),
    "a path with letters that need quotes": (
        ['run_dir=runs/ü "b"'],
        ["""; text is written 'run_dir="runs/ü \\"b\\""'"""],
    ),
    "a seed that no generator takes": (
        ["seed=99999999999999999999"],
        ["seed (99999999999999999999) must be from 0 to 4294967295"],
    ),
    "no run directory": (["run_dir="], ["run_dir ('') must name a folder"]),
    "a run directory on a disk that is not there": (
        ["run_dir=/absent_disk/runs/a"],
        ["/metrics.jsonl cannot be written: there is no /absent_disk; make it first"],
    ),
    "Megatron's settings of another type": (
        [
            "+megatron.hidden_dropout=yes",
            "+megatron.init_method=normal",
            "+megatron.moe_router_score_function=foo",
            "+megatron.kv_channels=8.5",
        ],
        [
            "megatron.hidden_dropout ('yes') must be of type float",
            "megatron.init_method ('normal') must be of type Optional[Callable]",
            "megatron.moe_router_score_function ('foo') must be of type Literal['softmax', 's",
            "megatron.kv_channels (8.5) must be of type Optional[int]",
        ],
    ),
    "unknown checkpoint": (["checkpoint.load=/nowhere"], ["checkpoint.load (/nowhere)"]),
    "batch": (
        ["data.global_batch_size=6"],
        ["data.global_batch_size (6) must be a multiple of data.micro_batch_size"],
    ),
    "everything at once, the balancer included": (
        ["balance.slots=-1", "balance.tolerance=-2", "balance.objective=foo", "model.topk=0"],
        [
            "balance.slots (-1) must be >= 0",
            "balance.tolerance (-2.0) must be from 0 to 1000000",
            "balance.objective ('foo') must be one of tolerance, time",
            "model.topk (0) must be >= 1",
        ],
    ),
    "a setting of balance by itself": (
        ["strategy=none"],
        ["strategy: there is no setting of this name; it is balance.strategy"],
    ),
    "everything at once": (
        ["steps=0", "model.precision=fp7", "balance.strategy=magic", "data.path=/nowhere"],
        ["steps (0)", "model.precision ('fp7')", "'magic'", "data.path (/nowhere)"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_end_with_one_line_each(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, expected = WRONG[name]
    with pytest.raises(SystemExit) as exit_info:
        main([*overrides(data, tmp_path), *wrong])
    assert exit_info.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    for text in expected:
        assert any(text in line for line in lines), (text, lines)


@pytest.mark.parametrize(
    ("wrong", "given", "rule"),
    [
        ("optimizer.beta1=1.5", "optimizer.beta1 (1.5) must be", ">= 0 and < 1"),
        (
            "model.transformer_impl=transformer_engine",
            "model.transformer_impl (transformer_engine)",
            "'megatron-ext[te]', or model.transformer_impl=local",
        ),
        ("model.hidden_size=32 +megatron.fp4=e2m1", "quantization by nvfp4", "or megatron.fp4"),
    ],
)
def test_a_wrong_setting_is_said_once(
    wrong: str,
    given: str,
    rule: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", False)
    with pytest.raises(SystemExit):
        main([*overrides(data, tmp_path), *wrong.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {given}")
    assert rule in line


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--ranks", "0"], "argument --ranks: '0' must be a whole number >= 1"),
        (["--ranks", "-2"], "argument --ranks: '-2' must be a whole number >= 1"),
    ],
)
def test_wrong_options_are_one_line(
    words: list[str], rule: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([*overrides(data, tmp_path), *words])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"megatron-ext train: error: {rule}")


def test_an_entry_of_a_mapping_can_be_taken_away() -> None:
    assert load_config([], None, "quickstart").megatron == {"moe_router_pre_softmax": True}
    taken = load_config(["~megatron.moe_router_pre_softmax"], None, "quickstart")
    assert taken.megatron == {}


def test_a_script_without_ranks(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the number of ranks \(0\) must be >= 1$"):
        train(load_config(overrides(data, tmp_path)), num_ranks=0)


def test_printed_settings_are_checked(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*overrides(data, tmp_path), "--print"])
    output = capsys.readouterr()
    assert "num_experts: 4" in output.out
    assert output.err == ""
    with pytest.raises(SystemExit):
        main([*overrides(data, tmp_path), "--print", "parallel.ep_size=3", "model.num_experts=16"])
    output = capsys.readouterr()
    assert "ep_size: 3" in output.out
    rule = "error: model.num_experts (16) must be a multiple of parallel.ep_size (3)\n"
    assert rule in output.err


def test_a_strategy_with_nothing_to_predict_is_named(
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for layers, said in ((1, ["warning: balance.strategy (libra) predicts nothing"]), (2, [])):
        caplog.clear()
        words = ["balance.strategy=libra", f"model.num_layers={layers}"]
        check(load_config([*overrides(data, tmp_path), *words]))
        told = [text for text in caplog.messages if text.startswith("warning")]
        assert all(text.startswith(start) for text, start in zip(told, said, strict=True))


@pytest.mark.parametrize(
    ("run_dir", "rule"),
    [
        ("file", r"file/metrics\.jsonl cannot be written: .*/file is no folder"),
        ("file/run", r"file/run/metrics\.jsonl cannot be written: .*/file is no folder"),
        ("broken", r"broken/metrics\.jsonl, line 1 is no readable JSON: no object"),
    ],
)
def test_a_run_directory_that_cannot_be_used(
    run_dir: str, rule: str, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("[]\n")
    before = sorted(tmp_path.rglob("*"))
    config = load_config(overrides(data, tmp_path / run_dir))
    with pytest.raises(ConfigError, match=rf"^run_dir \(.*{run_dir}\): .*{rule}$"):
        validate(config, num_ranks=2)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_said_before_a_run_begins(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SystemExit) as ended:
        main(overrides(data, tmp_path / "run"))
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    said = said.removeprefix(f"error: run_dir ({tmp_path}/run): {tmp_path}: ")
    assert said == "No space left on device: there must be room for 65,536 bytes"
    assert not list(tmp_path.iterdir())


def test_checkpoint_of_another_model(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints" / "step_00000004"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"step": 4, "model": {"hidden_size": 64}}))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    write_checksums(folder, {path.name: hash_file(path) for path in folder.iterdir()})
    with pytest.raises(SystemExit) as exit_info:
        main(overrides(data, tmp_path))
    assert exit_info.value.code == 2
    assert f"error: model.hidden_size (16) must be 64, as in the checkpoint {folder}" in (
        capsys.readouterr().err
    )


WHOLE = "a whole number"


@pytest.mark.parametrize(
    ("section", "values", "rules"),
    [
        (BalanceConfig, {"slots": "2"}, [f"balance.slots ('2') must be {WHOLE} >= 0"]),
        (BalanceConfig, {"slots": 2.5}, [f"balance.slots (2.5) must be {WHOLE} >= 0"]),
        (BalanceConfig, {"slots": True}, [f"balance.slots (True) must be {WHOLE} >= 0"]),
        (
            BalanceConfig,
            {"check_plans": "no"},
            ["balance.check_plans ('no') must be True or False"],
        ),
        (BalanceConfig, {"local_first": 1}, ["balance.local_first (1) must be True or False"]),
        (
            BalanceConfig,
            {"tolerance": True, "strategy": None},
            [
                "balance.strategy (None) must be text",
                "balance.tolerance (True) must be a finite number from 0 to 1000000",
            ],
        ),
        (
            BalanceConfig,
            {"nvlink_domain": 2.0},
            [f"balance.nvlink_domain (2.0) must be 'auto' or {WHOLE} >= 1"],
        ),
        (
            BalanceConfig,
            {"link_bandwidth": False},
            ["balance.link_bandwidth (False) must be 'auto' or a finite number"],
        ),
        (BalanceConfig, {"objective": 3}, ["balance.objective (3) must be one of tolerance, time"]),
        (LlepSettings, {"alpha": "1"}, ["balance.llep.alpha ('1') must be a finite number from 1"]),
        (LoggingConfig, {"wandb_name": 3}, ["logging.wandb_name (3) must be text or None"]),
        (
            DataConfig,
            {"weights": {"code": "much"}},
            ["data.weights ({'code': 'much'}) must be a mapping of names to finite numbers"],
        ),
        (BalanceConfig, {"timeout_s": 1e300}, ["balance.timeout_s (1e+300) must be"]),
        (BalanceConfig, {"min_quota": 2**63}, [f"balance.min_quota ({2**63}) must be below 2^63"]),
        (TrainConfig, {"steps": 8.0}, [f"steps (8.0) must be {WHOLE} >= 1"]),
        (TrainConfig, {"megatron": [1]}, ["megatron ([1]) must be a mapping"]),
        (TrainConfig, {"model": {}}, ["model ({}) must be of class ModelConfig"]),
    ],
)
def test_values_of_another_type_are_refused_where_they_are_given(
    section: type[Section], values: dict[str, object], rules: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        section(**values)
    for problem, rule in zip(error.value.problems, rules, strict=True):
        assert problem.startswith(rule)


def test_a_setting_that_is_nearly_one_is_named_where_it_is_given() -> None:
    with pytest.raises(TypeError) as error:
        BalanceConfig(slot=2)  # type: ignore[call-arg]
    assert str(error.value) == "balance.slot: there is no setting of this name; did you mean slots?"
    with pytest.raises(TypeError, match=r"^balance\.llep\.alfa: .*; did you mean alpha\?$"):
        LlepSettings(alfa=1.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        BalanceConfig("quota")  # type: ignore[misc]


def test_values_of_another_type_that_are_set_later_are_refused_before_ranks_start() -> None:
    config = TrainConfig()
    config.parallel.ep_size = "2"  # type: ignore[assignment]
    config.optimizer.lr = float("inf")
    with pytest.raises(ConfigError) as error:
        validate(config, num_ranks=2)
    assert error.value.problems == ["parallel.ep_size ('2') must be a whole number >= 1"]
    config.parallel.ep_size = 2
    with pytest.raises(ConfigError) as error:
        validate(config, num_ranks=2)
    assert "optimizer.lr (inf) must be a finite number >= 0" in error.value.problems


def test_defaults_and_whole_numbers_for_others_are_of_the_declared_types() -> None:
    assert TrainConfig().problems() == []
    BalanceConfig(tolerance=1, link_bandwidth=10**9, max_in_flight=2, nvlink_domain="auto")


def test_what_else_is_wrong_is_said_where_a_setting_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["balance.slots=-1", "balance.objective=foo", "model.topk=0"])
    rules = [
        "data.path is missing",
        "model.topk (0) must be >= 1",
        "balance.slots (-1) must be >= 0",
        "balance.objective ('foo') must be one of tolerance, time",
    ]
    for line, rule in zip(capsys.readouterr().err.splitlines(), rules, strict=True):
        assert line.startswith(f"error: {rule}")


def test_a_section_that_is_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        BalanceConfig(llep={"alpha": 7})
    assert error.value.problems == ["balance.llep ({'alpha': 7}) must be of class LlepSettings"]


def test_data_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["steps=1"])
    assert exit_info.value.code == 2
    assert "error: data.path is missing" in capsys.readouterr().err


def test_ranks_that_experts_do_not_fit_in(data: Path) -> None:
    config = TrainConfig(megatron={"expert_tensor_parallel_size": 2})
    config.data.path = str(data)
    config.parallel.ep_size = 2
    with pytest.raises(ConfigError) as error:
        validate(config, num_ranks=2)
    assert error.value.problems == [
        "the number of ranks (2) must be a multiple of parallel.ep_size * "
        "megatron.expert_tensor_parallel_size * parallel.pp_size (4)"
    ]


@pytest.mark.parametrize(
    ("ranks", "sizes", "rule"),
    [
        (3, {"ep_size": 2}, "the number of ranks (3) must be a multiple of parallel.ep_size"),
        (2, {"pp_size": 2, "vpp_size": 3}, "model.num_layers (4) must be a multiple of"),
        (1, {"vpp_size": 2}, "parallel.vpp_size (2) must be 1 without a pipeline"),
        (2, {"overlap_param_gather": True}, "parallel.overlap_param_gather (True) needs"),
    ],
)
def test_sizes_that_do_not_fit(ranks: int, sizes: dict[str, int], rule: str, data: Path) -> None:
    config = TrainConfig()
    config.data.path = str(data)
    for name, value in sizes.items():
        setattr(config.parallel, name, value)
    with pytest.raises(ConfigError) as error:
        validate(config, num_ranks=ranks)
    assert any(rule in problem for problem in error.value.problems)


@pytest.mark.parametrize(
    "time",
    [
        ["balance.objective=time"],
        ["balance.objective=time", "balance.link_bandwidth=400000000000"],
        ["balance.objective=time", *COSTS],
    ],
)
def test_costs_may_be_given_or_not(time: list[str], data: Path, tmp_path: Path) -> None:
    validate(load_config([*overrides(data, tmp_path), *time]), num_ranks=2)


def test_a_second_run_in_a_run_directory_is_refused(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one is started while the first one's ranks run. When they ended, a third may."""
    arguments = [*overrides(data, tmp_path), "balance.slots=1"]
    starts = []

    def start_another(*_: object, **__: object) -> None:
        starts.append(sorted(tmp_path.rglob("*")))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
        assert sorted(tmp_path.rglob("*")) == starts[-1]

    monkeypatch.setattr("megatron_ext.trainer.train.launch_ranks", start_another)
    for _ in range(2):
        main(arguments)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: run_dir ({tmp_path}): {tmp_path} is in use by process ")
        assert f"process {os.getpid()} on " in line
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["balance.slots=7"], ["warning: balance.slots (7) beyond 4 stay empty"]),
        (["balance.slots=7", "balance.strategy=exact"], []),
        (["balance.slots=7", "balance.strategy=none"], []),
        (["balance.slots=4"], []),
    ],
)
def test_slots_that_nothing_can_fill_are_named(
    settings: list[str],
    said: list[str],
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 ranks of 4 experts: 4 are on the other one."""
    monkeypatch.setattr("megatron_ext.trainer.train.launch_ranks", lambda *_, **__: None)
    sizes = ["model.num_experts=8", "parallel.ep_size=2"]
    main([*overrides(data, tmp_path), *sizes, *settings])
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [text[: len(want)] for text, want in zip(told, said, strict=True)] == said


def test_a_run_of_few_steps_needs_no_shorter_warm_up(data: Path) -> None:
    from megatron_ext.trainer.model.build import build_scheduler

    config = load_config([f"data.path={data}", "steps=4"], str(RECIPES), "quickstart")
    assert config.optimizer.warmup_steps > config.steps
    assert check(config) == 2
    optimizer = SimpleNamespace(param_groups=[{}])
    scheduler = build_scheduler(config, optimizer, 0)
    rates = []
    for _ in range(4):
        scheduler.step(increment=1)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-4])


def _earlier_run(run_dir: Path, *, steps: int) -> None:
    run_dir.mkdir()
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, steps + 1)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    (run_dir / "report.html").write_text("old")
    (run_dir / "notes.txt").write_text("the user's")


def test_steps_without_a_checkpoint_are_not_begun_anew_in_silence(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "first"
    _earlier_run(run_dir, steps=4)
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    with pytest.raises(SystemExit) as exit_info:
        main(overrides(data, run_dir))
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: run_dir ({run_dir}) holds 4 steps and no checkpoint to go on from: name another, "
        "or begin anew with overwrite=true, which moves its files aside"
    )
    assert {path: path.read_bytes() for path in run_dir.iterdir()} == before

    monkeypatch.setattr("megatron_ext.trainer.train.launch_ranks", lambda *_, **__: None)
    main([*overrides(data, run_dir), "overwrite=true"])
    aside = run_dir / "earlier_1"
    assert (aside / "metrics.jsonl").read_text().count("\n") == 4
    assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", "report.html"]
    assert sorted(path.name for path in run_dir.iterdir()) == [".lock", "earlier_1", "notes.txt"]
    main([*overrides(data, run_dir), "overwrite=true"])  # Now there is nothing to lose.
    assert not (run_dir / "earlier_2").exists()


@pytest.mark.parametrize("counted", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_run_that_is_started_again_for_its_ranks_goes_on(
    counted: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _earlier_run(tmp_path / "first", steps=4)
    monkeypatch.setenv(counted, "1")
    validate(load_config(overrides(data, tmp_path / "first")), num_ranks=2)
    monkeypatch.setenv(counted, "0")
    with pytest.raises(ConfigError, match="holds 4 steps and no checkpoint"):
        validate(load_config(overrides(data, tmp_path / "first")), num_ranks=2)


@pytest.mark.parametrize("settings", [[], ["steps=3"]])
def test_a_run_that_is_complete_says_so_and_starts_no_ranks(
    settings: list[str], data: Path, saved_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megatron_ext")
    words = [*overrides(data, saved_run), *settings]
    main(words)
    steps = settings[0].removeprefix("steps=") if settings else "8"
    assert caplog.messages[-1] == f"{saved_run}: nothing to do: step 8 of {steps}"


def test_megatrons_names_are_those_of_fields_that_the_sections_decide() -> None:
    from megatron_ext.trainer.config import MEGATRON_NAMES
    from megatron_ext.trainer.model.settings import transformer_settings

    assert MEGATRON_NAMES.keys() <= transformer_settings(TrainConfig()).keys()
    for setting in MEGATRON_NAMES.values():
        section, _, name = setting.partition("=")[0].partition(".")
        assert hasattr(getattr(TrainConfig(), section), name)


LISTS = "a0: &a0 [x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
REFERENCES = "megatron:\n" + "".join(f"  b{n}: ${{.b{n + 1}}}${{.b{n + 1}}}\n" for n in range(30))
GOOD = "defaults: [train, _self_]\nsteps: 8\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{GOOD}\tx: 1\n", ", line 3 is no readable YAML: found "),
        (f"{GOOD}steps: 4\n", ", line 3 is no readable YAML: found duplicate key steps"),
        (
            f"{GOOD}x: !!python/name:os.system\n",
            ", line 3 is no readable YAML: could not determine",
        ),
        (f"{GOOD}---\nx: 1\n", ", line 3 is no readable YAML: but found another document"),
        (f"{GOOD}<<: 3\n", ", line 3 is no readable YAML: expected a mapping or list of mappings"),
        (f"{GOOD}? [1, 2]\n: 3\n", ", line 3 is no readable YAML: found unhashable key"),
        (f"{GOOD}x: \0\n", " is no readable YAML: unacceptable character #x0000"),
        (f"{GOOD}x: {'[' * 3000}\n", ", line 3 is no readable YAML: it has more than 20 levels"),
        (
            f"{GOOD}{LISTS}",
            ", line 7 is no readable YAML: it has more than 10000 values or hundreds of letters, "
            "written out",
        ),
        (f"{GOOD}{REFERENCES}", ", line 12 is no readable YAML: it has more than 16 references"),
        (
            f"{GOOD}x: [&x {'x' * 4000}{', *x' * 300}]\n",
            ", line 3 is no readable YAML: it has more than 10000 values or hundreds of letters",
        ),
        (f"{GOOD}x: {'x' * 5000}\n", ", line 3 is no readable YAML: a value has more than 4096"),
        (f"{GOOD}x: [&x '${{steps}}'{', *x' * 20}]\n", "it has more than 16 references"),
        (f"{GOOD}x: &x\n  y: *x\n", ", line 4 is no readable YAML: *x names nothing above it"),
        (f"{GOOD}x: 0x{'f' * 4000}\n", "... is beyond 64 bits"),
        (f"{GOOD}#{'x' * 2**20}\n", ": more than 1,048,576 bytes"),
        ("steps: 8\n", ": `defaults: [train, _self_]` is missing"),
    ],
    ids=lambda text: text[:30],
)
def test_a_recipe_with_a_slip(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(config_dir=str(tmp_path), config_name="my")
    (problem,) = error.value.problems
    assert problem.startswith(str(tmp_path / "my.yaml"))
    assert said in problem
    assert len(problem) < 300
    if "defaults" in text:  # A group is read by Hydra as well.
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "mine.yaml").write_text(text.replace("defaults: [train, _self_]", ""))
        (tmp_path / "my.yaml").write_text("defaults: [train, {model: mine}, _self_]\n")
        with pytest.raises(ConfigError) as error:
            load_config(config_dir=str(tmp_path), config_name="my")
        assert error.value.problems[0].startswith(str(tmp_path / "model" / "mine.yaml"))


EVIL = "{searchpath: ['pkg://evil']}"
CALL = "call: {_target_: evil.call}"


@pytest.mark.parametrize(
    ("files", "place"),
    [
        ({"my": f"{GOOD}hydra: {EVIL}\n"}, "my.yaml, line 3"),
        ({"my": f"{GOOD}hydra: {{searchpath: ['structured://evil']}}\n"}, "my.yaml, line 3"),
        ({"my": f"{GOOD}x: &x\n  hydra: {EVIL}\n<<: *x\n"}, "my.yaml, line 4"),
        ({"my": "defaults: [train, {g@hydra.callbacks: a}]\n", "g/a": CALL}, "my.yaml, line 1"),
        ({"my": "defaults: [train, {hydra/callbacks: a}]\n"}, "my.yaml, line 1"),
        ({"my": "x: [train, {g@hydra.x: a}]\ndefaults: ${x}\n"}, "my.yaml, line 1"),
        (
            {"my": "defaults: [train, {g: a}]\n", "g/a": f"\n# @package hydra.callbacks\n{CALL}"},
            "g/a.yaml, line 2",
        ),
        ({"my": GOOD, "hydra/config": f"callbacks: {{{CALL}}}\n"}, "hydra/config.yaml, line 1"),
    ],
)
def test_a_recipe_has_no_way_to_run_code_by_settings_of_hydra(
    files: dict[str, str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "__init__.py").write_text("call = print\n")
    (problem,) = _problems_of(tmp_path, files)
    assert problem == (
        f"{tmp_path}/{place}: a recipe cannot set `hydra`: Hydra's own settings can run code, and "
        "belong on the command line"
    )
    assert "evil" not in sys.modules


@pytest.mark.parametrize(
    "name", ["checkpoint.trust", "megatron.fp8_quantizer_factory", "megatron.fp4_quantizer_factory"]
)
def test_what_runs_code_is_set_on_the_command_line_only(name: str, tmp_path: Path) -> None:
    section, _, key = name.partition(".")
    said = f"{name} (True) can run code, so it is given on the command line, by its whole name"
    # What a user says of other settings, whose names begin alike, is no word about this one.
    for words in [], ["+megatron.fp8=e4m3", "+megatron.fp4=e2m1", "+megatron={num_experts: 2}"]:
        files = {"my": f"{GOOD}{section}: {{{key}: true}}\n"}
        assert _problems_of(tmp_path, files, words) == [said]
    word = f"{'+' * (section == 'megatron')}{name}=true"
    config = load_config([word, "run_dir=x", "data.path=y"])
    assert config.checkpoint.trust == (section == "checkpoint")


def _problems_of(folder: Path, files: dict[str, str], words: Sequence[str] = ()) -> list[str]:
    for name, text in files.items():
        file = folder / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(words, config_dir=str(folder), config_name="my")
    return error.value.problems


@pytest.mark.parametrize("times", [1, 2])
def test_recipes_that_name_each_other_end(times: int, tmp_path: Path) -> None:
    files = {"my": "defaults: [train, r0, _self_]\n"}
    files |= {f"r{n}": f"defaults: {[f'r{(n + 1) % 30}'] * times}\n" for n in range(30)}
    (problem,) = _problems_of(tmp_path, files)
    assert problem == f"{tmp_path}: the defaults of recipes name too many, or each other"


@pytest.mark.parametrize("name", ["{'': x}", f"r@{'.'.join('x' * 1500)}"])
def test_defaults_that_hydra_fails_on_are_one_line(name: str, tmp_path: Path) -> None:
    (problem,) = _problems_of(tmp_path, {"my": f"defaults: [train, {name}]\n", "r": "q: 1\n"})
    assert problem.startswith("my.yaml cannot be composed: ")
    assert len(problem.splitlines()) == 1


def test_what_a_recipe_says_is_no_command_to_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my.yaml").write_text(f'{GOOD}"\\e[2Jx": 3\n')
    with pytest.raises(SystemExit):
        main(["--config-dir", str(tmp_path), "--config-name", "my"])
    said = capsys.readouterr().err
    assert said.startswith("error: my.yaml: \\x1b[2Jx: there is no setting of this name; the ")
    assert said.count("\n") == 1


def test_a_recipe_with_a_wrong_setting_names_it(tmp_path: Path) -> None:
    for line, said in (
        ("at_most: ${run_dir}", "at_most (runs/train) must be a mapping"),
        ("at_most: {steps: [1]}", "at_most.steps ([1]) must be a whole number"),
        ("data: {sequence_lenght: 8}", "data.sequence_lenght: there is no setting of this name; "),
        ("model: 3", "model (3) must be a mapping"),
        ("balance: {history: 3}", "balance.history (3) must be a mapping"),
        ("steps: many", "steps: Value 'many' of type 'str' could not be converted to Integer"),
    ):
        (tmp_path / "my.yaml").write_text(f"defaults: [train, _self_]\n{line}\n")
        with pytest.raises(ConfigError) as error:
            load_config(config_dir=str(tmp_path), config_name="my")
        assert error.value.problems[0].removeprefix("my.yaml: ").startswith(said)
