"""``oscar calibrate MODEL``: what a server does that has no rotations, without the server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from oscar_tools.calibration.self_calibration import FACTS, TOKENS, SelfCalibration, calibrate
from oscar_tools.doctor.model import model_config
from sglang_oscar.attach import refusals
from sglang_oscar.errors import Int2Error
from sglang_oscar.rotation_source import cache, places
from sglang_oscar.rotation_source.cache import Calibration
from sglang_oscar.rotation_source.flags import parser, recording_flags
from sglang_oscar.rotation_source.task import Task
from sglang_oscar.settings import Settings

OF_MODEL = ("trust_remote_code", "revision", "context_length", "enable_multimodal", "dtype", "quantization")
"""Server arguments that SGLang's ModelConfig takes by the same names."""


def calibrate_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to fill, such as MODEL/oscar; default: where servers look.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON Lines with text or messages, instead of what ships."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to record.")] = TOKENS,
) -> None:
    """Make rotations for MODEL and put them where a server finds them.

    Further options are flags of that server, as it will get them: --tp-size 2, --context-length 32768,
    --kv-cache-quant-group-size 64. Rotations that are there already are kept; --text makes them anew.
    """
    from oscar_tools.calibration.commands import driver_errors

    with driver_errors():
        args, settings = server_arguments(model, context.args), Settings.from_env()
        served = model_config(
            args.model_path, model_override_args=args.json_model_override_args,
            **{name: getattr(args, name) for name in OF_MODEL},
        )  # fmt: skip
        refusals.check_model(served)
        wanted = Calibration.of(args, settings, served, places.checkpoint(args))
        asked = SelfCalibration(Task.of(args, served, wanted, recording_flags(args)), text, tokens)
        if out is not None:
            _check_folder(out)
            with cache.filling(out.resolve()) as new:
                calibrate(asked, new)
            typer.echo(f"rotations: {out}")
            return
        folder = cache.root(settings) / wanted.key
        cache.writable(folder.parent)
        with cache.alone(folder, settings.calibrate_seconds, typer.echo):
            if text is None and cache.kept(folder) is not None:
                typer.echo(f"rotations: {folder} (made before)")
                return
            with cache.filling(folder) as new:
                calibrate(asked, new)
    typer.echo(f"rotations: {folder}")


def server_arguments(model: str, flags: list[str]) -> Any:
    """Arguments of a server in int2 mode as its parser reads them, which resolves nothing.

    Args:
        model: folder or hub id.
        flags: of the server.

    Raises:
        typer.BadParameter: the server would not take them.
    """
    from sglang.srt.plugins import load_plugins

    def refuse(message: str) -> NoReturn:
        raise typer.BadParameter(message)

    load_plugins()
    reader = parser()
    reader.error = refuse  # type: ignore[method-assign]
    return reader.parse_args(["--model-path", model, "--kv-cache-dtype", "int2", *flags])


def _check_folder(out: Path) -> None:
    """Refuse a folder whose place a calibration would take, unless it is one.

    Raises:
        Int2Error: it holds something else.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / FACTS).is_file())):
        raise Int2Error(f"{out}: is there and no calibration; name another folder with --out, or remove it")
