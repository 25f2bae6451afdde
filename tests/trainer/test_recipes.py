"""Every recipe is accepted by Megatron, and every model trains at `size=tiny`, balanced as without.

What is wrong about recipes is said in one line.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.config import ConfigError
from megatron_ext.files.recipes import recipe_names, shipped_recipes
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.train import train
from megatron_ext.trainer.validate import validate
from tests.ranks import run_ranks

RECIPES = shipped_recipes()
NAMES = recipe_names(RECIPES)


def _first_of_each_model() -> list[str]:
    """Recipes that differ by model: at `size=tiny` nothing else differs."""
    by_model: dict[str, str] = {}
    for name in NAMES:
        parts = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["defaults"]
        for model in [part["model"] for part in parts if "model" in part]:
            by_model.setdefault(model, name)
    assert by_model.keys() == {path.stem for path in (RECIPES / "model").iterdir()}
    return list(by_model.values())


@pytest.fixture(autouse=True)
def outside_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def _config(name: str, data: Path) -> Any:
    given = [f"data.path={data}", "data.sequence_length=64", "model.vocab_size=0"]
    return load_config(given, config_name=name)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_valid_at_full_and_tiny_size(name: str, data: Path, tmp_path: Path) -> None:
    config = _config(name, data)
    validate(config, num_ranks=max(config.parallel.num_ranks, config.parallel.ep_size))
    if of_machine := re.search(r"_(\d+)_[a-z]+\d+_(?:fp32|bf16)", name):
        assert config.parallel.num_ranks == int(of_machine[1])
        assert f"_{config.model.precision}" in name
        assert config.run_dir == f"runs/{name}"
        assert config.hardware.domain_ranks
    validate(load_config(_tiny(data, tmp_path), config_name=name), num_ranks=2)


@pytest.mark.parametrize(
    ("precision", "of_bf16"),
    [("tensorwise", 0.5), ("blockwise", 0.5001), ("mxfp8", 0.5156), ("nvfp4", 0.2813)],
)
def test_precisions_quantize_experts(precision: str, of_bf16: float, data: Path) -> None:
    from megatron_ext.trainer.model.shape import shape_of

    given = [f"data.path={data}", "data.sequence_length=64", "model.vocab_size=0"]
    name = "qwen3_30b_8_h200_bf16"
    in_bf16 = shape_of(load_config(given, config_name=name), name)
    config = load_config([*given, f"precision={precision}"], config_name=name)
    validate(config, num_ranks=8, needs_data=False)
    shape = shape_of(config, name)
    assert shape.precision == precision
    assert shape.replica_bytes / in_bf16.replica_bytes == pytest.approx(of_bf16, abs=1e-4)
    assert shape.token_bytes == in_bf16.token_bytes


def _tiny(data: Path, run_dir: Path) -> list[str]:
    return [f"data.path={data}", f"run_dir={run_dir}", "size=tiny", "precision=fp32"]


@pytest.mark.parametrize("name", _first_of_each_model())
def test_models_train_at_tiny_size(name: str, data: Path, tmp_path: Path) -> None:
    none, quota = run_ranks(_steps_with, 2, name, _tiny(data, tmp_path), ("none", "quota"))[0]
    assert quota["losses"] == pytest.approx(none["losses"], rel=1e-6)
    assert quota["after"] < 1.05 < none["after"]
    assert quota["structure"] == _structure(_config(name, data))
    assert quota["kinds"] == {"BalancedMoELayer"}
    assert none["kinds"] == {"MoELayer"}


def test_ideal_trains_evenly_at_tiny_size(data: Path, tmp_path: Path) -> None:
    """A baseline, whose layers are of Megatron's own class: one model shows it."""
    ((ideal,), _) = run_ranks(_steps_with, 2, "quickstart", _tiny(data, tmp_path), ("ideal",))
    assert math.isfinite(sum(ideal["losses"]))
    assert ideal["after"] < 1.05


def _structure(config: Any) -> dict[str, Any]:
    """What a tiny model must have in common with the model that it stands for."""
    megatron = config.megatron
    dense, predicted = config.model.num_dense_layers, megatron.get("mtp_num_layers") or 0
    layers = min(config.model.num_layers, 4)
    return {
        "moe layers": layers - dense + predicted,
        "dense layers": dense,
        "latent": bool(megatron.get("multi_latent_attention")),
        "query norms": bool(megatron.get("qk_layernorm")),
        "grouped queries": bool(megatron.get("num_query_groups")),
        "shared experts": config.model.shared_expert_hidden_size > 0,
        "expert bias": bool(megatron.get("moe_router_enable_expert_bias")),
        "gated": config.model.activation == "swiglu",
    }


def _steps_with(
    rank: int, name: str, given: list[str], balances: tuple[str, ...]
) -> list[dict[str, Any]]:
    return [_two_steps(name, [*given, f"balance={balance}"]) for balance in balances]


def _two_steps(name: str, given: list[str]) -> dict[str, Any]:
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_ext.trainer.loop import Training
    from megatron_ext.trainer.model import build

    config = load_config(given, config_name=name)
    validate(config, num_ranks=2)
    training = Training(config)
    metrics = [training.train_step() for _ in range(2)]
    training.close()
    moe = build.moe_layers(training.chunks)
    modules = [each for chunk in training.chunks for each in chunk.modules()]
    layers = [each for each in modules if isinstance(each, TransformerLayer)]
    attention = layers[0].self_attention
    norms = [getattr(attention, each, None) for each in ("q_layernorm", "kv_layernorm")]
    megatron: Any = moe[0].config
    return {
        "losses": [each["loss"] for each in metrics],
        "after": metrics[0]["imbalance_after"],
        "kinds": {type(each).__name__ for each in moe},
        "structure": {
            "moe layers": len(moe),
            "dense layers": sum(type(each.mlp) is MLP for each in layers),
            "latent": isinstance(attention, MLASelfAttention),
            "query norms": any("Norm" in type(each).__name__ for each in norms),
            "grouped queries": megatron.num_query_groups < megatron.num_attention_heads,
            "shared experts": moe[0].shared_experts is not None,
            "expert bias": moe[0].router.expert_bias is not None,
            "gated": megatron.gated_linear_unit,
        },
    }


def test_every_option_of_a_group_composes() -> None:
    """The first options of all groups together, the second ones, and so on."""
    groups = [path for path in RECIPES.iterdir() if path.is_dir() and path.name != "traces"]
    options = [[f"{group.name}={each.stem}" for each in group.iterdir()] for group in groups]
    for together in itertools.zip_longest(*options):
        load_config(["data.path=", *filter(None, together)], config_name="mixtral_8x7b_8_h200_bf16")


def test_own_recipes_are_made_of_the_groups_that_come_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "it's mine"
    (own / "model").mkdir(parents=True)
    (own / "model" / "wide.yaml").write_text("hidden_size: 96\n")
    (own / "mine.yaml").write_text(
        "defaults: [train, {model: wide}, {parallel: ep2}, {size: full}, _self_]\nsteps: 7\n"
    )
    config = load_config(["data.path="], str(own), "mine")
    assert (config.recipe, config.steps, config.model.hidden_size) == ("mine", 7, 96)
    assert config.parallel.ep_size == 2
    assert load_config(["data.path="], str(own), "quickstart").recipe == "quickstart"
    # What the command line sets stays, also beyond a limit.
    small = load_config(["data.path=", "size=tiny", "steps=99"], str(own), "mine")
    assert (small.steps, small.model.hidden_size, small.at_most) == (99, 32, {})


def _problems(given: list[str], name: str, num_ranks: int, data: Path) -> list[str]:
    config = load_config([f"data.path={data}", "model.vocab_size=0", *given], config_name=name)
    with pytest.raises(ConfigError) as error:
        validate(config, num_ranks=num_ranks)
    return error.value.problems


TOO_FEW = (
    "the number of ranks (8) must be >= parallel.num_ranks (256): the nearest recipe for so "
    "many is qwen3_30b_8_h200_bf16; size=tiny makes the model small enough for ranks without a GPU"
)

WRONG = {
    "fewer GPUs than the recipe needs": ([], 8, TOO_FEW),
    "fewer ranks on CPUs than asked for": (
        ["size=tiny", "parallel.num_ranks=4"],
        2,
        "the number of ranks (2) must be >= parallel.num_ranks (4): start so many (--ranks 4)",
    ),
    "EP larger than the NVLink domain": (
        ["hardware=server_8_h100"],
        256,
        "parallel.ep_size (64) must be <= 8, the ranks of an NVLink domain (server with 8 H100 "
        "GPUs and one 400 Gbps adapter a GPU), or balance.nvlink_domain must say how many ranks "
        "reach each other: balance.nvlink_domain=8 keeps replicas inside",
    ),
    "a model for other parallelism": (
        ["model=mixtral_8x7b"],
        256,
        "model.num_experts (8) must be a multiple of parallel.ep_size (64)",
    ),
    "stages that leave layers over": (
        ["+megatron.num_layers_in_last_pipeline_stage=9", "parallel.pp_size=4"],
        256,
        "megatron.num_layers_in_last_pipeline_stage (9) must leave layers that divide by the "
        "other stages: 85 of model.num_layers (94) for 3 of parallel.pp_size (4)",
    ),
    "a setting that Megatron has not": (
        ["+megatron.num_query_group=2"],
        256,
        "has no setting of this name; did you mean num_query_groups?",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_recipes_are_one_line_each(wrong: str, data: Path) -> None:
    given, num_ranks, line = WRONG[wrong]
    small = ["data.sequence_length=64", *given]
    problems = _problems(small, "qwen3_235b_256_gb200_bf16", num_ranks, data)
    assert [line in each for each in problems].count(True) == 1, problems
    assert not any("\n" in each for each in problems)


def test_an_nvlink_domain_that_is_said_or_not_needed_is_no_problem(data: Path) -> None:
    for given in (["balance.nvlink_domain=8"], ["balance=none"]):
        config = load_config(
            [
                f"data.path={data}",
                "data.sequence_length=64",
                "model.vocab_size=0",
                "hardware=server_8_h100",
                *given,
            ],
            config_name="qwen3_235b_256_gb200_bf16",
        )
        validate(config, num_ranks=256)


def test_a_run_directory_of_another_recipe(data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: traced\n")
    assert _problems([f"run_dir={tmp_path}"], "quickstart", 2, data) == [
        f"run_dir ({tmp_path}) is of a run of recipe traced, not quickstart: name another, or "
        "remove it"
    ]


def test_what_is_said_twice() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["balance=none", "balance=quota", "steps=3", "steps=4"], None, "quickstart")
    assert error.value.problems == ["balance is given twice: balance=none, balance=quota"]


def test_recipes_are_looked_for_in_both_folders(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [train]\n")
    with pytest.raises(ConfigError) as error:
        load_config([], str(tmp_path), "min")
    (problem,) = error.value.problems
    assert f"{tmp_path} has mine; {RECIPES} has deepseek_v3_256_gb200_bf16, " in problem
    assert problem.endswith("; did you mean mine?")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranks each start of a run has; none starts."""
    ranks: list[int] = []
    start = "megatron_ext.trainer.train.launch_ranks"
    monkeypatch.setattr(start, lambda *_, num_ranks, **__: ranks.append(num_ranks))
    return ranks


def _machine(monkeypatch: pytest.MonkeyPatch, *, gpus: int, cores: int = 8) -> None:
    monkeypatch.setattr("megatron_ext.trainer.train._num_gpus", lambda: gpus)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))


NO_GPU = (
    "hardware.summary (server with 8 H200 GPUs and one 400 Gbps adapter a GPU): there is no GPU "
    "here; size=tiny makes the model small enough for ranks on CPUs"
)
ONE_GPU = (
    "the number of ranks (2) must be <= 1, the GPUs of this machine: CUDA_VISIBLE_DEVICES= in "
    "front of the command puts ranks on CPUs"
)


@pytest.mark.parametrize(
    ("recipe", "gpus", "line"),
    [
        ("qwen3_235b_256_gb200_bf16", 0, TOO_FEW),
        ("qwen3_235b_256_gb200_bf16", 8, TOO_FEW),
        ("qwen3_30b_8_h200_bf16", 0, NO_GPU),
        ("quickstart", 1, ONE_GPU),
    ],
)
def test_a_run_that_a_machine_cannot_hold_does_not_start(
    recipe: str,
    gpus: int,
    line: str,
    data: Path,
    tmp_path: Path,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _machine(monkeypatch, gpus=gpus)
    given = [f"data.path={data}", f"run_dir={tmp_path}", "data.sequence_length=64"]
    config = load_config([*given, "model.vocab_size=0"], config_name=recipe)
    with pytest.raises(ConfigError) as error:
        train(config)
    assert line in error.value.problems
    assert started == []


@pytest.mark.parametrize(
    ("recipe", "gpus", "ranks"),
    [
        ("qwen3_30b_8_h200_bf16", 0, 2),
        ("quickstart", 8, 4),  # A batch of 8 samples in microbatches of 2.
        ("quickstart", 3, 2),
    ],
)
def test_a_small_run_takes_the_gpus_among_which_its_batch_divides(
    recipe: str,
    gpus: int,
    ranks: int,
    data: Path,
    tmp_path: Path,
    started: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _machine(monkeypatch, gpus=gpus)
    given = [f"data.path={data}", f"run_dir={tmp_path / 'run'}", "size=tiny", "precision=fp32"]
    with caplog.at_level("INFO"):
        train(load_config(given, config_name=recipe))
    assert started == [ranks]
    on = f"{ranks} ranks on {ranks} of {gpus} GPUs for" if gpus else f"{ranks} ranks for"
    assert f"starting {on} " in caplog.text


def test_a_library_that_cannot_be_built_is_a_line(
    data: Path, tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("the native part cannot be built: there is no c++: install a compiler")

    monkeypatch.setattr("megatron_ext.trainer.train.load_library", fail)
    given = [f"data.path={data}", f"run_dir={tmp_path / 'run'}", "size=tiny"]
    with pytest.raises(ConfigError, match="there is no c"):
        train(load_config(given, config_name="quickstart"))
    assert started == []
