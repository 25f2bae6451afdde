"""Reads a model's shape: that of a recipe, or a YAML file with the fields of `ModelShape`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from megatron_ext.config import ConfigError
from megatron_ext.files.recipes import recipe_names, shipped_recipes
from megatron_ext.files.yaml_files import find_file, read_yaml
from megatron_ext.trainer.model.shape import ModelShape, shape_of


def is_recipe(name_or_file: str) -> bool:
    """Whether a model is given as a recipe, whose sizes are settings such as `model.num_experts`.

    Else it is a file with the fields of `ModelShape`.
    """
    path = Path(name_or_file)
    return not path.is_file() or path.resolve().parent == shipped_recipes().resolve()


def read_shape(name_or_file: str, overrides: Sequence[str]) -> ModelShape:
    """Read the shape of a recipe, or a shape from its file.

    Args:
        name_or_file: Name of a recipe, or as much of its beginning as no other recipe has; or path
            of a file: a recipe of the package, or one with the fields of `ModelShape`.
        overrides: Settings as `name=value`: fields of `ModelShape`, or for a recipe what
            `megatron-ext train` takes.

    Raises:
        FileNotFoundError: There is no such shape and no such recipe.
        ValueError: A field is missing, unknown or out of range; the message names it.
    """
    path, recipes = Path(name_or_file), shipped_recipes()
    if not is_recipe(name_or_file):
        return _read_file(path, overrides)
    name = path.stem if path.is_file() else name_or_file
    begun = [each for each in recipe_names(recipes) if each.startswith(f"{name}_")]
    if len(begun) != 1 or name in recipe_names(recipes):
        begun = [find_file(name, recipes, "model").stem]

    from megatron_ext.trainer.compose import load_config

    try:
        config = load_config(overrides, config_name=begun[0], needs_data=False)
    except ConfigError as error:
        raise ValueError("; ".join(error.problems)) from None
    # Behind the check, because it imports PyTorch.
    from megatron_ext.trainer.validate import expert_shards

    for size, setting in (
        (config.parallel.tp_size, "parallel.tp_size"),
        (expert_shards(config), "megatron.expert_tensor_parallel_size"),
    ):
        if size > 1:
            raise ValueError(f"{setting} ({size}) must be 1: tensor parallelism is not simulated")
    return shape_of(config, begun[0])


def _read_file(path: Path, overrides: Sequence[str]) -> ModelShape:
    fields = {"name": path.stem} | read_yaml(path)
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(ModelShape), fields, OmegaConf.from_dotlist([*overrides])
        )
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ValueError(f"{path} has no {', '.join(missing)}")
        shape = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        # OmegaConf names the field on a line of its own for a wrong value, but not for a wrong key.
        field = f"{error.full_key}: " if isinstance(error, ValidationError) else ""
        raise ValueError(f"{path}: {field}{str(error).splitlines()[0]}") from None
    assert isinstance(shape, ModelShape)
    return shape
