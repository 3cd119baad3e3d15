"""What commands share: errors in one line, and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from oscar_rotation.errors import DumpError, ReportError, RotationFileError


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
