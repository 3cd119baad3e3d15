"""The commands ``dump``, ``calibrate``, ``eval``, ``ablation`` and ``models``.

Every option can also be given as the environment variable that the scripts under ``rotation/`` document.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from oscar_rotation.cli import one_line_errors
from oscar_rotation.fit import FitOptions
from oscar_rotation.model_table import ModelSettings, known_models, model_settings
from oscar_rotation.targets import DEFAULT_METHOD
from sglang_oscar.drivers.calibration_data import dataset_label
from sglang_oscar.drivers.dump_driver import DumpRequest, run_dump
from sglang_oscar.drivers.errors import DataError, HarnessError
from sglang_oscar.drivers.folders import CalibrationFolder, latest_calibration
from sglang_oscar.drivers.rotation_driver import run_fit
from sglang_oscar.local_server import ServerFailedError

NAME = Annotated[str, typer.Argument(help="Folder name of the model table, hub id or path.")]
MODEL = Annotated[str | None, typer.Option(envvar="MODEL", help="Another hub id or path for this model.")]
ROOT = Annotated[Path, typer.Option(envvar="OSCAR_ROOT", help="Where <model>/<DATASET>/... are.")]
DATASET = Annotated[str, typer.Option(envvar="DATASET", help="GPQA, MMLU, WikiText or a local .jsonl.")]
LOCAL = Annotated[Path | None, typer.Option(envvar="DATASET_PATH", help="Local copy of the data set.")]
TOKENS = Annotated[int, typer.Option(envvar="DUMP_KVCACHE_TOKENS", min=1, help="Calibration tokens.")]
GROUP = Annotated[int | None, typer.Option(envvar="GROUP_SIZE", help="Channels per quantization group.")]
TP = Annotated[int | None, typer.Option(envvar="TP_SIZE", help="Tensor parallelism.")]
GPU = Annotated[str | None, typer.Option(envvar="GPU", help="CUDA_VISIBLE_DEVICES.")]
SERVER_ARGS = Annotated[str, typer.Option(envvar="SERVER_ARGS", help="Further flags for every server.")]


@contextmanager
def driver_errors() -> Iterator[None]:
    """The errors that a user can cause, as one line and exit code 1."""
    with one_line_errors():
        try:
            yield
        except (DataError, HarnessError, ServerFailedError, ValueError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None


def settings_of(name: str, model: str | None, group: int | None, gpu: str | None) -> ModelSettings:
    """The table's settings with what the user changed."""
    return model_settings(name).overridden(model=model, group_size=group, gpu=gpu)


def add_driver_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("models")(models_command)
    app.command("dump")(dump_command)
    app.command("calibrate")(calibrate_command)


def models_command() -> None:
    """Show the models with settings of their own."""
    for name in known_models():
        settings = model_settings(name)
        typer.echo(f"{name}: {settings.model}, TP {settings.tp_dump} to dump, {settings.tp_eval} to evaluate")


def dump_command(
    name: NAME,
    model: MODEL = None,
    root: ROOT = Path("rotation"),
    dataset: DATASET = "GPQA",
    dataset_path: LOCAL = None,
    tokens: TOKENS = 30000,
    group_size: GROUP = None,
    tp: TP = None,
    gpu: GPU = None,
    covariances: Annotated[
        bool, typer.Option("--covariances", envvar="STREAM", help="Keep covariances instead of activations.")
    ] = False,
    server_args: SERVER_ARGS = "",
) -> None:
    """Record queries, keys and values of a model on a data set, through an ordinary server."""
    settings = settings_of(name, model, group_size, gpu).overridden(tp_dump=tp)
    extra = tuple(server_args.split())
    with driver_errors():
        folder = run_dump(DumpRequest(settings, root, dataset, tokens, dataset_path, covariances, extra))
    typer.echo(f"dump: {folder.dump}")


def calibrate_command(
    name: NAME,
    root: ROOT = Path("rotation"),
    dataset: DATASET = "GPQA",
    tokens: Annotated[int | None, typer.Option(envvar="DUMP_KVCACHE_TOKENS", help="Of the dump; any if unset.")] = None,
    group_size: GROUP = None,
    dump_dir: Annotated[Path | None, typer.Option(envvar="DUMP_DIR", help="This dump, not the newest one.")] = None,
    method: Annotated[str, typer.Option(envvar="METHOD", help="Pair of targets, as in `oscar fit`.")] = DEFAULT_METHOD,
    composition: Annotated[str, typer.Option(envvar="COMPOSITION", help="As in `oscar fit`.")] = "r_h_pbr",
    clip: Annotated[str, typer.Option(envvar="CLIP", help="none, or fit: clip ratios per layer.")] = "none",
    report: Annotated[bool, typer.Option(envvar="REPORT", help="Measure errors per layer.")] = True,
    device: Annotated[str, typer.Option(envvar="DEVICE", help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Fit the rotations of a model from its newest complete dump."""
    if clip not in ("none", "fit"):
        raise typer.BadParameter(f"{clip!r} is neither none nor fit", param_hint="--clip")
    settings = settings_of(name, None, group_size, None)
    with driver_errors():
        if dump_dir is not None:
            folder = CalibrationFolder(dump_dir.parent)
        else:
            folder = latest_calibration(root, settings.name, dataset_label(dataset), tokens, settings.group_size)
        options = FitOptions.of_method(
            method, composition=composition, fit_clip=clip == "fit", report=report, group_size=settings.group_size
        )
        typer.echo(f"fitting {folder.dump}")
        out = run_fit(folder, options, device)
    typer.echo(f"rotations: {out}")
