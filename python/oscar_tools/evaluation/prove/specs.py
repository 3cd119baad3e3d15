"""Which int2 caches are asked: a recipe, the channels that share a scale, and bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import typer

from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.recipe_options import bit_goal, needs_mean, refuse_bits
from oscar_rotation.recipes import DEFAULT_BITS, FITTED
from oscar_tools.evaluation.methods import RECIPE_OF

UNFITTED = ("hadamard", "quarot")
"""Methods that need no data: a Hadamard matrix with our windows and clipping, and without both, as QuaRot has it."""
NAMES = (*FITTED, *UNFITTED)
FORM = "NAME, NAME:GROUP, NAME:GROUP:BITS or NAME::BITS"


@dataclass(frozen=True)
class Spec:
    """One int2 cache.

    Attributes:
        recipe: one of :data:`NAMES`.
        bits: what is asked of bits; None for the default.
        by_model: whether the model itself says, on the calibration texts, where a mean of ``bits`` is needed.
        group: channels that share a scale; None for the run's.
    """

    recipe: str
    bits: str | None = None
    by_model: bool = False
    group: int | None = None

    @property
    def fitted(self) -> bool:
        """Whether its rotations are fitted to a dump."""
        return self.recipe in FITTED

    @property
    def goal(self) -> BitGoal | None:
        """What is asked of bits, or the default; None for two everywhere.

        Raises:
            typer.BadParameter: neither a mean nor widths.
        """
        return bit_goal(self.bits, FITTED[self.recipe]) if self.fitted else None

    @property
    def method(self) -> str:
        """Its name among :data:`oscar_tools.evaluation.methods.TITLES`."""
        return next((method for method, recipe in RECIPE_OF.items() if recipe == self.recipe), self.recipe)

    @property
    def wish(self) -> str:
        """What is asked besides the recipe, for tables; empty without."""
        group = "" if self.group is None else f", groups of {self.group}"
        bits = "" if self.bits is None else f", --bits {self.bits}" + (", by the model" if self.by_model else "")
        return group + bits

    @property
    def suffix(self) -> str:
        """The same for names."""
        group = "" if self.group is None else f"-g{self.group}"
        return group + ("" if self.bits is None else f"-{self.bits}" + ("-by-model" if self.by_model else ""))

    @property
    def title(self) -> str:
        """In messages."""
        return f"recipe {self.recipe}{self.wish}"


def parse_specs(recipes: Sequence[str], bits: Sequence[str], by_model: bool) -> tuple[Spec, ...]:
    """Caches that options ask for, in order, each once.

    Args:
        recipes: values of ``--recipe``, each of the form :data:`FORM`.
        bits: values of ``--bits``, for each recipe without bits of its own; none for the default.
        by_model: whether means are spent as the model itself says.

    Raises:
        typer.BadParameter: a name, group or bits that are none, or bits for a recipe that takes none.

    >>> [spec.title for spec in parse_specs(["focus::2.5", "paper:64"], [], False)]
    ['recipe focus, --bits 2.5', 'recipe paper, groups of 64']
    """
    found = []
    for text in recipes:
        name, group, own = _parts(text)
        wishes: Sequence[str | None] = [own] if own else bits or [None]
        for wish in wishes:
            # The default by its name is the default, whose answers an earlier run may have left.
            spec = Spec(name, None if wish == DEFAULT_BITS else wish, group=group)
            mean = spec.goal is not None and spec.goal.mean is not None
            if wish is not None and spec.fitted:
                refuse_bits(FITTED[name])
            elif wish is not None:
                raise typer.BadParameter(f"has no meaning for --recipe {name}, which has two", param_hint="--bits")
            found.append(replace(spec, by_model=by_model and mean))
    if by_model and not any(spec.by_model for spec in found):
        needs_mean(None, "--bits-by-model")
    return tuple(dict.fromkeys(found))


def _parts(text: str) -> tuple[str, int | None, str | None]:
    name, *rest = text.split(":")
    if name not in NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(NAMES)}", param_hint="--recipe")
    group, bits = (*rest, "", "")[:2]
    if len(rest) > 2 or (group and not group.isdecimal()):
        raise typer.BadParameter(f"{text!r} is not {FORM}", param_hint="--recipe")
    return name, int(group) if group else None, bits or None
