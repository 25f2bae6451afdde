"""Where recipes are, and which of them fits a number of ranks.

A complete recipe is a file of the folder itself, a group's options are files of a folder inside.
Recipes for a machine are named `<model>_<ranks>_<gpu>_<precision>[_<what differs>]`.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAMED = re.compile(r"(?P<model>\w+?)_(?P<ranks>\d+)_[a-z]+\d+_(?:fp32|bf16)(?:_\w+)?")


def shipped_recipes() -> Path:
    """Return the folder of the recipes that come with the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    # In a clone, which an editable installation uses, they are beside the package.
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_names(folder: Path) -> list[str]:
    """Return the names of the complete recipes in a folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def nearest_recipe(recipe: str, names: list[str], *, num_ranks: int) -> str | None:
    """Return the recipe for as many ranks as there are that is nearest to another recipe.

    It is one for the same model if there is such a one, and of those the one for most ranks.

    >>> names = ["demo_8_h200_bf16", "glm_4_h100_bf16_ep4", "glm_64_h100_bf16"]
    >>> nearest_recipe("glm_64_h100_bf16", names, num_ranks=8)
    'glm_4_h100_bf16_ep4'
    >>> nearest_recipe("glm_64_h100_bf16", names, num_ranks=2) is None
    True
    """
    own = _NAMED.fullmatch(recipe)
    fitting = [
        (own is not None and named["model"] == own["model"], int(named["ranks"]), name)
        for name in names
        if (named := _NAMED.fullmatch(name)) and int(named["ranks"]) <= num_ranks
    ]
    return max(fitting)[2] if fitting else None
