"""Names that options choose from."""

from __future__ import annotations

import typer


def known(values: list[str] | None, names: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Values of an option that can be repeated; all of ``names`` where there are none, in its order.

    Raises:
        typer.BadParameter: a value that is none of ``names``.
    """
    for value in values or ():
        if value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}", param_hint=option)
    return tuple(name for name in names if not values or name in values)
