"""The commands ``fit``, ``report``, ``inspect`` and those on files; ``app`` can be mounted into another typer app.

Exit codes: 0 done, 1 a file or dump cannot be used, 2 wrong usage. Errors are one line on stderr.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from oscar_kernels.layout import AFFINE
from oscar_rotation.defaults import GROUP_SIZE
from oscar_rotation.file_commands import add_file_commands
from oscar_rotation.files.rotation_file import SUFFIXES
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.options import KEY_CODINGS, SHARES, VALUE_CODINGS, FitOptions, OptionError
from oscar_rotation.fit.result import FitResult
from oscar_rotation.fit.targets import DEFAULT_METHOD, KEY_TARGETS, METHODS, VALUE_TARGETS
from oscar_rotation.fit.texts import read_documents
from oscar_rotation.fit_output import check_folder, formats
from oscar_rotation.math.compose import COMPOSITIONS, DEFAULT_COMPOSITION
from oscar_rotation.math.eigenbasis import EIGEN_ORDERS
from oscar_rotation.recipe_options import (
    BITS_HELP,
    KEY_CODING_HELP,
    OVERRIDES_HELP,
    TEXT_HELP,
    VALUE_CODING_HELP,
    bit_goal,
    given,
    model_overrides,
    needs_mean,
    refuse_foreign_options,
    refuse_idle_options,
)
from oscar_rotation.recipes import DEFAULT, FITTED, PUBLISHED, FitRequest
from oscar_rotation.report.inspect import describe, render
from oscar_rotation.report.report import REPORT_NAME, read_report, render_report, write_report
from oscar_rotation.terminal import one_line_errors, progress_bar

app = typer.Typer(
    help="Fit and inspect rotations for the 2-bit KV cache.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _choice(text: str, known: Iterable[str], *names: str) -> Any:
    """An option that takes one of ``known``."""
    choices = list(known)

    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return typer.Option(*names, help=text, metavar="|".join(choices), callback=check)


CLIPS = ("none", "fit")
FORMATS = {"pt": (".pt",), "safetensors": (".safetensors",), "both": tuple(SUFFIXES)}
RECIPES_HELP = "; ".join(f"{recipe.name}: {recipe.summary} (needs {recipe.needs})" for recipe in FITTED.values())


@app.command("fit")
def fit_command(
    context: typer.Context,
    dump: Annotated[Path, typer.Argument(help="Folder of a dump: layer_0, layer_1, ...")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the rotation files.")],
    recipe: Annotated[str, _choice(f"{RECIPES_HELP}.", FITTED)] = DEFAULT,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the weights, not for paper; default: the dump's.")
    ] = None,
    positions: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=0,
            help="Positions to fit for, not for paper; default: all of the model's; 0: the dump's alone.",
        ),
    ] = None,
    overrides: Annotated[
        str | None, typer.Option("--json-model-override-args", metavar="JSON", help=OVERRIDES_HELP)
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(help=BITS_HELP),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help=TEXT_HELP,
        ),
    ] = None,
    key_coding: Annotated[str, _choice(KEY_CODING_HELP, KEY_CODINGS)] = AFFINE,
    value_coding: Annotated[str, _choice(VALUE_CODING_HELP, VALUE_CODINGS)] = AFFINE,
    method: Annotated[str, _choice("Pair of covariance targets.", METHODS)] = DEFAULT_METHOD,
    key_target: Annotated[str | None, _choice("Instead of the method's.", KEY_TARGETS)] = None,
    value_target: Annotated[str | None, _choice("Instead of the method's.", VALUE_TARGETS)] = None,
    composition: Annotated[str, _choice("Factors of the rotation.", COMPOSITIONS)] = DEFAULT_COMPOSITION,
    order: Annotated[str, _choice("Order of the eigenvectors.", EIGEN_ORDERS)] = "ascending",
    share: Annotated[str, _choice("One rotation per layer or per kv head.", SHARES)] = "layer",
    clip: Annotated[str, _choice("Fit clip ratios per layer, or leave them to the server.", CLIPS)] = "none",
    report: Annotated[bool, typer.Option("--report", help=f"Measure errors per layer into {REPORT_NAME}.")] = False,
    group_size: Annotated[
        int, typer.Option(help="Quantization group of --clip, --report and a mean of --bits.")
    ] = GROUP_SIZE,
    holdout_tokens: Annotated[int, typer.Option(help="Tokens that --clip and --report measure on.")] = 1024,
    include_warmup: Annotated[bool, typer.Option("--include-warmup", help="Fit on chunk 0 too.")] = False,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Use the whole chunks of an interrupted dump.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    file_format: Annotated[
        str | None, _choice("File format; pt, or safetensors for one rotation per kv head.", FORMATS, "--format")
    ] = None,
) -> None:
    """Fit rotations to a dump and write one file for K and one for V.

    Options from --method to --report, --holdout-tokens and --include-warmup are of the recipe paper alone.
    """
    chosen = FITTED[recipe]
    refuse_foreign_options(context, chosen)
    goal = bit_goal(bits, chosen)
    if chosen.name != PUBLISHED and given(context, "group_size"):
        needs_mean(goal, "--group-size")
    if text is not None:
        needs_mean(goal, "--text")
    targets = {"key_target": key_target, "value_target": value_target}
    try:
        options = FitOptions.of_method(
            method,
            order=order,
            composition=composition,
            include_warmup=include_warmup,
            share=share,
            fit_clip=clip == "fit",
            report=report,
            group_size=group_size,
            holdout_tokens=holdout_tokens,
            context=positions,
            overrides=model_overrides(overrides),
            bits=goal,
            key_coding=key_coding,
            value_coding=value_coding,
            **{name: value for name, value in targets.items() if value is not None},
        )
    except OptionError as error:
        raise typer.BadParameter(error.fault, param_hint=f"--{error.option.replace('_', '-')}") from error
    refuse_idle_options(context, dump, options)
    try:
        choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    with one_line_errors():
        suffixes = formats(dump, chosen, options, FORMATS[file_format] if file_format else None)
        check_folder(out, chosen, options, suffixes)
        if text is not None:
            options = replace(options, text=read_documents(text))
        request = FitRequest(dump, options, model, device, allow_incomplete)
        try:
            with progress_bar() as progress:
                result = chosen.run(replace(request, progress=progress))
        except OptionError as error:
            raise typer.BadParameter(error.fault, param_hint=f"--{error.option.replace('_', '-')}") from error
        paths = result.save(out, suffixes)
        if result.report:
            paths.append(write_report(out, result.report))
    _print_fit(result, paths)


def _print_fit(result: FitResult, paths: list[Path]) -> None:
    for remark in result.remarks:
        typer.echo(f"note: {remark}", err=True)
    typer.echo(result.summary)
    for path in paths:
        typer.echo(f"wrote {path}")


@app.command("report")
def report_command(
    source: Annotated[Path, typer.Argument(help=f"Folder or {REPORT_NAME} of a fit with --report.")],
    plots: Annotated[Path | None, typer.Option(help="Folder for plots; needs the extra 'plots'.")] = None,
) -> None:
    """Show what the rotations of a fit do to each layer, beside Hadamard and identity."""
    with one_line_errors():
        content = read_report(source)
        drawn: list[Path] = []
        if plots is not None:
            from oscar_rotation.report.plots import draw_report

            drawn = draw_report(content, plots)
    Console().print(render_report(content))
    for path in drawn:
        typer.echo(f"wrote {path}")


@app.command("inspect")
def inspect_command(
    file: Annotated[Path, typer.Argument(help="Rotation file, .pt or .safetensors.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a rotation file."""
    with one_line_errors():
        description = describe(file)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
    else:
        Console().print(render(description))


add_file_commands(app, one_line_errors)
