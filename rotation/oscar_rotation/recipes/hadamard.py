"""The built-in recipe ``hadamard``: the plain Walsh-Hadamard rotation of QuaRot (arXiv 2404.00456)."""

from __future__ import annotations

from oscar_rotation.math.hadamard import hadamard
from oscar_rotation.recipes.base import BuiltInRecipe

RECIPE = BuiltInRecipe("hadamard", "Walsh-Hadamard, the rotation of QuaRot", hadamard)
