"""Which int2 caches are asked: a recipe, the channels that share a scale, and bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import typer

from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC
from oscar_rotation.fit.bit_goal import AUTO, BitGoal
from oscar_rotation.fit.options import FitOptions, OptionError
from oscar_rotation.recipe_options import bit_goal, needs_mean, refuse_bits
from oscar_rotation.recipes import DEFAULT_BITS, FITTED
from oscar_tools.evaluation.methods import RECIPE_OF

UNFITTED = ("hadamard", "quarot")
"""Methods that need no data: a Hadamard matrix with our windows and clipping, and without both, as QuaRot has it."""
NAMES = (*FITTED, *UNFITTED)
FORM = "NAME, NAME:GROUP, NAME:GROUP:BITS, NAME::BITS or NAME:GROUP:BITS:CODINGS"
CODINGS = {CODEBOOK: ("key_coding",), SYMMETRIC: ("value_coding",), AUTO: ("key_coding", "value_coding")}
"""What a cache may have in the place of affine codes, joined by ``+``, and the option of a fit that it is."""


@dataclass(frozen=True)
class Spec:
    """One int2 cache.

    Attributes:
        recipe: one of :data:`NAMES`.
        bits: what is asked of bits; None for the default.
        by_model: whether the model itself says, on the calibration texts, where a mean of ``bits`` is needed.
        group: channels that share a scale; None for the run's.
        key_coding, value_coding: of :class:`oscar_rotation.fit.options.FitOptions`.
    """

    recipe: str
    bits: str | None = None
    by_model: bool = False
    group: int | None = None
    key_coding: str = AFFINE
    value_coding: str = AFFINE

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
    def codings(self) -> tuple[str, str]:
        """Of keys and of values."""
        return self.key_coding, self.value_coding

    @property
    def _asked(self) -> list[tuple[str, str]]:
        """What is asked besides the recipe: in names and in words."""
        found = [] if self.group is None else [(f"g{self.group}", f"groups of {self.group}")]
        if self.bits is not None:
            found.append((self.bits, f"--bits {self.bits}"))
            found += [("by-model", "by the model")] * self.by_model
        return found + [(coding, coding) for coding in dict.fromkeys(self.codings) if coding != AFFINE]

    @property
    def wish(self) -> str:
        """What is asked besides the recipe, for tables; empty without."""
        return "".join(f", {words}" for _, words in self._asked)

    @property
    def suffix(self) -> str:
        """The same for names."""
        return "".join(f"-{name}" for name, _ in self._asked)

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

    >>> [spec.title for spec in parse_specs(["focus::2.5:auto", "paper:64"], [], False)]
    ['recipe focus, --bits 2.5, auto', 'recipe paper, groups of 64']
    """
    found = []
    for text in recipes:
        name, group, own, codings = _parts(text)
        wishes: Sequence[str | None] = [own] if own else bits or [None]
        for wish in wishes:
            # The default by its name is the default, whose answers an earlier run may have left.
            asked = None if wish == DEFAULT_BITS else wish
            spec = Spec(name, asked, group=group, **codings)  # type: ignore[arg-type]
            _check_codings(spec)
            mean = spec.goal is not None and spec.goal.mean is not None
            if wish is not None and spec.fitted:
                refuse_bits(FITTED[name])
            elif wish is not None:
                raise typer.BadParameter(f"has no meaning for --recipe {name}, which has two", param_hint="--bits")
            found.append(replace(spec, by_model=by_model and mean))
    if by_model and not any(spec.by_model for spec in found):
        needs_mean(None, "--bits-by-model")
    return tuple(dict.fromkeys(found))


def _check_codings(spec: Spec) -> None:
    if spec.codings == (AFFINE, AFFINE):
        return
    if not spec.fitted or "key_coding" not in FITTED[spec.recipe].options:
        raise typer.BadParameter(f"{spec.recipe} has affine codes alone", param_hint="--recipe")
    try:
        FitOptions(bits=spec.goal, key_coding=spec.key_coding, value_coding=spec.value_coding)
    except OptionError as error:
        raise typer.BadParameter(f"{spec.title}: {error.fault}", param_hint="--recipe") from error


def _parts(text: str) -> tuple[str, int | None, str | None, dict[str, str]]:
    name, *rest = text.split(":")
    if name not in NAMES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(NAMES)}", param_hint="--recipe")
    group, bits, codings = (*rest, "", "", "")[:3]
    asked = codings.split("+") if codings else []
    if len(rest) > 3 or (group and not group.isdecimal()) or not set(asked) <= set(CODINGS):
        raise typer.BadParameter(f"{text!r} is not {FORM}", param_hint="--recipe")
    given = {option: coding for coding in asked for option in CODINGS[coding]}
    return name, int(group) if group else None, bits or None, given
