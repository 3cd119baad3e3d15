"""The commands ``convert``, ``zoo list`` and ``zoo get``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from oscar_rotation.atomic import write_atomically
from oscar_rotation.files.convert import convert

RepoOption = Annotated[str | None, typer.Option("--repo", help="Hub repository of the zoo; or OSCAR_ZOO_REPO.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or, to pin it, commit.")]


def add_file_commands(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Register the commands; ``errors`` turns the errors a user can cause into one line."""
    zoo = typer.Typer(help="Calibrated rotations from the hub.", no_args_is_help=True)
    app.add_typer(zoo, name="zoo")

    @app.command("convert")
    def convert_command(
        source: Annotated[Path, typer.Argument(help="Rotation file, .pt or .safetensors.")],
        target: Annotated[Path, typer.Argument(help="File to write; its suffix chooses the format.")],
        model_id: Annotated[str | None, typer.Option(help="Record the model it belongs to.")] = None,
    ) -> None:
        """Convert a rotation file between .pt and .safetensors."""
        with errors():
            converted = convert(source, target, model_id=model_id)
        typer.echo(f"wrote {target}: {converted.num_layers} layers, head_dim {converted.head_dim}")

    @zoo.command("list")
    def list_command(
        repo: RepoOption = None,
        revision: RevisionOption = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Show the rotation files of a zoo."""
        from oscar_rotation.files.zoo import list_zoo, zoo_repo

        with errors():
            listing = list_zoo(zoo_repo(repo), revision)
        if as_json:
            typer.echo(json.dumps(vars(listing), indent=2))
            return
        typer.echo(f"{listing.repo} at commit {listing.commit}")
        for folder, names in listing.folders.items():
            typer.echo(f"{folder}")
            for name in sorted(names):
                typer.echo(f"  {name}")

    @zoo.command("get")
    def get_command(
        paths: Annotated[list[str], typer.Argument(help="Files inside the zoo, as `zoo list` shows them.")],
        out: Annotated[Path | None, typer.Option(help="Copy them to this folder too.")] = None,
        repo: RepoOption = None,
        revision: RevisionOption = None,
        offline: Annotated[bool, typer.Option("--offline", help="Use the local cache only.")] = False,
    ) -> None:
        """Fetch rotation files and check them."""
        from oscar_rotation.files.zoo import get_rotations, zoo_repo

        with errors():
            names = [PurePosixPath(path).name for path in paths]
            if out is not None and (twice := next((name for name in names if names.count(name) > 1), None)):
                raise typer.BadParameter(
                    f"several files are named {twice}; fetch them one after the other", param_hint="--out"
                )
            for path in get_rotations(zoo_repo(repo), paths, revision, offline=offline):
                place = path
                if out is not None:
                    out.mkdir(parents=True, exist_ok=True)
                    place = out / path.name
                    write_atomically(place, partial(shutil.copyfile, path))
                typer.echo(str(place))
