"""Golden files: every recipe of the project with all defaults spelled out.

`make golden` rewrites them; the test next door compares. A change of a default shows in review.
"""

from pathlib import Path

from openzaya.config.load import RECIPES, load_recipe, recipe_to_toml
from openzaya.config.recipe import Recipe
from openzaya.model.config import PRESETS

FOLDER = Path(__file__).parent / "golden"


def names() -> list[str]:
    return sorted(
        str(file.relative_to(RECIPES).with_suffix("")) for file in RECIPES.rglob("*.toml")
    )


def file_of(name: str) -> Path:
    return FOLDER / f"{name}.toml"


def resolved(name: str) -> Recipe:
    """A recipe with all defaults; where it starts from a checkpoint, that is a tiny one."""
    return load_recipe(name, architecture=lambda start_from, run: PRESETS["tiny"])


if __name__ == "__main__":
    for name in names():
        file_of(name).parent.mkdir(parents=True, exist_ok=True)
        file_of(name).write_text(recipe_to_toml(resolved(name)))
        print(f"wrote {file_of(name)}")
