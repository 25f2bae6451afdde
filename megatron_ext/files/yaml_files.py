"""Files in YAML that hold a mapping, found by path or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from megatron_ext.arguments import did_you_mean

T = TypeVar("T")


def find_file(name_or_file: str, folder: Path, what: str) -> Path:
    """Return the path of a file that is named by its path or by its name in `folder`.

    Raises:
        FileNotFoundError: There is no such path and no such name; the message lists the names.
    """
    for path in (Path(name_or_file), folder / f"{name_or_file}.yaml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if folder.is_dir():
        near = did_you_mean(name_or_file, known)
        named = f"{folder} has {', '.join(known) or 'none'}{near}"
    else:
        named = f"there is no folder {folder.absolute()}"
    raise FileNotFoundError(f"no {what} {name_or_file!r}: no such file, and {named}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ValueError: The file is not YAML, or holds no mapping.
    """
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no readable YAML ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping")
    return {str(key): value for key, value in content.items()}


def read_into(
    fields: type[T], content: Mapping[str, Any], path: Path, overrides: Sequence[str] = ()
) -> T:
    """Make a dataclass from a file's mapping: keys are its fields, values have their types.

    Args:
        fields: The dataclass, as OmegaConf's structured configs are.
        content: Content of the file, as `read_yaml` returns it.
        path: Path of the file, for messages.
        overrides: Values that replace the file's, each as `name=value`.

    Raises:
        ValueError: A field is missing, unknown or of a wrong type, or the dataclass refuses a
            value; the message names file and field.
    """
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(fields), dict(content), OmegaConf.from_dotlist([*overrides])
        )
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ValueError(f"{path} has no {', '.join(missing)}")
        made = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        # OmegaConf names the field on a line of its own for a wrong value, but not for a wrong key.
        field = f"{error.full_key}: " if isinstance(error, ValidationError) else ""
        raise ValueError(f"{path}: {field}{str(error).splitlines()[0]}") from None
    assert isinstance(made, fields)
    return made
