"""The built-in recipe ``identity``: no rotation, naive INT2."""

from __future__ import annotations

from oscar_rotation.math.compose import identity
from oscar_rotation.recipes.base import BuiltInRecipe

RECIPE = BuiltInRecipe("identity", "no rotation: naive INT2", identity)
