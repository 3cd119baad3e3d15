"""Recipes: every one is in a table under its own name, and says what commands and servers need to know of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oscar_rotation import recipe_options, recipes
from oscar_rotation.files.rotation_file import SUFFIXES
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.load import load_rotation
from oscar_rotation.recipes import BUILT_IN, DEFAULT, FITTED, PUBLISHED

FOLDER = Path(recipes.__file__).parent


def test_every_file_is_registered_under_its_name() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "base"}
    assert files == set(FITTED) | set(BUILT_IN)
    for table in (FITTED, BUILT_IN):
        assert all(name == recipe.name and recipe.summary for name, recipe in table.items())
    assert DEFAULT in FITTED
    assert PUBLISHED == "paper"


def test_what_nobody_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of bits is for recipes that take bits; two everywhere is what a fit begins with."""
    for text, goal in (("k2v2", None), ("k3v2", BitGoal(3, 2)), ("2.5", BitGoal(mean=2.5))):
        monkeypatch.setattr(recipe_options, "DEFAULT_BITS", text)
        for name, recipe in FITTED.items():
            assert recipe_options.bit_goal(None, recipe) == (None if name == PUBLISHED else goal)
    assert recipe_options.bit_goal("k2v2", FITTED[DEFAULT]) is None


def test_the_published_recipe_asks_for_least() -> None:
    """Errors of the others point to it."""
    paper = FITTED[PUBLISHED]
    assert not paper.needs_activations
    assert not paper.needs_weights
    others = {"context", "overrides", "bits", "text", "key_coding", "value_coding"}
    assert paper.options == set(vars(FitOptions())) - others
    assert set(paper.suffixes) == set(SUFFIXES)


@pytest.mark.parametrize("name", FITTED)
def test_fitted_recipes_say_what_they_need(name: str) -> None:
    recipe = FITTED[name]
    assert recipe.options <= set(vars(FitOptions()))
    assert set(recipe.suffixes) <= set(SUFFIXES)
    assert ("projections" in recipe.needs) == recipe.needs_weights
    assert ("covariances" in recipe.needs) == (not recipe.needs_activations)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_built_in_recipes_are_orthogonal_and_load_by_name(name: str, head_dim: int) -> None:
    matrix = BUILT_IN[name].matrix(head_dim)
    assert matrix.dtype == torch.float64
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-12, rtol=0)
    loaded = load_rotation(name, num_layers=2, head_dim=head_dim, side="v")
    assert torch.equal(loaded.rotations, matrix.float().expand(2, -1, -1))
    assert (loaded.recipe, loaded.metadata.objective, loaded.metadata.side) == (PUBLISHED, name, "v")
