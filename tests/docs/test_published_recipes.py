"""The page of published recipes is that of its record and of the rules."""

from __future__ import annotations

from tests.compatibility import README
from tests.published_recipes import PAGE, excluded_by, page, read_record


def test_page_is_that_of_the_record() -> None:
    assert PAGE.read_text() == page(read_record())
    num_run = sum(not excluded_by(recipe) for recipe in read_record())
    assert f"[{num_run} run as they are](docs/published-recipes.md)" in README.read_text()


def test_what_no_rule_excludes_is_said_to_run() -> None:
    names = [recipe["name"] for recipe in read_record()]
    assert len(names) == len(set(names)) == 312
    excluded = {recipe["name"]: excluded_by(recipe) for recipe in read_record()}
    assert excluded["deepseek_v3_pretrain_256gpu_b200_bf16"] == []
    assert excluded["deepseek_v3_pretrain_256gpu_b200_fp8mx"] == []
    assert excluded["nemotron_3_nano_pretrain_8gpu_gb200_fp8mx"] == []
    assert excluded["deepseek_v3_pretrain_64gpu_gb300_bf16_fsdp"] == ["use_megatron_fsdp"]
