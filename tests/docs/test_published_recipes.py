"""The page of published recipes is that of its record and of the rules."""

from __future__ import annotations

import pytest

from tests.compatibility import README
from tests.published_recipes import PAGE, Recipe, by_contract, excluded_by, page, read_record


def test_page_is_that_of_the_record() -> None:
    assert PAGE.read_text() == page(read_record())
    num_run = sum(not excluded_by(recipe) for recipe in read_record())
    assert f"[{num_run} run as they are](docs/published-recipes.md)" in README.read_text()


def test_what_no_rule_excludes_is_said_to_run() -> None:
    names = [recipe["name"] for recipe in read_record()]
    assert len(names) == len(set(names)) == 312
    assert [name for name in names if excluded_by(named(name))] == []


def named(name: str) -> Recipe:
    return next(recipe for recipe in read_record() if recipe["name"] == name)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(fp8="e4m3", fp8_recipe="delayed"), "fp8_recipe"),
        (dict(cuda_graph_impl="transformer_engine"), "cuda_graph_impl"),
        (dict(cuda_graph_impl="full_iteration"), "moe_expert_rank_capacity_factor"),
        (dict(moe_use_legacy_grouped_gemm="True"), "moe_use_legacy_grouped_gemm"),
    ],
)
def test_what_a_rule_excludes_is_named(changes: Recipe, field: str) -> None:
    recipe = named("deepseek_v3_pretrain_256gpu_b200_bf16") | changes
    assert excluded_by(recipe) == [field]
    assert f"| b200 | `{recipe['name']}` | `{field}` |" in page([recipe])


def test_rows_say_what_only_a_gpu_can_show() -> None:
    assert by_contract(named("deepseek_v3_pretrain_256gpu_b200_bf16")) == []
    assert by_contract(named("deepseek_v3_pretrain_256gpu_gb300_fp8mx")) == [
        "hybridep",
        "graphs of whole steps",
        "kernels of the op fuser",
        "kernels of the stash",
    ]
