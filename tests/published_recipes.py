"""Writes docs/published-recipes.md: which published MoE recipes train balanced as they are.

    python -m tests.published_recipes           writes the page
    python -m tests.published_recipes WHEEL     runs the recipes of Megatron-Bridge first

A recipe of Megatron-Bridge is a function that returns a configuration. Here it runs without
Megatron, PyTorch and GPUs: only the recipes, and the files of Megatron-Bridge that turn a precision
or an overlap into settings, are code of the wheel. All else is `Anything`, which remembers what is
set on it. `RECORD` has the settings that recipes ask for. Rules of `megatron_ext/mcore/limits.py`
and `in_place.py` say which recipes run.
"""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
import tempfile
import types
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "published-recipes.md"
RECORD = Path(__file__).with_suffix(".csv")
"""A line a recipe: its name, its GPU, and its settings, where they differ from Megatron's."""
VERSION = "megatron-bridge 0.6.2"

SETTINGS = (
    *("fp8", "fp8_recipe", "fp4", "quant_recipe", "cuda_graph_impl", "cuda_graph_modules"),
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    *("overlap_dispatch_backward_with_experts_wgrad", "moe_expert_rank_capacity_factor"),
    *("moe_paged_stash", "moe_flex_dispatcher_backend", "moe_ncclep_zero_copy"),
    *("moe_single_grouped_bias", "moe_use_legacy_grouped_gemm", "expert_gtp_weight_remat_size"),
    *("moe_pad_experts_for_cuda_graph_inference", "transformer_impl", "use_megatron_fsdp"),
    "moe_router_force_load_balancing",
    *("use_transformer_engine_op_fuser", "moe_router_fusion", "moe_permute_fusion"),
    *("moe_expert_capacity_factor", "mtp_num_layers", "mtp_use_repeated_layer"),
    *("moe_token_dispatcher_type", "moe_mlp_glu_interleave_size", "overlap_param_gather"),
    *("recompute_granularity", "recompute_modules", "moe_shared_expert_overlap"),
    "fine_grained_activation_offloading",
)
"""What rules judge, and what the pages count."""

DENSE = ("llama", "wan", "nemotronh_56b", "nemotronh_47b", "nemotronh_8b", "nemotronh_4b")
"""How names of models without experts begin."""

_RUN = (
    "megatron.bridge.perf_recipes",
    "megatron.bridge.recipes",
    "megatron.bridge.training.mixed_precision",
    "megatron.bridge.training.comm_overlap",
    "megatron.bridge.training.flex_dispatcher_backend",
    "megatron.bridge.utils.cuda_graph",
)
_STANDS_IN_FOR = ("megatron", "torch", "transformers", "nemo_run", "transformer_engine")

Recipe = dict[str, str]
"""Its `name`, its `gpu`, and `SETTINGS` as text; empty where it sets nothing."""


class Anything:
    """Takes any use, and remembers what is set on it; what nobody has set is false."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        vars(self).update(settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, Unset())

    def __call__(self, *args: Any, **settings: Any) -> Anything:
        return Anything(**settings)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Anything,)

    def __getitem__(self, key: Any) -> Any:
        return Unset()

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __gt__(self, other: Any) -> bool:
        return False

    __lt__ = __ge__ = __le__ = __gt__

    def __or__(self, other: Any) -> Anything:
        return self

    __ror__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __or__


class Unset(Anything):
    """What nobody has set."""

    def __bool__(self) -> bool:
        return False


class _AnyClass(type):
    """Of a class that stands in for another: it has every member."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(cls, name: str) -> str:
        return name  # a member of an enumeration

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _AnyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper() and name not in ("AutoBridge", "TYPE_CHECKING")
        value = _AnyClass(name, (Anything,), {}) if is_class else Anything()
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is run in the unpacked wheel, and a stand-in for all else."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in _STANDS_IN_FOR:
            return None
        if not any(f"{name}.".startswith(f"{each}.") for each in _RUN):
            return ModuleSpec(name, self, is_package=True)
        base = self._root.joinpath(*name.split("."))
        if base.is_dir():
            return importlib.util.spec_from_file_location(
                name, base / "__init__.py", submodule_search_locations=[str(base)]
            )
        return importlib.util.spec_from_file_location(name, base.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _AnyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def run_recipes(wheel: Path) -> list[Recipe]:
    """Run every performance recipe of a wheel of Megatron-Bridge for a model with experts."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        sys.meta_path.insert(0, _Finder(Path(folder)))
        recipes = Path(folder) / "megatron" / "bridge" / "perf_recipes"
        for file in sorted(recipes.glob("*/*/*.py")):
            module = importlib.import_module(
                ".".join(file.relative_to(folder).with_suffix("").parts)
            )
            for name, make in sorted(vars(module).items()):
                is_own = getattr(make, "__module__", "") == module.__name__
                is_dense = name.startswith(DENSE) or file.parts[-3] in DENSE
                if is_own and name.endswith("_config") and name[0] != "_" and not is_dense:
                    found.append(_recipe(name, file.parts[-2], make()))
    return found


def _recipe(name: str, gpu: str, config: Any) -> Recipe:
    precision = config.mixed_precision
    if isinstance(precision, str):
        module = importlib.import_module("megatron.bridge.training.mixed_precision")
        precision = module.get_mixed_precision_config(precision)
    parts = (precision, config.comm_overlap, config.ddp, config.model)

    def setting(field: str) -> str:
        given = [getattr(part, field, None) for part in parts]
        value = next((each for each in given if each), "")
        several = value if isinstance(value, (list, tuple)) else [value]
        return " ".join("set" if isinstance(each, Anything) else str(each) for each in several)

    settings = {field: setting(field) for field in SETTINGS}
    settings["cuda_graph_modules"] = settings["cuda_graph_modules"] or setting("cuda_graph_scope")
    return {"name": name.removesuffix("_config"), "gpu": gpu, **settings}


@functools.cache
def read_record() -> list[Recipe]:
    """Return what `RECORD` has."""
    with RECORD.open(newline="") as file:
        return list(csv.DictReader(file))


def write_record(recipes: list[Recipe]) -> None:
    """Write `RECORD`."""
    with RECORD.open("w", newline="") as file:
        writer = csv.DictWriter(file, recipes[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(recipes)


def excluded_by(recipe: Recipe) -> list[str]:
    """Return the fields of TransformerConfig that keep a recipe from training balanced."""
    # Here, as Megatron is imported with it.
    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.graph_limits import host_problems
    from megatron_ext.mcore.limits import MUST_BE

    values: dict[str, Any] = {name: value or None for name, value in recipe.items()}
    values |= {name: True for name, value in recipe.items() if value == "True"}
    values["cuda_graph_modules"] = recipe["cuda_graph_modules"].split()
    values["gradient_accumulation_fusion"] = True  # The recipes' default.
    values |= dict(expert_model_parallel_size=2, moe_pad_expert_input_to_capacity=False)
    config = SimpleNamespace(**values)
    refused = [rule.field for rule in MUST_BE if rule.problem(config, "balance.strategy=quota")]
    # The problem begins with the field.
    refused += [each.split()[0] for each in host_problems(config, BalanceConfig())]
    return refused


def by_contract(recipe: Recipe) -> list[str]:
    """Return the parts of a recipe in whose place the tests have stand-ins."""
    graphs = "graphs of whole steps" if "full_iteration" in recipe.values() else "graphs"
    parts = {
        recipe["moe_flex_dispatcher_backend"]: recipe["moe_token_dispatcher_type"] == "flex",
        graphs: recipe["cuda_graph_impl"] not in ("", "none"),
        "kernels of the op fuser": recipe["use_transformer_engine_op_fuser"],
        "kernels of the stash": recipe["moe_paged_stash"],
        "Megatron-FSDP in graphs": recipe["use_megatron_fsdp"]
        and recipe["cuda_graph_impl"] not in ("", "none"),
    }
    return [part for part, is_there in parts.items() if is_there]


def page(recipes: list[Recipe]) -> str:
    """Return the page for these recipes."""
    excluded = {recipe["name"]: excluded_by(recipe) for recipe in recipes}
    by_field = Counter(field for fields in excluded.values() for field in fields)
    num_run = sum(not fields for fields in excluded.values())
    num_forced = sum(bool(recipe["moe_router_force_load_balancing"]) for recipe in recipes)
    lines = [
        "# Published recipes",
        "",
        f"Of the {len(recipes)} MoE performance recipes of {VERSION}, {num_run} train balanced "
        "without a change, by the rules that [refuse settings](compatibility.md#refused). None has "
        "run on a GPU. `python -m tests.published_recipes` writes this page.",
        "",
        f"**{num_forced} of them set `moe_router_force_load_balancing`, and then there is nothing "
        "to balance.** Leave it out, with balancing and without, to compare them: "
        "`cfg.model.moe_router_force_load_balancing = False`.",
        "",
    ]
    if by_field:
        lines += [
            "| setting that excludes balancing | recipes | that nothing else excludes |",
            "|---|---:|---:|",
        ]
        for field, count in by_field.most_common():
            alone = sum(fields == [field] for fields in excluded.values())
            lines.append(f"| `{field}` | {count} | {alone} |")
        lines += ["", "## What excludes them", "", "| GPU | recipe | settings |", "|---|---|---|"]
        lines += [
            f"| {r['gpu']} | `{r['name']}` | {', '.join(f'`{f}`' for f in excluded[r['name']])} |"
            for r in recipes
            if excluded[r["name"]]
        ]
        lines.append("")
    lines += [
        "## They run as they are",
        "",
        "CPU ranks trained with each setting of these recipes that concerns MoE layers or their "
        "gradients: not with all settings of a recipe at once, and not with their attention. "
        "PyTorch code stood in for compiled parts. *By contract*: the tests check how these parts "
        "are called, and what they get and return. Only a GPU can show that they do so beside "
        "balancing.",
        "",
        "| GPU | recipe | by contract |",
        "|---|---|---|",
    ]
    lines += [
        f"| {r['gpu']} | `{r['name']}` | {', '.join(by_contract(r))} |"
        for r in recipes
        if not excluded[r["name"]]
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the page, and before that the record if a wheel is given."""
    if len(sys.argv) > 1:
        write_record(run_recipes(Path(sys.argv[1])))
        # What stands in for Megatron has to go.
        os.execv(sys.executable, [sys.executable, "-m", "tests.published_recipes"])
    PAGE.write_text(page(read_record()))


if __name__ == "__main__":
    main()
