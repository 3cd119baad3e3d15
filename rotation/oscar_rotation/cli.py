"""The commands ``fit``, ``report``, ``inspect`` and those on files; ``app`` can be mounted into another typer app.

Exit codes: 0 done, 1 a file or dump cannot be used, 2 wrong usage. Errors are one line on stderr.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from oscar_rotation.dump import DumpReader
from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.errors import DumpError, RotationFileError
from oscar_rotation.file_commands import add_file_commands
from oscar_rotation.files.rotation_file import SUFFIXES, rotation_file_name, save_rotation_file
from oscar_rotation.fit.calibrate import FitOptions, FitResult, choose_device, fit
from oscar_rotation.fit.options import SHARES
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.plus import fit_plus
from oscar_rotation.fit.targets import DEFAULT_METHOD, KEY_TARGETS, METHODS, VALUE_TARGETS
from oscar_rotation.math.compose import COMPOSITIONS, DEFAULT_COMPOSITION
from oscar_rotation.math.eigenbasis import EIGEN_ORDERS
from oscar_rotation.math.quantized import DEFAULT_GROUP_SIZE
from oscar_rotation.report.inspect import describe, render
from oscar_rotation.report.report import REPORT_NAME, ReportError, read_report, render_report, write_report

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
RECIPE_NAMES = ("paper", "plus")
FORMATS = {"pt": (".pt",), "safetensors": (".safetensors",), "both": tuple(SUFFIXES)}


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors that a user can cause into one line on stderr and exit code 1."""
    try:
        yield
    except (RotationFileError, DumpError, ReportError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or 'file'}: {error.strerror or error}")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def fit_with_progress(dump: Path, options: FitOptions, device: str, allow_incomplete: bool) -> FitResult:
    """:func:`oscar_rotation.fit.calibrate.fit` with a progress bar on stderr."""
    source = dump if is_covariance_dump(dump) else DumpReader(dump, allow_incomplete=allow_incomplete)
    with progress_bar() as progress:
        return fit(source, options, device=device, progress=progress)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal; gives what is to be called with (done, total)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("fitting", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def fit_plus_with_progress(dump: Path, model: str | None, device: str, allow_incomplete: bool) -> FitResult:
    """The recipe ``plus`` with a progress bar on stderr; ``model`` defaults to the one that the dump names.

    Raises:
        DumpError: the dump holds covariances only, or nobody says which model's output projections to read.
    """
    if is_covariance_dump(dump):
        raise DumpError(f"{dump}: holds covariances; the recipe plus needs a dump of activations")
    reader = DumpReader(dump, allow_incomplete=allow_incomplete)
    source = model or (reader.manifest.model_id if reader.manifest else "")
    if not source:
        raise DumpError(f"{dump}: does not name its model; give the folder or id of its weights with --model")
    with progress_bar() as progress:
        return fit_plus(reader, OutputWeights(source), device=device, progress=progress)


def save_fit(result: FitResult, out: Path, suffixes: tuple[str, ...] = (".pt",)) -> list[Path]:
    """Write both rotation files of a fit under their usual names and return their paths.

    Raises:
        OSError: if a file cannot be written.
    """
    paths = []
    for side, rotations in (("k", result.key), ("v", result.value)):
        for suffix in suffixes:
            facts = rotations.metadata
            path = out / rotation_file_name(side, facts.objective, facts.composition, suffix)  # type: ignore[arg-type]
            save_rotation_file(path, rotations)
            paths.append(path)
    return paths


@app.command("fit")
def fit_command(
    context: typer.Context,
    dump: Annotated[Path, typer.Argument(help="Folder of a dump: layer_0, layer_1, ...")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the rotation files.")],
    recipe: Annotated[
        str, _choice("The published method, or key centers and balanced transforms.", RECIPE_NAMES)
    ] = "paper",
    model: Annotated[
        str | None, typer.Option(help="For plus: folder or id of the weights; default: what the dump names.")
    ] = None,
    method: Annotated[str, _choice("Pair of covariance targets.", METHODS)] = DEFAULT_METHOD,
    key_target: Annotated[str | None, _choice("Instead of the method's.", KEY_TARGETS)] = None,
    value_target: Annotated[str | None, _choice("Instead of the method's.", VALUE_TARGETS)] = None,
    composition: Annotated[str, _choice("Factors of the rotation.", COMPOSITIONS)] = DEFAULT_COMPOSITION,
    order: Annotated[str, _choice("Order of the eigenvectors.", EIGEN_ORDERS)] = "ascending",
    share: Annotated[str, _choice("One rotation per layer or per kv head.", SHARES)] = "layer",
    clip: Annotated[str, _choice("Fit clip ratios per layer, or leave them to the server.", CLIPS)] = "none",
    report: Annotated[bool, typer.Option("--report", help=f"Measure errors per layer into {REPORT_NAME}.")] = False,
    group_size: Annotated[int, typer.Option(help="Quantization group of --clip and --report.")] = DEFAULT_GROUP_SIZE,
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
    """Fit rotations to a dump and write one file for K and one for V."""
    if recipe == "plus":
        _fit_plus(context, dump, out, model, device, allow_incomplete)
        return
    if model is not None:
        raise typer.BadParameter("is read by --recipe plus only", param_hint="--model")
    if file_format is None:
        file_format = "pt" if share == "layer" else "safetensors"
    chosen: dict[str, Any] = {"key_target": key_target, "value_target": value_target}
    overrides = {name: value for name, value in chosen.items() if value is not None}
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
            **overrides,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    with one_line_errors():
        result = fit_with_progress(dump, options, device, allow_incomplete)
        paths = save_fit(result, out, FORMATS[file_format])
        if result.report:
            paths.append(write_report(out, result.report))
    _print_fit(result, paths)


PLUS_OPTIONS = {"context", "dump", "out", "recipe", "model", "device", "allow_incomplete"}
"""Options of ``fit`` that the recipe plus takes; it has no choice of targets, order, composition or sharing."""


def _fit_plus(
    context: typer.Context, dump: Path, out: Path, model: str | None, device: str, allow_incomplete: bool
) -> None:
    given = [
        name
        for name in context.params
        if name not in PLUS_OPTIONS and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given and not (given == ["file_format"] and context.params["file_format"] == "safetensors"):
        raise typer.BadParameter(
            "has no meaning for --recipe plus", param_hint=f"--{given[0].replace('file_format', 'format')}"
        )
    try:
        choose_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error
    with one_line_errors():
        result = fit_plus_with_progress(dump, model, device, allow_incomplete)
        paths = save_fit(result, out, FORMATS["safetensors"])
    _print_fit(result, paths)


def _print_fit(result: FitResult, paths: list[Path]) -> None:
    for remark in result.remarks:
        typer.echo(f"note: {remark}", err=True)
    calibration = result.key.metadata.calibration
    typer.echo(
        f"fitted {result.key.num_layers} layers on {calibration['tokens']} tokens of {calibration['requests']} requests"
    )
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
