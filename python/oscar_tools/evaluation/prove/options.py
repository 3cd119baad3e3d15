"""Options of ``oscar prove`` that say which caches are compared."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oscar_cpu.server import has_gpu
from oscar_rotation.defaults import GROUP_SIZE
from oscar_rotation.recipes import DEFAULT, DEFAULT_BITS
from oscar_tools.evaluation.prove.caches import BF16, CACHES, FP8, INT2, Flags, given_rotations
from oscar_tools.evaluation.prove.names import known
from oscar_tools.evaluation.prove.specs import NAMES, Spec, parse_specs

LIMIT = "--max-total-tokens"
"""What tells a server how much memory its cache may take."""


def _flags(text: str, option: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error} in {text!r}", param_hint=option) from error


@dataclass(frozen=True)
class CacheOptions:
    """Which caches are compared and how their servers are started.

    Raises:
        typer.BadParameter: unknown names, rotations that are not there or contradict each other, open quotes.
    """

    cache: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(CACHES)}; repeatable; default: all but naive. BF16 is always there."),
    ] = None
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of the int2 cache, of {', '.join(NAMES)}; NAME:GROUP:BITS:CODINGS gives it a group size, bits and "
            f"codings (paper:64, focus::2.5, focus::k2v2:codebook+symmetric); repeatable; default: {DEFAULT}."
        ),
    ] = None
    bits: Annotated[
        list[str] | None,
        typer.Option(
            help="To fit each recipe without bits of its own for: a mean or widths, as in `oscar fit`; repeatable; "
            f"default: {DEFAULT_BITS}."
        ),
    ] = None
    bits_by_model: Annotated[
        bool,
        typer.Option(
            "--bits-by-model",
            help="For a mean of --bits, the model itself says on the calibration text where it is needed, as with "
            "--text in `oscar fit`.",
        ),
    ] = False
    rotations: Annotated[Path | None, typer.Option(help="Folder of rotation files, instead of fitting some.")] = None
    k_rotation: Annotated[Path | None, typer.Option(help="Rotation file of the keys, instead of a folder.")] = None
    v_rotation: Annotated[Path | None, typer.Option(help="Rotation file of the values.")] = None
    group_size: Annotated[
        int | None, typer.Option(help=f"Channels that share a scale; default: {GROUP_SIZE}, or the head's channels.")
    ] = None
    fit_context: Annotated[
        int | None,
        typer.Option(min=1, help="Positions that fits cover; default: what is measured, or the model's context."),
    ] = None
    chunk_sizes: Annotated[
        str,
        typer.Option(
            help="Tokens of --chunked-prefill-size, with commas: BF16 and the first int2 cache are also asked for "
            "their effects with each."
        ),
    ] = ""
    servers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Servers that are asked at the same time, BF16's first; on a GPU they share it, and --server-args "
            "must say how much memory each takes.",
        ),
    ] = 1
    bf16_args: Annotated[str, typer.Option(help="Further flags of the BF16 server and of the dump.")] = ""
    fp8_args: Annotated[str, typer.Option(help="Further flags of the FP8 server; default: those of BF16.")] = ""
    int2_args: Annotated[str, typer.Option(help="Further flags of int2 servers.")] = ""

    def __post_init__(self) -> None:
        names = self.names()
        fitted = {"--recipe": self.recipe, "--bits": self.bits, "--bits-by-model": self.bits_by_model}
        files = {"--rotations": self.rotations, "--k-rotation": self.k_rotation, "--v-rotation": self.v_rotation}
        for option, value in (fitted | files).items():
            if value and INT2 not in names:
                raise typer.BadParameter(f"has no meaning without --cache {INT2}", param_hint=option)
        self.specs()
        self.chunks()
        self.flags(())

    def names(self) -> tuple[str, ...]:
        """Names of caches."""
        chosen = known(self.cache or [BF16, FP8, INT2], CACHES, "--cache")
        return chosen if BF16 in chosen else (BF16, *chosen)

    def specs(self) -> tuple[Spec, ...]:
        """Int2 caches that are made here; none where the user gives rotations."""
        for option, values in (("--recipe", self.recipe), ("--bits", self.bits)):
            if values and (self.rotations or self.k_rotation or self.v_rotation):
                raise typer.BadParameter("is for rotations that are fitted; some are given", param_hint=option)
        return parse_specs(self.recipe or [DEFAULT], self.bits or [], self.bits_by_model)

    def chunks(self) -> tuple[int, ...]:
        """Tokens of prefill chunks whose effect is asked for."""
        try:
            found = tuple(int(part) for part in self.chunk_sizes.split(",") if part.strip())
        except ValueError:
            found = (0,)
        if any(tokens < 1 for tokens in found):
            raise typer.BadParameter(f"{self.chunk_sizes!r} is not numbers with commas", param_hint="--chunk-sizes")
        return tuple(dict.fromkeys(found))

    def check_specs(self, head_dim: int, group_size: int) -> None:
        """Refuse groups and means that no int2 cache of the model has, before a server is started.

        Args:
            head_dim: channels of a head of the model.
            group_size: channels that share a scale, where a spec does not say.

        Raises:
            typer.BadParameter: one of them.
        """
        import torch

        from oscar_kernels.layout import RowLayout

        for spec in self.specs():
            group = spec.group or group_size
            option = "--recipe" if spec.group else "--group-size"
            try:
                if spec.group or self.group_size:
                    RowLayout(1, head_dim, group, torch.bfloat16)
                option = "--bits"
                if self.given() is None and spec.goal is not None and spec.goal.mean is not None:
                    spec.goal.widths(head_dim, group, spec.codings)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint=option) from error

    def check_memory(self, common: tuple[str, ...]) -> None:
        """Refuse several servers on a GPU that do not say how much of it each takes: the first would take nearly all.

        Args:
            common: flags of every server.

        Raises:
            typer.BadParameter: they do not.
        """
        if self.servers > 1 and has_gpu() and not any(flag.split("=")[0] == LIMIT for flag in common):
            raise typer.BadParameter(
                f"{self.servers} servers on one GPU need a limit of memory each, such as "
                f'--server-args "--mem-fraction-static 0.45 {LIMIT} 200000"',
                param_hint="--servers",
            )

    def given(self) -> tuple[Path, Path] | None:
        """The user's rotation files."""
        try:
            return given_rotations(self.rotations, self.k_rotation, self.v_rotation)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--rotations") from error

    def flags(self, common: tuple[str, ...]) -> Flags:
        """Flags of all kinds of servers."""
        bf16 = _flags(self.bf16_args, "--bf16-args")
        fp8 = _flags(self.fp8_args, "--fp8-args") if self.fp8_args else bf16
        return Flags(common, bf16, fp8, _flags(self.int2_args, "--int2-args"))
