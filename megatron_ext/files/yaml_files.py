"""Files in YAML that hold a mapping, found by path or by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


def find_file(name_or_file: str, folder: Path, what: str) -> Path:
    """Return the path of a file that is named by its path or by its name in `folder`.

    Raises:
        FileNotFoundError: There is neither; the message lists the names.
    """
    for path in (Path(name_or_file), folder / f"{name_or_file}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
    raise FileNotFoundError(f"no {what} {name_or_file!r}: no such file, and {folder} has {known}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping.

    Raises:
        ValueError: It is none.
    """
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no readable YAML ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no mapping")
    return {str(key): value for key, value in content.items()}
