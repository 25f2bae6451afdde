"""Runs that start from a checkpoint of Megatron-LM, which Megatron's own functions write here.

The stock run is Megatron's own model, DDP, optimizer and schedule, without this package; its state
is put together as in Megatron-LM's `training/checkpointing.py`. The next losses of a balanced run
are compared with those of the stock run: the first shows the weights, the second Adam's state.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from checkpoints_tools import read_contents, verify
from checkpoints_tools.pickles import read_table
from megatron_ext.config import ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.ranks.launch import NO_RESTART
from megatron_ext.trainer.validate import validate
from tests.docs.test_readme import ROOT, commands
from tests.ranks import run_ranks
from tests.trainer.checkpoints.test_checkpoint import Said
from tests.trainer.checkpoints.test_strangers import Payload
from tests.trainer.dataset import overrides
from tests.trainer.test_data import write_datasets, write_tokenizer
from tests.trainer.test_pretrain import COMMAND_LINE, launch, needs_training_loop
from tests.trainer.test_run import _train as train_one

STEPS, SAVED = 5, 3


def _words(data: Path, run_dir: Path) -> list[str]:
    schedule = ["optimizer.decay=constant", "optimizer.warmup_steps=0", "optimizer.min_lr=0.001"]
    return [*overrides(data, run_dir), *schedule, f"steps={STEPS}", "model.activation=swiglu"]


def _train_stock(
    rank: int, words: list[str], folder: str, kind: str | None, recipe: str | None = None
) -> list[float]:
    """Train Megatron's own model, save it after `SAVED` steps; return the losses of all steps."""
    enable_cpu_platform()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from megatron_ext.data.mixing import microbatches
    from megatron_ext.trainer.data import open_data
    from megatron_ext.trainer.loop import _forward_step
    from megatron_ext.trainer.model import build
    from megatron_ext.trainer.model.settings import transformer_config

    parallel_state.destroy_model_parallel()
    config = load_config(words, config_name=recipe)
    build.start_parallelism(config)
    settings = transformer_config(config)
    model = GPTModel(
        settings,
        get_gpt_decoder_block_spec(settings, use_transformer_engine=False),
        vocab_size=384,
        max_sequence_length=config.data.sequence_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    settings.finalize_model_grads_func = finalize_model_grads
    spread = DistributedDataParallelConfig(
        use_distributed_optimizer=kind is not None, grad_reduce_in_fp32=settings.bf16
    )
    if settings.bf16:
        model = Float16Module(settings, model)
    chunk = DistributedDataParallel(settings, spread, model)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        adam_beta2=config.optimizer.beta2,
        use_distributed_optimizer=kind is not None,
        bf16=settings.bf16,
        params_dtype=settings.params_dtype,
    )
    optimizer = get_megatron_optimizer(adam, [chunk])
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=adam.lr,
        min_lr=adam.lr,
        lr_warmup_steps=0,
        lr_decay_steps=STEPS,
        lr_decay_style="constant",
        start_wd=adam.weight_decay,
        end_wd=adam.weight_decay,
        wd_incr_steps=STEPS,
        wd_incr_style="constant",
    )
    data = build.dataset(config, open_data(config), "train")
    size = parallel_state.get_data_parallel_world_size()
    batches = microbatches(
        data, consumed_samples=0, data_parallel_rank=rank, data_parallel_size=size
    )
    losses = []
    for step in range(1, STEPS + 1):
        schedule.step(increment=1)
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=lambda batches, model: _forward_step(batches, model, reverse=False),
            data_iterator=[batches],
            model=[chunk],
            num_microbatches=config.data.global_batch_size // config.data.micro_batch_size // size,
            seq_length=config.data.sequence_length,
            micro_batch_size=config.data.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        loss = torch.tensor([float(report["loss"]) for report in reports]).mean()
        torch.distributed.all_reduce(loss)
        losses.append(float(loss) / size)
        if step == SAVED:
            _save(chunk, optimizer, schedule, Path(folder), kind)
    return losses


def _save(chunk: Any, optimizer: Any, schedule: Any, folder: Path, kind: str | None) -> None:
    """Save as Megatron-LM does; `kind` is how the distributed optimizer's state is cut."""
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import RerunMode

    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if kind is not None:
        metadata["distrib_optim_sharding_type"] = kind
    written = dict(metadata)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    arguments = argparse.Namespace(
        num_layers=2,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        params_dtype=torch.float32,
        rerun_mode=RerunMode.DISABLED,
    )
    model = chunk.module.sharded_state_dict(metadata=metadata)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generators = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    state = {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": SAVED,
        "model": model,
        "optimizer": optimizer.sharded_state_dict({"model": model}, metadata=metadata),
        "opt_param_scheduler": schedule.state_dict(),
        "rng_state": ShardedObject("rng_state", [generators], (1, 1, size), (0, 0, rank)),
        "num_floating_point_operations_so_far": 0.0,
    }
    iteration = folder / f"iter_{SAVED:07d}"
    iteration.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(iteration), content_metadata=written)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED))


KINDS = {
    "dp_reshardable": [],
    "fully_reshardable": [],
    None: ["parallel.distributed_optimizer=false"],
    "bf16": ["model.precision=bf16", "balance.strategy=none"],
}
"""Settings of a stock run by how its optimizer's state is cut; of bfloat16, as in Megatron-LM."""


@pytest.fixture(scope="module")
def stock(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Makes a stock run of two ranks once: its folder of checkpoints, and its losses."""
    made: dict[str | None, tuple[Path, list[float]]] = {}

    def make(kind: str | None = "dp_reshardable") -> tuple[Path, list[float]]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("stock")
            words = [*_words(data, folder), *KINDS[kind]]
            cut = "dp_reshardable" if kind == "bf16" else kind
            losses, _ = run_ranks(_train_stock, 2, words, str(folder / "saved"), cut)
            made[kind] = folder / "saved", losses
        return made[kind]

    return make


def _losses(run_dir: Path) -> list[float]:
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(SAVED + 1, STEPS + 1))
    return [line["loss"] for line in lines]


def _train(rank: int, many: list[list[str]]) -> list[tuple[str, int]]:
    """Train some runs; return what each says of its start or refusal, and its exit status."""
    said, package = Said(), logging.getLogger("megatron_ext")
    said.setLevel(logging.INFO)
    level = package.level
    package.addHandler(said)
    package.setLevel(logging.INFO)
    outcomes = []
    try:
        for words in many:
            said.lines.clear()
            status = 0
            try:
                train_one(rank, words)
            except SystemExit as stop:
                status = int(stop.code)
            lines = [line for line in said.lines if re.match("(starting|error|warning)", line)]
            outcomes.append(("; ".join(lines), status))
    finally:
        package.removeHandler(said)
        package.setLevel(level)
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_a_balanced_run_goes_on_as_the_stock_run_does(
    kind: str | None, stock: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    folder, expected = stock(kind)
    words = [*_words(data, tmp_path), f"checkpoint.load={folder}", *KINDS[kind]]
    ((said, status),) = run_ranks(_train, 2, [words])[0]
    assert said == (
        f"starting from {folder}/iter_0000003, iteration 3; not taken: learning rate, random "
        "generators, position in the data"
    )
    assert status == 0
    # Balanced, sums are rounded in another order.
    assert _losses(tmp_path) == pytest.approx(expected[SAVED:], rel=1e-6)


LAYOUT = "saved in the layout of other ranks or experts, dp_reshardable"


@pytest.mark.parametrize(
    ("kind", "other", "why"),
    [
        ("fully_reshardable", "parallel.ep_size=1", None),
        ("fully_reshardable", "parallel.distributed_optimizer=false", None),
        ("dp_reshardable", "parallel.ep_size=1", LAYOUT),
        ("dp_reshardable", "model.experts=grouped_mm", LAYOUT),
    ],
)
def test_what_other_layouts_take(
    kind: str, other: str, why: str | None, stock: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    """Weights always; Adam's state if it is named by parameters, not by its place in buffers."""
    folder, expected = stock(kind)
    words = [*_words(data, tmp_path), f"checkpoint.load={folder}", other]
    ((said, status),) = run_ranks(_train, 2, [words])[0]
    assert status == 0
    first, last = _losses(tmp_path)
    assert first == pytest.approx(expected[SAVED], rel=1e-6)
    if why is None:
        assert "Adam" not in said
        assert last == pytest.approx(expected[SAVED + 1], rel=1e-6)
    else:
        assert re.search(rf"; not taken: Adam's state \({why}\), learning rate", said)
        assert last != pytest.approx(expected[SAVED + 1], rel=1e-5)


def test_a_model_that_differs_is_refused_in_one_line(
    stock: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    """On all ranks, with the setting that would fit where a setting decides the size."""
    folder = stock()[0] / "iter_0000003"
    richer = tmp_path / "richer"
    shutil.copytree(folder, richer)
    table = read_table(richer / ".metadata")
    table.state_dict_metadata["decoder.layers.mlp.router.bias"] = TensorStorageMetadata(
        table.state_dict_metadata["decoder.final_layernorm.weight"].properties,
        torch.Size([2, 4]),
        [],
    )
    (richer / ".metadata").write_bytes(pickle.dumps(table))
    refusals = {
        "model.vocab_size=500": r"word_embeddings\.weight has shape \(384, 16\), in this run "
        r"\(512, 16\): model\.vocab_size must be 384",
        "model.num_experts=8": r"\.router\.weight has .*: model\.num_experts must be 4",
        "model.hidden_size=32": r"has shape .*: model\.hidden_size must be 16",
        "model.expert_hidden_size=48": r"has shape .*",
        "model.num_layers=4": r"has shape .*: model\.num_layers must be 2",
        "+megatron.add_bias_linear=true": r"it has no decoder\..*bias, which this run has",
        f"checkpoint.load={richer}": r"it has decoder\.layers\.mlp\.router\.bias, which this run "
        "has not",
        "steps=3": r"steps \(3\) must be > 3, where .*",
    }
    if (folder / "common.pt").exists():  # As Megatron-Core writes it that has no such file.
        newer = tmp_path / "newer"
        shutil.copytree(folder, newer)
        (newer / "common.pt").unlink()
        (newer / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        refusals[f"checkpoint.load={newer}"] = "it has no common.pt, which .*"
    common = [*_words(data, tmp_path / "run"), f"checkpoint.load={folder}"]
    many = [
        [word for word in common if not refusal.startswith(word.split("=")[0] + "=")] + [refusal]
        for refusal in refusals
    ]
    outcomes, others = run_ranks(_train, 2, many)
    assert others == [("", NO_RESTART)] * len(refusals)
    for (said, status), refusal in zip(outcomes, refusals.values(), strict=True):
        assert re.fullmatch(rf"error: (checkpoint .*)?{refusal}", said), said
        assert status == NO_RESTART
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda one: (one / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing"),
        (
            lambda one: os.truncate(one / "__0_0.distcp", 900),
            r"__0_0\.distcp has 900 bytes, not .*",
        ),
        (lambda one: os.truncate(one / ".metadata", 90), r"\.metadata is cut off or damaged .*"),
        (lambda one: (one / "metadata.json").unlink(), r"metadata\.json is missing"),
        (lambda one: (one / "mp_rank_00").mkdir(), r"it is in Megatron's older format torch, .*"),
        (shutil.rmtree, "the folder cannot be read: No such file or directory"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_ranks_start(
    harm: Callable[[Path], Any], said: str, stock: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    shutil.copytree(stock()[0], tmp_path / "saved")
    harm(tmp_path / "saved" / "iter_0000003")
    words = [*_words(data, tmp_path / "run"), f"checkpoint.load={tmp_path / 'saved'}"]
    with pytest.raises(ConfigError) as refused:
        validate(load_config(words), num_ranks=2)
    where = rf"checkpoint\.load \({tmp_path}/saved/iter_0000003\) is not a complete checkpoint"
    assert re.fullmatch(f"{where}: {said}", str(refused.value))


@pytest.mark.parametrize("content", ["", "-1", "seven", "3.5"])
def test_a_tracker_without_an_iteration(content: str, data: Path, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(content)
    words = [*_words(data, tmp_path / "run"), f"checkpoint.load={tmp_path}"]
    with pytest.raises(ConfigError, match=rf"must hold an iteration, not '{content}'"):
        validate(load_config(words), num_ranks=2)


@pytest.fixture
def without_megatrons_list() -> Iterator[None]:
    """As in a process that has not imported Megatron, which tells torch its list."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(known)


@pytest.mark.usefixtures("without_megatrons_list")
def test_verify_knows_what_megatron_writes(stock: Callable[..., Any], tmp_path: Path) -> None:
    """The arguments, numpy's generator, enumerations: no reason to suspect a stock checkpoint."""
    folder = stock()[0] / "iter_0000003"
    assert verify(folder).problems == []
    assert read_contents(folder).step == SAVED
    crafted = tmp_path / "crafted"
    shutil.copytree(folder, crafted)
    torch.save({"args": argparse.Namespace(x=Payload(tmp_path / "trace"))}, crafted / "common.pt")
    assert verify(crafted).problems == ["common.pt names posix.mkdir, which no checkpoint needs"]
    assert not (tmp_path / "trace").exists()


@pytest.mark.slow
def test_the_commands_of_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stock run of the recipe's model, and on datasets by Megatron's own builder."""
    monkeypatch.chdir(tmp_path)
    checking, training = commands(ROOT / "docs/guides/start-from-megatron-lm.md")
    (tmp_path / "data").mkdir()
    write_datasets(tmp_path / "data", {"code_text_document": 3, "docs_text_document": 60})
    write_tokenizer(tmp_path / "data" / "tokenizer.json")
    words = [
        word.replace("data/", f"{tmp_path}/data/")
        for word in training[4:]
        if not word.startswith(("run_dir=", "checkpoint.load="))
    ]
    arguments = ([*words, "balance=none"], str(tmp_path / "checkpoints"), "dp_reshardable")
    run_ranks(_train_stock, 2, *arguments, training[3])
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    for command in (checking, training):
        program = [sys.executable, "-m", "megatron_ext", *command[1:]]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "starting from checkpoints/iter_0000003, iteration 3; not taken: learning" in done.stderr
    steps = [line["step"] for line in read_metrics(tmp_path / "runs/from_megatron")]
    assert steps == list(range(SAVED + 1, 21))


@needs_training_loop
@pytest.mark.slow
def test_a_checkpoint_of_megatrons_own_program(tmp_path: Path, data: Path) -> None:
    """With all that its training loop writes: arguments, generators, the state of its checks."""
    words = COMMAND_LINE.replace("--mtp-num-layers 1", "--untie-embeddings-and-output-weights")
    saving = f"--use-distributed-optimizer --save {tmp_path / 'saved'} --save-interval 2"
    done = launch(words, saving)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "saved" / "iter_0000004"
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        assert verify(folder).problems == []
    finally:
        torch.serialization.add_safe_globals(known)
    write_datasets(tmp_path, {"text_document": 3})
    given = [word for word in overrides(data, tmp_path / "run") if "data.path" not in word]
    settings = ["hidden_size=32", "num_experts=8", "expert_hidden_size=64", "vocab_size=127"]
    run = [*given, *(f"model.{each}" for each in settings), "model.activation=swiglu"]
    run += ["+megatron.normalization=RMSNorm", f"data.path={tmp_path}/text_document"]
    ((said, status),) = run_ranks(_train, 2, [[*run, f"checkpoint.load={tmp_path / 'saved'}"]])[0]
    assert re.match(rf"starting from {folder}, iteration 4; not taken: learning rate", said)
    assert status == 0
