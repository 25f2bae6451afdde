"""What excludes balancing is known, and said in the words of Megatron's command line.

Layer 1: no processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig, ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform

enable_cpu_platform()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402

from megatron_ext.mcore import limits  # noqa: E402
from megatron_ext.mcore import spec as spec_of  # noqa: E402
from megatron_ext.mcore.capacity import RankCapacity  # noqa: E402
from megatron_ext.mcore.check import check  # noqa: E402
from megatron_ext.mcore.even_layer import EvenMoELayer  # noqa: E402
from megatron_ext.mcore.limits import validate_for_balancing  # noqa: E402
from megatron_ext.methods.libra import limits as libra  # noqa: E402

RULES = (
    *(*limits.MUST_BE, *libra.LOCAL_FIRST, *libra.TO_PREDICT),
    *(*limits.MUST_BE_TO_FORCE, *limits.MUST_BE_TO_ADD, *limits.MUST_BE_TO_MEASURE),
)

FINE = {
    *("moe_layer_freq", "moe_layer_recompute", "moe_ffn_hidden_size", "moe_latent_size"),
    # The router's choices and losses, which balancing only reads.
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_grad_scale_func"),
    *("moe_router_load_balancing_type", "moe_router_topk", "moe_router_topk_limited_devices"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_dtype"),
    *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_fusion"),
    *("moe_router_quantile_balancing_ema", "moe_router_force_load_balancing"),
    *("moe_router_force_biased", "moe_n_hash_layers"),
    # Megatron's dispatcher then counts what comes.
    *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
    # Shared experts are not replicated.
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    "moe_shared_expert_glu_interleave_size",
    # How the dispatcher works, over physical experts as over logical ones.
    *("moe_token_dispatcher_type", "moe_enable_deepep", "moe_permute_fusion"),
    *("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    *("moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute"),
    *("moe_hybridep_num_sms_preprocessing", "moe_permute_fusion_into_hybridep"),
    *limits._PADS_UNEVEN,
    *("moe_flex_dispatcher_backend", "moe_ncclep_static_shape", "moe_ncclep_zero_copy"),
    "moe_ncclep_use_symm_mem",
    # What a rank has room for: `_capacity_problems`.
    "moe_expert_rank_capacity_factor",
    # How the experts compute.
    *("moe_apply_probs_on_input", "moe_grouped_gemm", "moe_mlp_glu_interleave_size"),
    # Dropped choices are none, and padded experts are even already.
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
    # What the stash moves are no slots, and its second run of a step plans alike.
    *("moe_paged_stash", "moe_paged_stash_page_size"),
    *("moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"),
    # Acts when Megatron decodes: there the layer refuses it (test_layer.py).
    "moe_pad_experts_for_cuda_graph_inference",
    # Parts of a prompt: forwards that no backward follows.
    "mlp_chunks_for_prefill",
    # Of what is read.
    "moe_per_layer_logging",
    # Refused by Megatron itself, or not read by it.
    *("moe_token_dropping", "moe_extended_tp"),
}
"""Settings of Megatron's MoE layers that change nothing for balancing."""


def moe_config(**settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        expert_model_parallel_size=2,
        add_bias_linear=False,
        **settings,
    )


def test_every_setting_of_moe_layers_is_judged() -> None:
    """Also those of a version of Megatron that nobody has looked at yet."""
    ruled = {rule.field for rule in RULES}
    names = {each.name for each in fields(TransformerConfig)}
    found = {name for name in names if name.startswith(("moe_", "mlp_chunks_"))}
    assert found - ruled - FINE == set(), "refuse these in limits.py, or call them fine here"
    assert {rule.field for rule in limits.MUST_BE} & FINE == set()


def test_all_problems_are_in_one_error() -> None:
    config = moe_config(
        cuda_graph_impl="local",
    )
    with pytest.raises(ConfigError) as error:
        check(config, BalanceConfig(strategy="magic", nvlink_domain=3))
    strategy, domain, graphs = error.value.problems
    assert "unknown strategy 'magic'" in strategy
    assert "balance.nvlink_domain (3) must divide" in domain
    assert graphs.startswith(
        "cuda_graph_impl ('local') must be 'none' or 'transformer_engine' or 'full_iteration'"
    )
    assert graphs.endswith("--cuda-graph-scope attn moe_router moe_preprocess)")
    check(config, BalanceConfig(strategy="none"))


SCOPES = (
    "cuda_graph_modules"
    if hasattr(TransformerConfig, "cuda_graph_modules")
    else ("cuda_graph_scope")
)


@pytest.mark.parametrize(
    ("impl", "scopes", "is_hybrid", "problem"),
    [
        ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], False, None),
        ("transformer_engine", ["attn", "mamba"], True, None),
        ("local", ["mamba", "moe_router"], True, None),
        ("local", ["attn"], False, "cuda_graph_impl ('local') must be 'none' or 'transformer_"),
        ("transformer_engine", [], False, f"{SCOPES} (whole layers) must be of attn, mlp, mamba,"),
        ("local", [], True, f"{SCOPES} (whole layers) must be of attn"),
        ("transformer_engine", ["attn", "moe"], False, f"{SCOPES} (attn, moe) must be of attn"),
    ],
)
@pytest.mark.parametrize("strategy", ["quota", "ideal"])
def test_graphs_end_before_the_plan(
    impl: str, scopes: list[str], is_hybrid: bool, problem: str | None, strategy: str
) -> None:
    settings = {"cuda_graph_impl": impl, SCOPES: scopes, "is_hybrid_model": is_hybrid}
    if "moe" in scopes:  # Megatron demands these.
        settings |= dict(
            moe_expert_capacity_factor=1.0,
            moe_pad_expert_input_to_capacity=True,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
        )
    found = validate_for_balancing(moe_config(**settings), BalanceConfig(strategy=strategy))
    graphs = [each for each in found if "graph" in each]
    assert len(graphs) == (problem is not None)
    for each in graphs:
        assert each.startswith(problem)
        assert each.endswith("--cuda-graph-scope attn moe_router moe_preprocess)")


def test_static_buffers_have_room_for_even_plans() -> None:
    """Only later versions of Megatron have these fields."""
    config = moe_config()
    config.moe_expert_rank_capacity_factor, config.moe_paged_stash = 1.05, True
    check(config, BalanceConfig())
    check(config, BalanceConfig(tolerance=0.1, slots=0))
    config.moe_hybridep_pad_uneven_dispatch_inputs = True
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError) as error:
        check(config, BalanceConfig(tolerance=0.1))
    uneven, factor = error.value.problems
    assert uneven.startswith("moe_hybridep_pad_uneven_dispatch_inputs (True) must be False with ")
    assert uneven.endswith("(leave out --moe-hybridep-pad-uneven-dispatch-inputs)")
    assert factor.startswith(
        "moe_expert_rank_capacity_factor (1.05) must be >= 1.1 with balance.tolerance=0.1, or "
    )
    assert factor.endswith("--moe-expert-rank-capacity-factor 1.1, or a smaller balance.tolerance)")


@pytest.mark.parametrize(
    "field", ["delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"]
)
def test_delayed_gradients_need_fused_ones(field: str) -> None:
    config = moe_config()
    config.gradient_accumulation_fusion = True
    setattr(config, field, True)
    check(config, BalanceConfig())
    config.gradient_accumulation_fusion = False
    with pytest.raises(ConfigError) as error:
        check(config, BalanceConfig())
    (problem,) = error.value.problems
    assert problem.startswith(f"{field} (True) must be False with gradient_accumulation_fusion")
    assert "Megatron itself" in problem
    assert problem.endswith("(leave out --no-gradient-accumulation-fusion)")


def test_shards_of_experts_exclude_what_they_were_not_run_with() -> None:
    config = moe_config()
    config.expert_gtp_weight_remat_size = 2
    check(config, BalanceConfig())
    check(config, BalanceConfig(objective="time", link_bandwidth=1e12, assignment_time=1e-6))
    for balance in (dict(strategy="libra"), dict(local_first=True), dict(objective="time")):
        with pytest.raises(ConfigError, match=r"expert_gtp_weight_remat_size \(2\) must be 1"):
            check(config, BalanceConfig(**balance))
    config.recompute_granularity, config.recompute_modules = "selective", ["layernorm"]
    check(config, BalanceConfig())
    config.recompute_modules = ["moe"]
    with pytest.raises(ConfigError, match="must be 1 with recomputed experts: "):
        check(config, BalanceConfig())
    config.recompute_granularity = None
    config.add_bias_linear, config.quant_recipe = True, object()
    with pytest.raises(ConfigError, match="must be 1 with add_bias_linear and quant_recipe: repl"):
        check(config, BalanceConfig())


@pytest.mark.parametrize("balance", [dict(strategy="libra"), dict(local_first=True)], ids=str)
def test_the_combined_schedule_excludes_what_needs_whole_layers(balance: dict[str, Any]) -> None:
    config = moe_config()
    config.overlap_moe_expert_parallel_comm = True
    config.moe_token_dispatcher_type = "alltoall"
    check(config, BalanceConfig())
    with pytest.raises(ConfigError, match=r"^overlap_moe_expert_parallel_comm \(True\) .* False"):
        check(config, BalanceConfig(**balance))


def test_float16_gradients_need_a_transport_that_adds_them() -> None:
    config = moe_config(fp16=True)
    with pytest.raises(ConfigError) as error:
        check(config, BalanceConfig())
    (problem,) = error.value.problems
    assert problem.startswith("fp16 (True) must be False with transport shared_memory")
    assert "balance.transport=collective" in problem
    assert problem.endswith("(leave out --fp16)")
    check(config, BalanceConfig(transport="collective"))


@pytest.mark.parametrize("grouped", ["fp4", "use_transformer_engine_op_fuser"])
def test_kernels_for_all_experts_of_a_rank_take_so_many(grouped: str) -> None:
    config = moe_config()
    config.num_moe_experts = 2 * 63
    check(config, BalanceConfig(slots=2))
    config.__dict__[grouped] = "e2m1" if grouped == "fp4" else True
    config.fp4_recipe, config.hidden_size, config.moe_ffn_hidden_size = "nvfp4", 32, 32
    check(config, BalanceConfig(slots=1))
    with pytest.raises(ConfigError) as error:
        check(config, BalanceConfig(slots=2))
    (problem,) = error.value.problems
    assert problem.startswith("balance.slots (2) must be <= 1: ")
    assert f"for {grouped} take 64 experts, and a rank has 63" in problem
    assert "--expert-model-parallel-size" in problem


def test_predictions_are_not_made_from_another_part_of_the_sequence() -> None:
    config = moe_config()
    config.mlp_chunks_for_training = 2
    check(config, BalanceConfig())
    with pytest.raises(ConfigError, match=r"^mlp_chunks_for_training \(2\) must be 1 with balance"):
        check(config, BalanceConfig(strategy="libra"))


def test_forced_even_routing_has_limits_of_its_own() -> None:
    """And its layer looks at them by itself, before anything of Megatron's is built."""
    ideal = BalanceConfig(strategy="ideal", slots=257, nvlink_domain=3)
    config = moe_config(fp16=True)
    config.moe_paged_stash = True
    check(config, ideal)
    config.moe_pad_expert_input_to_capacity = True
    for refuse in (check, lambda config, balance: EvenMoELayer(config, balance=balance)):
        with pytest.raises(ValueError, match=r"^moe_pad_expert_input_to_capacity") as error:
            refuse(config, ideal)
        assert "with balance.strategy=ideal" in str(error.value)


def test_layers_of_inference_are_refused() -> None:
    config = moe_config()
    config.transformer_impl = "inference_optimized"
    with pytest.raises(ConfigError, match=r"^transformer_impl \('inference_optimized'\) must be "):
        check(config, BalanceConfig())


def test_the_class_of_the_experts_is_checked_where_a_spec_is_given() -> None:
    config, balance = moe_config(), BalanceConfig()
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    check(config, balance, spec)
    config.fp8 = "e4m3"  # Experts of layers without replicas may quantize as they like.
    for without_plans in ("none", "ideal"):
        check(config, BalanceConfig(strategy=without_plans), spec)
    own = spec_of.replace_module(spec, SequentialMLP, type("Own", (SequentialMLP,), {}))
    for each in (spec, own):
        with pytest.raises(ConfigError, match=r"fp8=e4m3 must not be set with SequentialMLP: "):
            check(config, balance, each)
    config.fp8 = None
    dense = get_gpt_layer_local_spec()
    with pytest.raises(ConfigError, match=r"spec has no MoE layer .*\bTransformerLayer\b"):
        check(config, balance, dense)
    with pytest.raises(ConfigError) as error:
        check(config, BalanceConfig(strategy="magic"), spec)
    assert len(error.value.problems) == 1, "the same is said once"


def test_settings_that_are_no_balance_config() -> None:
    with pytest.raises(TypeError, match=r"balance \(\{'slots': 2\}\) must be a BalanceConfig"):
        check(moe_config(), {"slots": 2})  # type: ignore[arg-type]


def flags_of_megatron() -> Iterator[str]:
    from megatron.training.arguments import add_megatron_arguments

    for action in add_megatron_arguments(argparse.ArgumentParser())._actions:
        yield from action.option_strings


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="the wheel of this megatron-core has no megatron.training",
)
def test_flags_are_those_of_megatrons_programs() -> None:
    """But for fields that this version of Megatron lacks."""
    known = {each.name for each in fields(TransformerConfig)}
    flags = set(flags_of_megatron())
    for rule in RULES:
        if rule.field in known:
            # Some rules are for such models only.
            model = {"gradient_accumulation_fusion": False, "fp8": "e4m3", "fp4": "e2m1"}
            settings = {**model, rule.field: object()}
            problem = rule.problem(type("Config", (), settings), "balance")
            assert problem is not None
            named = re.findall(r"--\S+", problem.rpartition("(")[2].rstrip(")"))
            assert named, rule.field
            assert flags.issuperset(named), rule.field


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        (dict(moe_use_grouped_tensor=True), ["moe_use_grouped_tensor (True)"]),
        (dict(moe_use_grouped_tensor=True, use_transformer_engine_op_fuser=True), []),
        (dict(moe_dispatch_fwd_dtype="bf16", moe_combine_bwd_dtype="bf16"), []),
        (dict(moe_dispatch_fwd_dtype="mxfp8"), ["moe_dispatch_fwd_dtype ('mxfp8')"]),
        (dict(moe_combine_bwd_dtype="mxfp8"), ["moe_combine_bwd_dtype ('mxfp8')"]),
    ],
)
def test_settings_since_0_20(settings: dict[str, Any], refused: list[str]) -> None:
    """Of a version that the tests do not run with."""
    config = SimpleNamespace(gradient_accumulation_fusion=True, **settings)
    found = limits.broken(limits.MUST_BE, config, "balance")
    assert [problem.partition(" must be ")[0] for problem in found] == refused


@pytest.mark.skipif(
    not hasattr(TransformerConfig, "moe_expert_rank_capacity_factor"), reason="no rank has limits"
)
def test_rows_for_the_op_fuser_are_padded_since_0_20() -> None:
    config = SimpleNamespace(
        fp8=None,
        fp4=None,
        use_transformer_engine_op_fuser=True,
        moe_flex_dispatcher_backend="hybridep",
    )
    before = RankCapacity.of(config, 1.05)
    config.moe_use_grouped_tensor = True
    assert (before.pad, RankCapacity.of(config, 1.05).pad) == (1, 256)


def _whole_steps(**settings: Any) -> Any:
    """A config as recipes set it: not of this Megatron, which may lack the fields or check more."""
    fields = dict(
        num_moe_experts=8,
        expert_model_parallel_size=2,
        cuda_graph_impl="full_iteration",
        cuda_graph_warmup_steps=3,
        moe_pad_expert_input_to_capacity=False,
        moe_expert_rank_capacity_factor=1.5,
        moe_flex_dispatcher_backend="hybridep",
    )
    return SimpleNamespace(**fields | settings)


@pytest.mark.parametrize(
    ("settings", "balance", "problem"),
    [
        ({}, {}, None),
        ({}, dict(strategy="exact"), None),
        ({}, dict(strategy="ideal"), None),
        ({}, dict(objective="time"), None),
        (dict(cuda_graph_impl="local", cuda_graph_modules="full_iteration"), {}, None),
        (dict(cuda_graph_impl="local", cuda_graph_scope=["full_iteration"]), {}, None),
        (dict(moe_expert_rank_capacity_factor=None, expert_model_parallel_size=1), {}, None),
        (
            dict(moe_expert_rank_capacity_factor=None, moe_pad_expert_input_to_capacity=True),
            {},
            None,
        ),
        (
            dict(moe_expert_rank_capacity_factor=None),
            {},
            "moe_expert_rank_capacity_factor (None) must be set with CUDA graphs of whole steps",
        ),
        (
            dict(cuda_graph_impl="local", cuda_graph_modules="full_iteration,attn"),
            {},
            "cuda_graph_impl ('local') must be",
        ),
        (dict(cuda_graph_warmup_steps=0), {}, "cuda_graph_warmup_steps (0) must be >= 1 with"),
        ({}, dict(strategy="eplb"), "balance.strategy (eplb) must be quota or exact with"),
        ({}, dict(strategy="libra"), "balance.strategy (libra) must be quota or exact with"),
        ({}, dict(check_plans=True), "balance.check_plans (True) must be False with"),
        ({}, dict(transport="collective"), "balance.transport (collective) must be another with"),
    ],
)
def test_graphs_of_whole_steps_ask_no_host(
    settings: dict[str, Any], balance: dict[str, Any], problem: str | None
) -> None:
    found = validate_for_balancing(_whole_steps(**settings), BalanceConfig(**balance))
    assert [each[: len(problem or "")] for each in found] == ([problem] if problem else [])
