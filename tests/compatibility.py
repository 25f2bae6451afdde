"""Writes docs/compatibility.md, the table of Megatron's options that work with balancing.

A test that shows that an option works carries `@pytest.mark.option("NAME")`, NAME from `OPTIONS`.
Every run of the tests notes the outcomes of such tests, by version of Megatron-Core, in
`build/compatibility/`.

    python -m tests.compatibility       writes the page, its record and README's table

The rules that refuse an option are in `megatron_ext/mcore/limits.py` and
`megatron_ext/methods/libra/limits.py`; `published_recipes.py` counts recipes that use an option.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.published_recipes import SETTINGS, read_record

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
README = ROOT / "README.md"
RECORD = ROOT / "tests" / "compatibility.json"
"""Outcomes of the tests when the page was written: {version: {option: {test: outcome}}}."""
_NOTES = ROOT / "build" / "compatibility"
VERSIONS = ("0.16.1", "0.19.2")
"""The versions of Megatron-Core that the tests run with, under Python 3.11 and 3.12."""


@dataclass(frozen=True)
class Option:
    """A row of the page."""

    title: str
    share: str = ""
    """How many published recipes use the option: `name` or `name=value` of settings, or words."""
    twins: bool = False
    """Whether compiled parts of other packages had to be replaced for the tests."""
    brief: str = ""
    """The option in README's words; README has a row for each option with such words."""


OPTIONS = {
    "te_grouped": Option(
        "`TEGroupedMLP` (`--moe-grouped-gemm` with Transformer Engine)",
        "all",
        True,
        brief="Transformer Engine's grouped experts",
    ),
    "sequential": Option(
        "`SequentialMLP` (without `--moe-grouped-gemm`)", brief="Megatron's `SequentialMLP`"
    ),
    "grouped_mm": Option("this package's `GroupedExperts` (`megatron_ext.grouped_mm_spec`)"),
    "te_sequential": Option("`SequentialMLP` of Transformer Engine's linear layers", "", True),
    "expert_bias_terms": Option("biases in the experts (`add_bias_linear`)"),
    "latent": Option("latent MoE (`--moe-latent-size`)", twins=True),
    "glu_interleave": Option(
        "interleaved gate and linear part (`moe_mlp_glu_interleave_size`)",
        "moe_mlp_glu_interleave_size",
        True,
    ),
    "op_fuser": Option(
        "Transformer Engine's op fuser (`--use-transformer-engine-op-fuser`)",
        "use_transformer_engine_op_fuser",
        True,
        brief="Transformer Engine's op fuser",
    ),
    "fusion": Option(
        "gradient accumulation fusion, Megatron's default",
        "default",
        True,
        brief="fused gradient accumulation",
    ),
    "bf16_gradients": Option("bfloat16 gradients (without `--accumulate-allreduce-grads-in-fp32`)"),
    "fp16": Option("float16 (`--fp16`), with `balance.transport=collective`"),
    "mxfp8": Option("MXFP8 (`--fp8-recipe mxfp8`)", "fp8_recipe=mxfp8", True, brief="MXFP8"),
    "tensorwise": Option(
        "FP8 with a scale a tensor (`--fp8-recipe tensorwise`)",
        "fp8 and fp8_recipe=tensorwise",
        True,
        brief="FP8",
    ),
    "blockwise": Option(
        "FP8 with a scale a block (`--fp8-recipe blockwise`)", "fp8_recipe=blockwise", True
    ),
    "nvfp4": Option("NVFP4 (`--fp4-format`)", "fp4", True, brief="NVFP4"),
    "quantized_parameters": Option(
        "quantized parameters (`--fp8-param-gather`, `--fp4-param-gather`)", twins=True
    ),
    "bf16_layers": Option("layers in bfloat16 at the ends (`first_last_layers_bf16`)", twins=True),
    "precision_by_layer": Option(
        "precision by layer (`--te-precision-config-file`)", "quant_recipe", True
    ),
    "quantized_padding": Option(
        "the router pads (`--moe-router-padding-for-quantization`)", twins=True
    ),
    "rank_capacity": Option(
        "HybridEP's buffers of fixed size (`--moe-expert-rank-capacity-factor`)",
        "moe_expert_rank_capacity_factor",
        True,
        brief="rank capacity factor",
    ),
    "full_iteration": Option(
        "CUDA graphs of whole steps (`--cuda-graph-impl full_iteration`)",
        "cuda_graph_impl=full_iteration or cuda_graph_modules=full_iteration",
        True,
        brief="CUDA graphs of whole steps",
    ),
    "paged_stash": Option(
        "paged stash of activations (`--moe-paged-stash`)",
        "moe_paged_stash",
        True,
        brief="paged stash of activations",
    ),
    "distributed_optimizer": Option(
        "distributed optimizer with `--overlap-grad-reduce`, `--overlap-param-gather`",
        "overlap_param_gather",
        brief="distributed optimizer with overlap",
    ),
    "megatron_fsdp": Option(
        "Megatron-FSDP (`--use-megatron-fsdp`)", "use_megatron_fsdp", True, brief="Megatron-FSDP"
    ),
    "precision_aware": Option(
        "precision-aware optimizer (`--use-precision-aware-optimizer`)", twins=True
    ),
    "single_grouped_weight": Option(
        "one weight for all experts of a linear (`--moe-single-grouped-weight`)", twins=True
    ),
    "alltoall": Option("dispatcher `alltoall`", "moe_token_dispatcher_type=alltoall"),
    "allgather": Option("dispatcher `allgather`"),
    "nccl_ep": Option(
        "dispatcher `flex` over NCCL EP (`--moe-flex-dispatcher-backend ncclep`)",
        "moe_flex_dispatcher_backend=ncclep",
        True,
    ),
    "nccl_ep_zero_copy": Option(
        "the same without copies (`--moe-ncclep-zero-copy`)", "moe_ncclep_zero_copy", True
    ),
    "routing_ids": Option("routing as top-k ids in place of a map"),
    "expert_tp": Option(
        "expert tensor parallelism (`--expert-tensor-parallel-size` > 1)", "nearly none"
    ),
    "expert_shards": Option(
        "sharded expert weights (`--expert-tensor-parallel-num-weight-shards`)",
        "expert_gtp_weight_remat_size",
        True,
    ),
    "sequence_parallel": Option("tensor parallelism with sequence parallelism"),
    "context_parallel": Option("context parallelism"),
    "pipeline": Option(
        "pipeline parallelism, also interleaved", brief="pipeline parallelism, also interleaved"
    ),
    "mlp_chunks": Option("MLPs in parts of the sequence (`--mlp-chunks-for-training`)"),
    "uneven_stages": Option("uneven pipeline stages"),
    "expert_dp": Option("expert data parallelism > 1"),
    "several_models": Option("several models in a process"),
    "mtp": Option(
        "multi-token prediction (`--mtp-num-layers`)",
        "mtp_num_layers",
        brief="multi-token prediction",
    ),
    "mtp_repeated": Option(
        "repeated layer of it (`--mtp-use-repeated-layer`)", "mtp_use_repeated_layer"
    ),
    "dense_layers": Option("dense layers between (`--moe-layer-freq`)"),
    "hybrid": Option("hybrid models"),
    "recompute_moe": Option(
        "recompute of MoE layers (`--recompute-modules moe`)",
        "recompute_modules=moe",
        brief="recomputed MoE layers",
    ),
    "recompute_act": Option(
        "recompute of activations (`--recompute-modules moe_act`)",
        "recompute_modules=moe_act",
        True,
    ),
    "recompute_full": Option(
        "recompute of whole layers, uniform and block", "recompute_granularity=full"
    ),
    "partial_graphs": Option(
        "partial CUDA graphs: scopes `attn`, `mlp`, `mamba`, `moe_router`, `moe_preprocess`",
        "cuda_graph_impl=transformer_engine",
        True,
        brief="partial CUDA graphs",
    ),
    "overlap": Option(
        "overlap of two microbatches (`--overlap-moe-expert-parallel-comm`)",
        "overlap_moe_expert_parallel_comm",
        brief="overlap of two microbatches",
    ),
    "delayed_gradients": Option(
        "delayed weight gradients (`--delay-wgrad-compute`)",
        "delay_wgrad_compute",
        True,
        brief="delayed weight gradients",
    ),
    "beside_dispatch": Option(
        "weight gradients beside the dispatch's backward "
        "(`--overlap-dispatch-backward-with-experts-wgrad`)",
        twins=True,
    ),
    "activation_offload": Option(
        "fine-grained offload of activations (`--fine-grained-activation-offloading`)",
        "fine_grained_activation_offloading",
        True,
    ),
    "shared_experts": Option("shared experts"),
    "shared_overlap": Option(
        "their overlap (`--moe-shared-expert-overlap`)", "moe_shared_expert_overlap"
    ),
    "aux_loss": Option("balancing losses of all kinds, z-loss"),
    "expert_bias": Option("expert bias (`--moe-router-enable-expert-bias`)"),
    "group_limited": Option("group-limited top-k"),
    "sinkhorn": Option("sinkhorn routing"),
    "padding_mask": Option("padding masks"),
    "router_replay": Option("router replay"),
    "fused_router": Option(
        "fused router (`--moe-router-fusion`)", "moe_router_fusion", True, brief="fused router"
    ),
    "fused_permute": Option(
        "fused permutation (`--moe-permute-fusion`)", "moe_permute_fusion", True
    ),
    "capacity": Option(
        "capacity factor (`--moe-expert-capacity-factor`)", "moe_expert_capacity_factor"
    ),
    "forward_only": Option("evaluation, log-probability passes, prefill"),
    "pretrain": Option("Megatron-LM's programs (`python -m megatron_ext.pretrain`)"),
    "bridge": Option("`provider.transformer_layer_spec` of Megatron-Bridge and NeMo"),
    "checkpoints": Option(
        "distributed checkpoints, with and without balancing", brief="distributed checkpoints"
    ),
}


def note_options(items: Iterable[pytest.Item]) -> None:
    """Let the reports of marked tests name their options; refuse names that `OPTIONS` lacks."""
    for item in items:
        for marker in item.iter_markers("option"):
            (name,) = marker.args
            if name not in OPTIONS:
                raise pytest.UsageError(f"{item.nodeid}: option {name!r} is not in OPTIONS")
            item.user_properties.append(("option", name))


_WORST = ("failed", "passed", "skipped")


class Notes:
    """Notes the outcomes of a run's marked tests."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the worst outcome among the cases of a test that ran or was skipped."""
        if report.when != "call" and not report.skipped:
            return
        test = report.nodeid.partition("[")[0]
        for key, name in report.user_properties:
            if key == "option":
                outcomes = self._found.setdefault(str(name), {})
                worst = min(outcomes.get(test, report.outcome), report.outcome, key=_WORST.index)
                outcomes[test] = worst

    def pytest_sessionfinish(self) -> None:
        """Add this run's notes to those of earlier runs with this version."""
        if not self._found:
            return
        _NOTES.mkdir(parents=True, exist_ok=True)
        file = _NOTES / f"{version('megatron-core')}.json"
        noted = json.loads(file.read_text()) if file.exists() else {}
        for name, outcomes in self._found.items():
            earlier = noted.setdefault(name, {})
            for test, outcome in outcomes.items():
                # Those of Transformer Engine are skipped where the others run.
                if outcome != "skipped" or test not in earlier:
                    earlier[test] = outcome
        file.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")


Record = dict[str, dict[str, dict[str, str]]]


def read_notes() -> Record:
    """Return the outcomes that this checkout's runs noted, by version and option.

    Raises:
        FileNotFoundError: A version was not run.
    """
    return {each: json.loads((_NOTES / f"{each}.json").read_text()) for each in VERSIONS}


def page(record: Record) -> str:
    """Return the page for a record."""
    return "\n".join([_INTRODUCTION, *_table(record), _REFUSED_HEAD, *_refusals(), ""])


def readme(text: str, record: Record) -> str:
    """Return README's text with the short table of a record between its marks."""
    before, begin, rest = text.partition("<!-- written by python -m tests.compatibility -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{chr(10).join(_short_table(record))}\n{end}{after}"


def _short_table(record: Record) -> list[str]:
    return [
        f"| option | {' | '.join(VERSIONS)} |",
        "|---" * (1 + len(VERSIONS)) + "|",
        *(
            f"| {option.brief} | {' | '.join(_words(option, _outcomes(name, record)))} |"
            for name, option in OPTIONS.items()
            if option.brief
        ),
    ]


def _table(record: Record) -> list[str]:
    head = f"| option | recipes | {' | '.join(VERSIONS)} | test |"
    rows = [_row(name, option, record) for name, option in OPTIONS.items()]
    return [head, "|---" * (3 + len(VERSIONS)) + "|", *(row for row in rows if row)]


_INTRODUCTION = f"""# Compatibility

`python -m tests.compatibility` writes this page from the outcomes of the tests, which ran with
Megatron-Core {VERSIONS[0]} under Python 3.11 and {VERSIONS[1]} under Python 3.12. All tests ran on
CPU ranks; what has run on a GPU is in [results](results.md).

- *works*: training with balancing equals training without balancing, or the property in the test's
  name holds.
- *works on twins*: the same, with code of PyTorch in place of compiled parts of Transformer Engine
  or Apex.
- *absent*: that version of Megatron-Core does not have the option.

The column *recipes* says how many of the [312 MoE performance recipes of
megatron-bridge 0.6.2](published-recipes.md) use the option.
"""

_REFUSED_HEAD = """
## Refused

`megatron_ext.check(config, balance)` lists these settings before a model is built, and limits of
sizes, versions, GPUs and whole-step graphs, which have no row here; each balanced layer refuses
them again when it is built. A row without an entry under *with* holds for every strategy but `none`
and `ideal`.

| setting | with | allowed | reason, and the way out |
|---|---|---|---|"""


def _outcomes(name: str, record: Record) -> dict[str, dict[str, str]]:
    return {each: record[each].get(name, {}) for each in VERSIONS}


def _row(name: str, option: Option, record: Record) -> str | None:
    found = _outcomes(name, record)
    tests = {test for outcomes in found.values() for test in outcomes}
    if not tests:
        return None
    named = ", ".join(f"`{test}`" for test in sorted(tests)[:2])
    columns = (option.title, _num_recipes(option.share), *_words(option, found), named)
    return f"| {' | '.join(columns)} |"


def _words(option: Option, found: dict[str, dict[str, str]]) -> list[str]:
    return [_word(option, set(found[each].values())) for each in VERSIONS]


def _word(option: Option, outcomes: set[str]) -> str:
    if "failed" in outcomes:
        return "fails"
    if "passed" in outcomes:
        return "works on twins" if option.twins else "works"
    return "absent"


def _num_recipes(share: str) -> str:
    """Return how many recipes have a setting, or all of several, or one of several.

    Other words stay as they are.
    """
    groups = [
        [each.partition("=")[::2] for each in group.split(" and ")] for group in share.split(" or ")
    ]
    if not all(field in SETTINGS for asked in groups for field, _ in asked):
        return share
    return str(
        sum(
            any(
                all(
                    value in recipe[field].split() if value else recipe[field]
                    for field, value in asked
                )
                for asked in groups
            )
            for recipe in read_record()
        )
    )


def _refusals() -> list[str]:
    # Here, as Megatron is imported with it.
    from megatron_ext.balance.strategies import STRATEGIES
    from megatron_ext.balance.strategies.strategy import ForcesEven
    from megatron_ext.mcore import limits
    from megatron_ext.methods.libra import limits as libra
    from megatron_ext.transport import TRANSPORTS

    forces = [name for name, each in STRATEGIES.items() if isinstance(each.kind, ForcesEven)]
    predicts = [name for name, each in STRATEGIES.items() if each.predicts]
    transports = [name for name, each in TRANSPORTS.items() if not each.adds_float16]
    return [
        f"| `{rule.field}` "
        f"| {', '.join(f'`{each}`' for each in _used_with(rule, used_with))} "
        f"| {' or '.join(f'`{value!r}`' for value in rule.allowed)} "
        f"| {rule.reason}; {rule.way_out} |"
        for used_with, rules in (
            ([], limits.MUST_BE),
            (predicts, libra.TO_PREDICT),
            (forces, limits.MUST_BE_TO_FORCE),
            (["balance.local_first"], libra.LOCAL_FIRST),
            (transports, limits.MUST_BE_TO_ADD),
            (["balance.objective=time"], limits.MUST_BE_TO_MEASURE),
        )
        for rule in rules
    ]


def _used_with(rule: Any, used_with: Sequence[str]) -> Sequence[str]:
    from megatron_ext.mcore.limits import quantization_of

    return ("fp8", "fp4") if rule.only_with is quantization_of else used_with


def main() -> None:
    """Write the page, its record and README's table."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    try:
        record = read_notes()
    except FileNotFoundError as error:
        sys.exit(f"error: {error.filename} is missing: run all tests with that version first")
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(record))
    README.write_text(readme(README.read_text(), record))


if __name__ == "__main__":
    from megatron_ext.cpu_platform import enable_cpu_platform

    enable_cpu_platform()
    main()
