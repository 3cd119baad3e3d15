"""Which options of a command a recipe takes: one that it would ignore is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes import DEFAULT_BITS, FITTED, FittedRecipe

FIELDS: Mapping[str, str] = {"method": "key_target", "clip": "fit_clip", "positions": "context"}
"""Parameter of a command -> field of FitOptions, where the names differ."""

FLAGS: Mapping[str, str] = {"positions": "context", "overrides": "json-model-override-args"}
"""Parameter of a command -> its flag, where the names differ: typer keeps ``context`` for itself."""

OPTIONS = frozenset(field for recipe in FITTED.values() for field in recipe.options)


BITS_HELP = (
    "Mean stored bits per element, such as 2.5, spent where attention needs them, or widths of keys and values, such "
    f"as k3v2; not for paper; default: {DEFAULT_BITS}."
)


def bit_goal(text: str | None, recipe: FittedRecipe) -> BitGoal | None:
    """What ``--bits`` asks for, or without it the default; None for codes of two bits, which every fit begins with.

    Args:
        text: what the user wrote; None for nothing.
        recipe: that is fitted; one that takes no bits has no default of them.

    Raises:
        typer.BadParameter: neither a mean nor widths.
    """
    text = DEFAULT_BITS if text is None and "bits" in recipe.options else text
    try:
        goal = None if text is None else BitGoal.parse(text)
        return None if goal == BitGoal(2, 2) else goal
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--bits") from error


KEY_CODING_HELP = (
    "Codes of keys of two bits; codebook fits 256 points a layer to fours of channels; auto takes what a mean "
    "of --bits is best spent on. Not for paper."
)
VALUE_CODING_HELP = "Codes of values; symmetric leaves the zero point out; auto as for keys. Not for paper."

OVERRIDES_HELP = "Of the model's configuration, as for SGLang (YaRN, say), not for paper; default: the dump's server's."


def model_overrides(text: str | None) -> dict[str, Any] | None:
    """What ``--json-model-override-args`` says; None without it.

    Raises:
        typer.BadParameter: it is no JSON object.
    """
    try:
        found = None if text is None else json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON ({error})", param_hint="--json-model-override-args") from error
    if found is not None and not isinstance(found, dict):
        raise typer.BadParameter("is not a JSON object", param_hint="--json-model-override-args")
    return found


TEXT_HELP = "JSON Lines with text or messages: the model itself says on it where a mean of --bits is needed."


def needs_mean(goal: BitGoal | None, flag: str) -> None:
    """Refuse an option that says how a mean of ``--bits`` is spent where none is asked for.

    Raises:
        typer.BadParameter: naming the option.
    """
    if goal is None or goal.mean is None:
        raise typer.BadParameter("has no meaning without a mean of --bits", param_hint=flag)


def given(context: typer.Context, name: str) -> bool:
    """Whether the user gave a parameter, on the command line or as a variable."""
    return getattr(context.get_parameter_source(name), "name", "") in ("COMMANDLINE", "ENVIRONMENT")


def refuse_foreign_options(context: typer.Context, recipe: FittedRecipe, *besides: str) -> None:
    """Refuse what the user gave, on the command line or as a variable, and the recipe does not read.

    Args:
        context: of the command.
        recipe: the one chosen.
        besides: parameters that the command needs for itself, whatever the recipe.

    Raises:
        typer.BadParameter: naming the first one and the recipes that take it.
    """
    for name in context.params:
        if not given(context, name) or name in besides:
            continue
        field = FIELDS.get(name, name)
        if field in OPTIONS and field not in recipe.options:
            takers = [other.name for other in FITTED.values() if field in other.options]
        elif name == "model" and not recipe.needs_weights:
            takers = [other.name for other in FITTED.values() if other.needs_weights]
        else:
            continue
        raise _foreign(FLAGS.get(name, name), recipe, takers)


def refuse_idle_options(context: typer.Context, dump: Path, options: FitOptions) -> None:
    """Refuse what the user gave to ``oscar fit`` and the rest of the command leaves nothing to do.

    Args:
        context: of the command.
        dump: folder of the dump.
        options: of the fit, without their text.

    Raises:
        typer.BadParameter: naming the first one.
    """
    unmeasured = None if options.needs_samples else "without --clip fit or --report"
    counted = "for a dump of covariances" if is_covariance_dump(dump) else None
    both = "beside --key-target and --value-target" if given(context, "value_target") else None
    idle = {
        "holdout_tokens": unmeasured,
        "group_size": None if "bits" in FITTED[context.params["recipe"]].options else unmeasured,
        "include_warmup": counted,
        "allow_incomplete": counted,
        "method": both if given(context, "key_target") else None,
        "overrides": "with --context 0" if options.context == 0 and not context.params["text"] else None,
    }
    for name, why in idle.items():
        if why and given(context, name):
            flag = FLAGS.get(name, name).replace("_", "-")
            raise typer.BadParameter(f"has no meaning {why}", param_hint=f"--{flag}")


def refuse_bits(recipe: FittedRecipe) -> None:
    """Refuse ``--bits`` for a recipe that does not read it, where a command takes several recipes.

    Raises:
        typer.BadParameter: naming the recipes that take it.
    """
    if "bits" not in recipe.options:
        raise _foreign("bits", recipe, [other.name for other in FITTED.values() if "bits" in other.options])


def _foreign(flag: str, recipe: FittedRecipe, takers: list[str]) -> typer.BadParameter:
    return typer.BadParameter(
        f"has no meaning for --recipe {recipe.name}; --recipe {' or '.join(takers)} takes it",
        param_hint=f"--{flag.replace('_', '-')}",
    )
