"""What works with which options of Megatron, as the tests found it: docs/compatibility.md.

A test that shows that an option works carries `@pytest.mark.option("NAME")`, NAME from `OPTIONS`.
Every run notes what became of such tests, by version of Megatron-Core, in `build/compatibility/`.

    python -m tests.compatibility       writes the page, its record and README's rows

What is refused stands in `megatron_ext/mcore/limits.py`. How many recipes use an option was counted
in the 293 MoE performance recipes of megatron-bridge 0.6.2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
README = ROOT / "README.md"
RECORD = ROOT / "tests" / "compatibility.json"
"""What the tests did when the page was written: {version: {option: {test: outcome}}}."""
_NOTES = ROOT / "build" / "compatibility"
VERSIONS = ("0.16.1", "0.19.2")
"""The versions of Megatron-Core that the tests run with, under Python 3.11 and 3.12."""


@dataclass(frozen=True)
class Option:
    """A row of the page."""

    title: str
    share: str = ""
    """How many of the 293 recipes use it."""
    twins: bool = False
    """Whether compiled parts of other packages had to be replaced for the tests."""


OPTIONS = {
    "te_grouped": Option(
        "`TEGroupedMLP` (`--moe-grouped-gemm` with Transformer Engine)", "all", True
    ),
    "sequential": Option("`SequentialMLP` (without `--moe-grouped-gemm`)"),
    "grouped_mm": Option("this package's `GroupedExperts` (`megatron_ext.grouped_mm_spec`)"),
    "te_sequential": Option("`SequentialMLP` of Transformer Engine's linear layers", "", True),
    "expert_bias_terms": Option("biases in the experts (`add_bias_linear`)"),
    "latent": Option("latent MoE (`--moe-latent-size`)", twins=True),
    "glu_interleave": Option(
        "interleaved gate and linear part (`moe_mlp_glu_interleave_size`)", "53", True
    ),
    "op_fuser": Option(
        "Transformer Engine's op fuser (`--use-transformer-engine-op-fuser`)", "59", True
    ),
    "fusion": Option("gradient accumulation fusion, Megatron's default", "default", True),
    "bf16_gradients": Option(
        "bfloat16 gradients (without `--accumulate-allreduce-grads-in-fp32`)", "289"
    ),
    "fp16": Option("float16 (`--fp16`), with `balance.transport=collective`"),
    "distributed_optimizer": Option(
        "distributed optimizer with `--overlap-grad-reduce`, `--overlap-param-gather`", "65"
    ),
    "precision_aware": Option(
        "precision-aware optimizer (`--use-precision-aware-optimizer`)", twins=True
    ),
    "single_grouped_weight": Option(
        "one weight for all experts of a linear (`--moe-single-grouped-weight`)", twins=True
    ),
    "alltoall": Option("dispatcher `alltoall`", "11"),
    "allgather": Option("dispatcher `allgather`"),
    "routing_ids": Option("routing as top-k ids in place of a map"),
    "expert_tp": Option(
        "expert tensor parallelism (`--expert-tensor-parallel-size` > 1)", "nearly none"
    ),
    "sequence_parallel": Option("tensor parallelism with sequence parallelism"),
    "context_parallel": Option("context parallelism"),
    "pipeline": Option("pipeline parallelism, also interleaved"),
    "mlp_chunks": Option("MLPs in parts of the sequence (`--mlp-chunks-for-training`)"),
    "uneven_stages": Option("uneven pipeline stages"),
    "expert_dp": Option("expert data parallelism > 1"),
    "several_models": Option("several models in a process"),
    "mtp": Option("multi-token prediction (`--mtp-num-layers`)", "30"),
    "mtp_repeated": Option("repeated layer of it (`--mtp-use-repeated-layer`)", "26"),
    "dense_layers": Option("dense layers between (`--moe-layer-freq`)"),
    "hybrid": Option("hybrid models"),
    "recompute_moe": Option("recompute of MoE layers (`--recompute-modules moe`)", "11"),
    "recompute_act": Option("recompute of activations (`--recompute-modules moe_act`)", "17", True),
    "recompute_full": Option("recompute of whole layers, uniform and block", "4"),
    "activation_offload": Option(
        "fine-grained offload of activations (`--fine-grained-activation-offloading`)", "", True
    ),
    "shared_experts": Option("shared experts"),
    "shared_overlap": Option("their overlap (`--moe-shared-expert-overlap`)", "C"),
    "aux_loss": Option("balancing losses of all kinds, z-loss"),
    "expert_bias": Option("expert bias (`--moe-router-enable-expert-bias`)"),
    "group_limited": Option("group-limited top-k"),
    "sinkhorn": Option("sinkhorn routing"),
    "padding_mask": Option("padding masks"),
    "router_replay": Option("router replay"),
    "fused_router": Option("fused router (`--moe-router-fusion`)", "232", True),
    "fused_permute": Option("fused permutation (`--moe-permute-fusion`)", "25, C", True),
    "capacity": Option("capacity factor (`--moe-expert-capacity-factor`)", "16"),
    "forward_only": Option("evaluation, log-probability passes, prefill"),
    "pretrain": Option("Megatron-LM's programs (`python -m megatron_ext.pretrain`)"),
    "bridge": Option("`provider.transformer_layer_spec` of Megatron-Bridge and NeMo"),
    "checkpoints": Option("distributed checkpoints, with and without balancing"),
}


def note_options(items: Iterable[pytest.Item]) -> None:
    """Let the reports of marked tests name their options; refuse names that `OPTIONS` lacks."""
    for item in items:
        for marker in item.iter_markers("option"):
            (name,) = marker.args
            if name not in OPTIONS:
                raise pytest.UsageError(f"{item.nodeid}: option {name!r} is not in OPTIONS")
            item.user_properties.append(("option", name))


_REFUSED_SHARES = {
    "fp8": "153",
    "fp4": "25",
    "cuda_graph_impl": "158",
    "delay_wgrad_compute": "63",
    "overlap_moe_expert_parallel_comm": "64",
    "moe_paged_stash": "44",
    "moe_expert_rank_capacity_factor": "50",
}
"""How many of the 293 recipes set what is refused, by field of TransformerConfig."""


_WORST = ("failed", "passed", "skipped")


class Notes:
    """Notes what became of the marked tests of a run."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that was called, or skipped before: of its cases, the worst that was run."""
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
    """Return what the runs of this checkout noted, by version and option.

    Raises:
        FileNotFoundError: A version was not run.
    """
    return {each: json.loads((_NOTES / f"{each}.json").read_text()) for each in VERSIONS}


def page(record: Record) -> str:
    """Return the page for a record."""
    return "\n".join([_INTRODUCTION, *_table(record), _REFUSED, *_refusals(), ""])


def readme(text: str, record: Record) -> str:
    """Return README's text with the first rows of the page between its marks."""
    before, begin, rest = text.partition("<!-- the first rows of docs/compatibility.md -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    return f"{before}{begin}{chr(10).join(_table(record)[:_FIRST_ROWS])}\n{end}{after}"


_FIRST_ROWS = 12
"""Lines of the table that README shows, with its head."""


def _table(record: Record) -> list[str]:
    head = f"| option | recipes | {' | '.join(VERSIONS)} | test |"
    rows = [_row(name, option, record) for name, option in OPTIONS.items()]
    return [head, "|---" * (3 + len(VERSIONS)) + "|", *(row for row in rows if row)]


_INTRODUCTION = f"""# Compatibility

Written by `python -m tests.compatibility` from what the tests did, with Megatron-Core {VERSIONS[0]}
under Python 3.11 and {VERSIONS[1]} under Python 3.12. All ran on CPU ranks: nothing has run on a
GPU. *Works* means that training with balancing equals training without it, or what the named test
says. *Works on twins*: compiled parts of Transformer Engine or Apex were replaced by PyTorch's.
*Absent*: that version has no such thing.

"Recipes" counts who uses an option among the 293 MoE performance recipes of megatron-bridge 0.6.2;
C: its convergence recipes.
"""

_REFUSED = """
## Refused

`megatron_ext.check(config, balance)` says so before anything is built, and each balanced layer when
it is built. Where nothing else is said, of every strategy but `none` and `ideal`.

| setting | with | recipes | allowed | why, and the way out |
|---|---|---|---|---|"""


def _row(name: str, option: Option, record: Record) -> str | None:
    found = {each: record[each].get(name, {}) for each in VERSIONS}
    tests = {test for outcomes in found.values() for test in outcomes}
    if not tests:
        return None
    words = [_word(option, set(found[each].values())) for each in VERSIONS]
    named = ", ".join(f"`{test}`" for test in sorted(tests)[:2])
    return f"| {option.title} | {option.share} | {' | '.join(words)} | {named} |"


def _word(option: Option, outcomes: set[str]) -> str:
    if "failed" in outcomes:
        return "fails"
    if "passed" in outcomes:
        return "works on twins" if option.twins else "works"
    return "absent"


def _refusals() -> list[str]:
    # Here, as Megatron is imported with it.
    from megatron_ext.balance.strategies import STRATEGIES
    from megatron_ext.balance.strategies.strategy import ForcesEven
    from megatron_ext.mcore import limits
    from megatron_ext.transport import TRANSPORTS

    forces = [name for name, each in STRATEGIES.items() if isinstance(each.kind, ForcesEven)]
    predicts = [name for name, each in STRATEGIES.items() if each.predicts]
    transports = [name for name, each in TRANSPORTS.items() if not each.adds_float16]
    return [
        f"| `{rule.field}` | {', '.join(f'`{each}`' for each in used_with)} "
        f"| {_REFUSED_SHARES.get(rule.field, '')} "
        f"| {' or '.join(f'`{value!r}`' for value in rule.allowed)} "
        f"| {rule.reason}; {rule.way_out} |"
        for used_with, rules in (
            ([], limits.MUST_BE),
            (predicts, limits.MUST_BE_TO_PREDICT),
            (forces, limits.MUST_BE_TO_FORCE),
            (["balance.local_first"], limits.MUST_BE_FOR_LOCAL_FIRST),
            (transports, limits.MUST_BE_TO_ADD),
        )
        for rule in rules
    ]


def main() -> None:
    """Write the page, its record, and its first rows into README."""
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
