"""Recipes: how the matrices of a cache come about, one file each.

A recipe that is fitted turns a dump into rotation files (``oscar fit --recipe NAME``); a built-in one needs no data and
is named wherever a rotation file is (``SGLANG_OSCAR_K_ROTATION_PATH=hadamard``). A new recipe is a new file here with a
``RECIPE`` of one of the two kinds in :mod:`oscar_rotation.recipes.base`, and its line in one of the tables below.
"""

from oscar_rotation import defaults
from oscar_rotation.recipes import focus, hadamard, identity, paper, plus
from oscar_rotation.recipes.base import PUBLISHED, BuiltInRecipe, FitRequest, FittedRecipe

__all__ = ["BUILT_IN", "DEFAULT", "DEFAULT_BITS", "FITTED", "PUBLISHED", "BuiltInRecipe", "FitRequest", "FittedRecipe"]

FITTED: dict[str, FittedRecipe] = {recipe.name: recipe for recipe in (plus.RECIPE, focus.RECIPE, paper.RECIPE)}
"""Name, as rotation files state it -> recipe."""

BUILT_IN: dict[str, BuiltInRecipe] = {recipe.name: recipe for recipe in (identity.RECIPE, hadamard.RECIPE)}
"""Name, accepted in place of a rotation file -> recipe."""

DEFAULT, DEFAULT_BITS = defaults.RECIPE, defaults.BITS
"""What is fitted unless a user says otherwise, and for which bits."""
