"""The commands ``calibrate``, ``dump``, ``rotate``, ``eval``, ``ablation`` and ``models``.

Every option can also be given as the environment variable that the scripts under ``rotation/`` document.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from oscar_kernels.layout import AFFINE
from oscar_rotation.fit.options import FitOptions, OptionError
from oscar_rotation.fit.targets import DEFAULT_METHOD
from oscar_rotation.fit.texts import read_documents
from oscar_rotation.model_table import known_models, model_settings
from oscar_rotation.recipe_options import BITS_HELP, TEXT_HELP, bit_goal, needs_mean, refuse_foreign_options
from oscar_rotation.recipes import DEFAULT, FITTED
from oscar_rotation.terminal import one_line_errors
from oscar_tools.calibration.calibrate_command import calibrate_command
from oscar_tools.calibration.dump_driver import DumpTask, run_dump
from oscar_tools.calibration.errors import DataError, HarnessError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.option_groups import (
    NAME,
    TOKENS,
    CalibrationOptions,
    DataOptions,
    ServerOptions,
    settings_of,
    with_groups,
)
from oscar_tools.calibration.rotation_driver import run_fit
from oscar_tools.local_server import ServerFailedError


@contextmanager
def driver_errors() -> Iterator[None]:
    """The errors that a user can cause, as one line and exit code 1."""
    with one_line_errors():
        try:
            yield
        except (DataError, HarnessError, ServerFailedError, ValueError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


def add_driver_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("models")(models_command)
    app.command("dump")(dump_command)
    app.command("rotate")(rotate_command)
    # Flags of the server to be are the server's to read.
    taken = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("calibrate", context_settings=taken)(calibrate_command)


def models_command() -> None:
    """Show the models with settings of their own."""
    for name in known_models():
        settings = model_settings(name)
        typer.echo(f"{name}: {settings.model}, TP {settings.tp_dump} to dump, {settings.tp_eval} to evaluate")


@with_groups
def dump_command(
    name: NAME,
    calibration: CalibrationOptions,
    data: DataOptions,
    servers: ServerOptions,
    tokens: TOKENS = 30000,
    covariances: Annotated[
        bool, typer.Option("--covariances", envvar="STREAM", help="Keep covariances instead of activations.")
    ] = False,
) -> None:
    """Record queries, keys and values of a model on a data set, through an ordinary server."""
    settings = servers.settings(name, calibration.group_size)
    dataset, local = calibration.dataset, data.local(calibration.dataset)
    assert tokens is not None
    with driver_errors():
        task = DumpTask(settings, calibration.root, dataset, tokens, local, covariances, servers.flags)
        folder = run_dump(task)
    typer.echo(f"dump: {folder.dump}")


@with_groups
def rotate_command(
    context: typer.Context,
    name: NAME,
    calibration: CalibrationOptions,
    tokens: TOKENS = None,
    dump_dir: Annotated[
        Path | None, typer.Option(envvar="DUMP_DIR", help="Folder of this dump, not the newest one.")
    ] = None,
    recipe: Annotated[
        str, typer.Option(envvar="RECIPE", help=f"One of {', '.join(FITTED)}; paper is the published one.")
    ] = DEFAULT,
    bits: Annotated[str | None, typer.Option(envvar="BITS", help=BITS_HELP)] = None,
    text: Annotated[Path | None, typer.Option(envvar="BITS_TEXT", exists=True, dir_okay=False, help=TEXT_HELP)] = None,
    key_coding: Annotated[str, typer.Option(envvar="KEY_CODING", help="As in `oscar fit`.")] = AFFINE,
    value_coding: Annotated[str, typer.Option(envvar="VALUE_CODING", help="As in `oscar fit`.")] = AFFINE,
    positions: Annotated[
        int | None,
        typer.Option("--context", envvar="FIT_CONTEXT", min=0, help="Positions, as in `oscar fit`."),
    ] = None,
    method: Annotated[str, typer.Option(envvar="METHOD", help="Pair of targets, as in `oscar fit`.")] = DEFAULT_METHOD,
    composition: Annotated[str, typer.Option(envvar="COMPOSITION", help="As in `oscar fit`.")] = "r_h_pbr",
    clip: Annotated[str, typer.Option(envvar="CLIP", help="none, or fit: clip ratios per layer.")] = "none",
    report: Annotated[bool, typer.Option(envvar="REPORT", help="Measure errors per layer.")] = True,
    device: Annotated[str, typer.Option(envvar="DEVICE", help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Fit the rotations of a model from its newest complete dump, of as many tokens as asked for if asked."""
    if clip not in ("none", "fit"):
        raise typer.BadParameter(f"{clip!r} is neither none nor fit", param_hint="--clip")
    if recipe not in FITTED:
        raise typer.BadParameter(f"{recipe!r} is not one of {', '.join(FITTED)}", param_hint="--recipe")
    settings = settings_of(name).overridden(group_size=calibration.group_size)
    refuse_foreign_options(context, FITTED[recipe], "group_size")
    goal = bit_goal(bits, FITTED[recipe])
    if text is not None:
        needs_mean(goal, "--text")
    with driver_errors():
        folder = CalibrationFolder.of_dump(dump_dir) if dump_dir else calibration.latest(settings, tokens)
        try:
            options = FitOptions.of_method(
                method, composition=composition, fit_clip=clip == "fit", report=report,
                group_size=settings.group_size, context=positions, bits=goal, key_coding=key_coding,
                value_coding=value_coding, text=None if text is None else read_documents(text),
            )  # fmt: skip
            typer.echo(f"fitting {folder.dump}")
            out = run_fit(folder, recipe, options, device)
        except OptionError as error:
            raise typer.BadParameter(error.fault, param_hint=f"--{error.option.replace('_', '-')}") from error
    typer.echo(f"rotations: {out}")
