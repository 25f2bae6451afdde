"""Composes a run's settings from a recipe and overrides, and says what is wrong with them.

Nothing here imports torch: a wrong word is said before that takes its seconds.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import re
import shlex
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ext.arguments import WRONG_USAGE, one_line
from megatron_ext.balance.strategies import unknown_strategy
from megatron_ext.config import BalanceConfig, ConfigError, no_setting, wrong_value
from megatron_ext.files.recipes import recipe_names, shipped_recipes
from megatron_ext.files.yaml_files import check_yaml, faults_of, read_yaml
from megatron_ext.trainer.config import MEGATRON_NAMES, SCHEMA, DataConfig, TrainConfig
from megatron_ext.words import did_you_mean

_OF_HYDRA = re.compile(r"(?<![\w-])hydra(?![\w-])")
"""Hydra itself, as a key, a package or a group of recipes."""

_RUN_CODE = ("checkpoint.trust", "megatron.fp8_quantizer_factory", "megatron.fp4_quantizer_factory")
"""Settings by which a pickle is loaded, or a function is called that is named there."""

_MOST_NAMED = 200
"""How often Hydra may look up what defaults name: ten times any recipe's."""

_SECTIONS: dict[str, Any] = {kind.NAME: kind for kind in TrainConfig.kinds()}
"""The classes of all sections, by their names."""

ConfigStore.instance().store(SCHEMA, TrainConfig)


def say_loading() -> None:
    """Say, once in a run, why nothing else is said for some seconds."""
    if "torch" not in sys.modules and os.environ.get("RANK", "0") == "0":
        sys.stderr.write("loading PyTorch and Megatron ...\n")


@contextmanager
def said_in_lines() -> Iterator[None]:
    """Write a line for each problem of the settings, and end with status 2."""
    try:
        yield
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:
            # torchrun ends a machine's ranks when one fails: only the one that speaks may.
            raise SystemExit(0) from None
        # A setting may be wrong on one machine only, as a path that is not mounted there.
        where = f"{socket.gethostname()}: " if int(os.environ.get("RANK", 0)) != 0 else ""
        lines = (one_line(f"error: {where}{problem}") for problem in error.problems)
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        raise SystemExit(WRONG_USAGE) from None


@contextmanager
def faults_of_words() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise about settings into a `ConfigError` of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_hydra_problem(error)]) from None


def load_without_data(
    overrides: Sequence[str],
    config_dir: str | None,
    config_name: str | None,
    *,
    num_ranks: int | None,
) -> tuple[TrainConfig, int]:
    """Compose and check a run whose data need not be there; return the run and its ranks.

    Arguments are those of `load_config` and `check`.

    Raises:
        ConfigError: With all problems. An override that cannot be read does not hide others.
    """

    def load(some: Sequence[str]) -> TrainConfig:
        return load_config(some, config_dir, config_name, needs_data=False)

    from megatron_ext.trainer.early import early_problems

    problems: list[str] = []
    fine = list(overrides)
    try:
        load(fine)
    except ConfigError as error:
        for override in overrides:
            try:
                load([override])
            except ConfigError as of_one:
                problems += of_one.problems
                fine.remove(override)
        if not problems or not fine:
            raise ConfigError(problems or error.problems) from None
    try:
        config = load(fine)
        problems += early_problems(config, needs_data=False)
        if not problems:
            say_loading()
            from megatron_ext.trainer.train import check

            num_ranks = check(config, num_ranks=num_ranks, needs_data=False)
    except ConfigError as error:
        problems += error.problems
    if problems or num_ranks is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config, num_ranks


@faults_of_words()
def load_config(
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    config_name: str | None = None,
    *,
    needs_data: bool = True,
) -> TrainConfig:
    """Compose a run's settings from a recipe and overrides.

    Args:
        overrides: Overrides in Hydra's grammar, e.g. `["steps=10", "+megatron.kv_channels=64"]`.
        config_dir: Folder of recipes and groups before those that come with the package.
        config_name: The recipe; by default the bare defaults of `TrainConfig`.
        needs_data: Whether `data.path` has to be given.

    Raises:
        ConfigError: A recipe or key does not exist, or a value has the wrong type.
    """
    folder = Path(config_dir).absolute() if config_dir else shipped_recipes()
    if not folder.is_dir():
        raise ConfigError([f"--config-dir ({config_dir}) is not a folder"])
    if wrong := _wrong_words(overrides, folder):
        raise ConfigError(wrong)
    config_name = config_name or SCHEMA
    for plugin in _Recipes, _Folders:
        Plugins.instance().register(plugin)
    try:
        if config_name != SCHEMA:
            _check_recipe(config_name, folder)
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = _composed(config_name, overrides)
        if OmegaConf.get_type(composed) is not TrainConfig:
            raise ConfigError([f"{config_name}.yaml must have {SCHEMA} first in its defaults"])
        asked = {each.lstrip("+").split("=")[0] for each in overrides}
        _limit(composed, asked)
        if wrong := [*_of_the_command_line(composed, asked), *_unknown_settings(composed)]:
            raise ConfigError(wrong)
        if config_name != SCHEMA and not composed.recipe:
            composed.recipe = config_name
        problems: list[str] = []
        of_balance: list[str] = []
        # What is missing, or a section `balance` that cannot be made, hides no other problem.
        defaults = OmegaConf.structured(TrainConfig(data=DataConfig(path="")))
        for name in sorted(OmegaConf.missing_keys(composed)):
            OmegaConf.update(composed, name, OmegaConf.select(defaults, name))
            if needs_data or name != "data.path":
                problems.append(f"{name} is missing: it has no default")
        try:
            OmegaConf.to_object(composed.balance)
        except ConfigError as error:
            said = unknown_strategy(str(composed.balance.strategy))
            of_balance = [*error.problems, *([said] if said else [])]
            composed.balance = defaults.balance
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, ConfigError):
        raise
    except ValueError as error:  # A recipe's, or a section's about its own values.
        raise ConfigError([str(error)]) from None
    assert isinstance(config, TrainConfig)
    if problems or of_balance:
        raise ConfigError(problems + config.problems() + of_balance)
    return config


def _composed(config_name: str, overrides: Sequence[str]) -> DictConfig:
    try:
        return compose(config_name, list(overrides))
    except (HydraException, OmegaConfBaseException, ConfigError, ValueError):
        raise
    # Names that make no sense fail in Hydra in ways of its own.
    except Exception as error:
        said = _first_line(str(error)) or type(error).__name__
        raise ConfigError([f"{config_name}.yaml cannot be composed: {said}"]) from None


def _check_recipe(name: str, folder: Path) -> None:
    """Check that there is a recipe, in a folder or in the package; the error lists them.

    And that it has defaults at all, without which Hydra says things about single settings.
    """
    found = {each: recipe_names(each) for each in (folder, shipped_recipes())}
    known = [each for names in found.values() for each in names]
    stem = name.removesuffix(".yaml")
    for each, names in found.items():
        if stem in names:
            path = each / f"{stem}.yaml"
            if "defaults" not in read_yaml(path):
                raise ValueError(f"{path}: `defaults: [{SCHEMA}, _self_]` is missing")
            return
    there = "; ".join(f"{each} has {', '.join(names) or 'none'}" for each, names in found.items())
    raise ConfigError(
        [f"--config-name ({name}): no such recipe: {there}{did_you_mean(name, known)}"]
    )


def _wrong_words(overrides: Sequence[str], folder: Path) -> list[str]:
    """Return what is wrong with the groups and the deletions among overrides, a problem each.

    A group is given one of its options, in the folder or in the package. Only an entry of a mapping
    can be taken away, as in `~megatron.name`.
    """
    problems = []
    chosen: dict[str, list[str]] = {}
    for word in OverridesParser.create().parse_overrides([*dict.fromkeys(overrides)]):
        name, said = word.key_or_group, str(word.input_line)
        section, _, key = name.rpartition(".")
        options = {*recipe_names(folder / name), *recipe_names(shipped_recipes() / name)}
        has = f"the group {name} has {', '.join(sorted(options))}"
        if word.is_delete():
            if options or key in getattr(_SECTIONS.get(section), "__dataclass_fields__", ()):
                rule = has if options else f"give it another value, {name}=..."
                problems.append(f"{said}: {name} cannot be taken away; {rule}")
        elif options:
            chosen.setdefault(name, []).append(said)
            if not isinstance(word.value(), str | list | dict | Sweep):
                problems.append(f"{said}: {has}")
    twice = {name: words for name, words in chosen.items() if words[1:]}
    return problems + [f"{name} is given twice: {', '.join(of)}" for name, of in twice.items()]


class _Recipes(FileConfigSource):
    """A folder of recipes, of which Hydra loads no file that is not checked.

    No file has settings of Hydra itself: these make Hydra import modules and call functions.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._named = 0

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        text = check_yaml(path) if path.exists() else ""
        with faults_of(path):
            result = super().load_config(config_path)
            group = posixpath.dirname(posixpath.normpath(config_path))
            parts = [group, *_packages(result)]
        if any(map(_OF_HYDRA.search, parts)):
            lines = enumerate(text.splitlines(), 1)
            place = next((number for number, line in lines if _OF_HYDRA.search(line)), 1)
            raise ValueError(
                f"{path}, line {place}: a recipe cannot set `hydra`: Hydra's own settings can run "
                "code, and belong on the command line"
            )
        result.header = _Header(result.header, self)
        return result

    def count(self) -> None:
        """Count what defaults name: recipes can name each other without end."""
        self._named += 1
        if self._named > _MOST_NAMED:
            raise ValueError(f"{self.path}: the defaults of recipes name too many, or each other")


def _packages(result: ConfigResult) -> Iterator[str]:
    """Yield where in the whole configuration the parts of a file may go: as Hydra names them."""
    yield result.header["package"] or ""
    if isinstance(result.config, DictConfig):
        yield from ("hydra" for key in result.config if key == "hydra")
        if isinstance(listed := result.config.get("defaults"), ListConfig):
            for each in OmegaConf.to_container(listed):  # type: ignore[union-attr]
                yield from map(str, each if isinstance(each, dict) else [each])


class _Header(dict[str, str | None]):
    """The first lines of a recipe, which Hydra reads whenever defaults have named the recipe."""

    def __init__(self, header: dict[str, str | None], recipes: _Recipes) -> None:
        super().__init__(header)
        self._recipes = recipes

    def __getitem__(self, key: str) -> str | None:
        self._recipes.count()
        return super().__getitem__(key)


class _Folders(SearchPathPlugin):
    """Lets Hydra look for recipes in the folder of --config-dir, and then in the package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("megatron_ext", str(shipped_recipes()))
        for element in search_path.get_path():
            if element.provider in ("main", "megatron_ext"):
                element.path = f"{_Recipes.scheme()}://{element.path.removeprefix('file://')}"


def _limit(composed: DictConfig, asked: Collection[str]) -> None:
    """Take the limits of `at_most` where a recipe has more, but not for settings `asked` for."""
    limits: Any = composed.at_most
    if not OmegaConf.is_dict(limits):  # It may be a reference to anything.
        raise ConfigError([f"at_most ({limits}) must be a mapping"])
    for name, most in limits.items():
        if not isinstance(most, int):  # A list passes OmegaConf's check.
            raise ConfigError([f"at_most.{name} ({most}) must be a whole number"])
        value = OmegaConf.select(composed, name)
        if name not in asked and isinstance(value, int | float) and value > most:
            OmegaConf.update(composed, name, most)
    composed.at_most = {}


def _of_the_command_line(composed: DictConfig, asked: Collection[str]) -> list[str]:
    """Return what a recipe sets of the settings that can run code, a problem each.

    Only the whole name on the command line is a user's word: `megatron.fp8=e4m3` beside a recipe
    says nothing about the recipe's `megatron.fp8_quantizer_factory`.
    """
    return [
        f"{name} ({value}) can run code, so it is given on the command line, by its whole name"
        for name in _RUN_CODE
        if (value := OmegaConf.select(composed, name)) and name not in asked
    ]


def _unknown_settings(composed: DictConfig) -> list[str]:
    """Return the settings from `+section.name=value` that no section has, a problem each."""
    problems = []
    for name, kind in _SECTIONS.items():
        known = {each.name for each in dataclasses.fields(kind)}
        section = OmegaConf.select(composed, name) if name else composed
        keys = map(str, section if isinstance(section, DictConfig) else ())
        problems += [no_setting(kind, key) for key in keys if key not in known]
    return problems


def _hydra_problem(error: Exception) -> str:
    """Return in one line what a setting must be, for an error of Hydra or OmegaConf."""
    said = str(error)
    if found := re.match(r"Could not override '(\S+)'\.(?: No match in the defaults list)?", said):
        word = re.search(r" use \+(.+)$", said.splitlines()[-1])
        return _unknown_setting(found[1], word[1] if word else found[1])
    if found := re.match(r"Error merging override ([\w.]+)=(.*)", said):
        section, _, key = found[1].rpartition(".")
        if key in getattr(owner := _SECTIONS.get(section), "__dataclass_fields__", ()):
            return wrong_value(owner, key, None if found[2] == "null" else found[2])
    if found := re.match(r"Ambiguous value for argument '(.*)'", said):
        return f"{found[1]}: a run has one value of each setting; -m makes a run for each value"
    if found := re.match(r"Could not append to config. An item is already at '(\S+)'", said):
        return f"{found[1]} is a setting: write {found[1]}=..., without a plus"
    if found := re.search(r"Could not find '(.*)/(\w*)'", said):
        options = getattr(error, "options", None) or []
        known = f"{', '.join(options)}{did_you_mean(found[2], options)}"
        return f"{found[1]}={found[2]}: the group {found[1]} has {known}"
    if (word := getattr(error, "override", None)) is not None:
        if "=" not in word and not word.startswith("~"):
            near = did_you_mean(word, recipe_names(shipped_recipes()))
            near = near.replace("mean ", "mean --config-name ")
            return f"{word}: a setting is written name=value{near}"
        name, _, value = word.partition("=")
        quoted = value.replace('"', r"\"")
        text = shlex.quote(f'{name}="{quoted}"')  # The shell takes the outer quotes away.
        return f"{word}: no value can be read here ({_first_line(said)}); text is written {text}"
    found = re.match(
        r"In '(.*)': .*\nMerge error: \w+ is not a subclass of (\w+)\. value: (.*)", said
    )
    if found:  # It names no setting.
        name = next(name for name, kind in _SECTIONS.items() if kind.__name__ == found[2])
        return f"{found[1]}.yaml: {name} ({found[3]}) must be a mapping"
    if found := re.match(r"In '(.*)': \w+ raised while composing config:\n(.*)", said):
        name = re.search(r"^\s*full_key: (\S+)", said, re.MULTILINE)
        if name and found[2].startswith("Key "):
            return f"{found[1]}.yaml: {_unknown_setting(name[1], name[1])}"
        return f"{found[1]}.yaml: {f'{name[1]}: ' if name else ''}{found[2]}"
    parts = [_first_line(str(part)) for part in (error, error.__cause__) if part]
    return ": ".join(dict.fromkeys(parts))


def _first_line(text: str) -> str:
    return text.split("\n")[0].rstrip(".")


def _unknown_setting(name: str, word: str) -> str:
    """Say what to write instead of a setting that there is not, or that is added with a plus."""
    if (shipped_recipes() / name).is_dir():
        return f"{word}: a group has options in a recipe only (--config-name)"
    section, _, key = name.rpartition(".")
    if name == "data.weights" or section == "data.weights":
        return f"{word}: a domain is named with a plus, as in +data.weights.code=1"
    if section == "megatron":
        here = f"; here it is {MEGATRON_NAMES[key]}" if key in MEGATRON_NAMES else ""
        plus = "" if here else f": +{word}"
        return f"{name}: settings of Megatron are added with a plus{plus}{here}"
    owner = _SECTIONS.get(section)
    if owner is None:
        near = did_you_mean(section, filter(None, _SECTIONS))
        return f"{name}: there is no section {section}{near}"
    if not section and key in BalanceConfig.__dataclass_fields__:
        return f"{name}: there is no setting of this name; it is balance.{key}"
    return no_setting(owner, key)
