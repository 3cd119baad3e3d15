"""The command ``oscar prove``."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from oscar_rotation.model_table import ModelSettings
from oscar_rotation.recipes import DEFAULT, FITTED
from sglang_oscar.calibration.commands import driver_errors
from sglang_oscar.calibration.errors import DataError
from sglang_oscar.calibration.model_files import load_config, load_tokenizer
from sglang_oscar.calibration.option_groups import NAME, ServerOptions, with_groups
from sglang_oscar.cpu.server import has_gpu
from sglang_oscar.evaluation.prove.caches import (
    BF16,
    CACHES,
    FP8,
    INT2,
    NAIVE,
    Cache,
    CacheMaker,
    Flags,
    given_rotations,
)
from sglang_oscar.evaluation.prove.calibration import Calibration
from sglang_oscar.evaluation.prove.machine import machine, model_files
from sglang_oscar.evaluation.prove.measures import MEASURES, Material
from sglang_oscar.evaluation.prove.report import collect, write_report
from sglang_oscar.evaluation.prove.run import Outcome, Plan, ProveError, prove
from sglang_oscar.evaluation.prove.sizes import ROOM, SHORTEST, SIZES
from sglang_oscar.evaluation.prove.store import Store
from sglang_oscar.evaluation.prove.texts import MEASUREMENT, Texts

GROUP = 128
"""Channels per group unless a head has fewer."""


def _flags(text: str, option: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise typer.BadParameter(f"{error} in {text!r}", param_hint=option) from error


def _known(values: list[str] | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Values of an option that can be repeated; all of ``known`` where there are none, in its order."""
    for value in values or ():
        if value not in known:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)
    return tuple(name for name in known if not values or name in values)


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
        list[str] | None, typer.Option(help=f"To fit, of {', '.join(FITTED)}; repeatable; default: {DEFAULT}.")
    ] = None
    rotations: Annotated[Path | None, typer.Option(help="Folder of rotation files, instead of fitting some.")] = None
    k_rotation: Annotated[Path | None, typer.Option(help="Rotation file of the keys, instead of a folder.")] = None
    v_rotation: Annotated[Path | None, typer.Option(help="Rotation file of the values.")] = None
    group_size: Annotated[
        int | None, typer.Option(help="Channels that share a scale; default: 128, or the head's channels.")
    ] = None
    bf16_args: Annotated[str, typer.Option(help="Further flags of the BF16 server and of the dump.")] = ""
    fp8_args: Annotated[str, typer.Option(help="Further flags of the FP8 server; default: those of BF16.")] = ""
    int2_args: Annotated[str, typer.Option(help="Further flags of int2 servers.")] = ""

    def __post_init__(self) -> None:
        self.names()
        self.recipes()
        self.flags(())

    def names(self) -> tuple[str, ...]:
        """Names of caches."""
        chosen = _known(self.cache or [BF16, FP8, INT2], CACHES, "--cache")
        return chosen if BF16 in chosen else (BF16, *chosen)

    def recipes(self) -> tuple[str, ...]:
        """Recipes to fit."""
        if self.recipe and (self.rotations or self.k_rotation or self.v_rotation):
            raise typer.BadParameter("is for rotations that are fitted; some are given", param_hint="--recipe")
        return _known(self.recipe or [DEFAULT], tuple(FITTED), "--recipe")

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


@dataclass(frozen=True)
class MeasureOptions:
    """What is asked.

    Raises:
        typer.BadParameter: an unknown measure or size, or lengths that are no numbers or too short.
    """

    measure: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MEASURES)}; repeatable.")] = None
    size: Annotated[str | None, typer.Option(help="full or reduced; default: full with a GPU.")] = None
    lengths: Annotated[
        str, typer.Option(help="Context lengths in tokens, with commas; default: 1/4, 1/2 and all of the model's.")
    ] = ""
    text: Annotated[
        Path | None, typer.Option(help=".jsonl (text or messages) or .txt to calibrate and measure on.")
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for answers, logs and the page.")] = Path("prove")
    resume: Annotated[bool, typer.Option("--resume/--fresh", help="Keep answers of an earlier run, or not.")] = True

    def __post_init__(self) -> None:
        _known(self.measure, tuple(MEASURES), "--measure")
        if self.size is not None and self.size not in SIZES:
            raise typer.BadParameter(f"{self.size!r} is not one of {', '.join(SIZES)}", param_hint="--size")
        self.given_lengths()

    def given_lengths(self) -> tuple[int, ...]:
        """The user's lengths, ascending; none to choose by the model."""
        try:
            lengths = tuple(sorted({int(part) for part in self.lengths.split(",") if part.strip()}))
        except ValueError:
            raise typer.BadParameter(f"{self.lengths!r} is not numbers with commas", param_hint="--lengths") from None
        if lengths and lengths[0] < SHORTEST:
            raise typer.BadParameter(f"{lengths[0]} is below {SHORTEST}", param_hint="--lengths")
        return lengths

    def material(self, texts: Texts, context: int) -> Material:
        """What measures are made of, for a model of ``context`` tokens.

        Raises:
            DataError: the model's context is too short.
        """
        size = SIZES[self.size or ("full" if has_gpu() else "reduced")]
        lengths = self.given_lengths() or size.lengths(context)
        if not lengths or lengths[-1] > context - ROOM:
            wanted = lengths[-1] if lengths else SHORTEST
            raise DataError(f"a context of {wanted} tokens does not fit: the model takes {context}, less {ROOM}")
        return Material(texts, size, lengths, context)


@with_groups
def prove_command(name: NAME, caches: CacheOptions, measures: MeasureOptions, servers: ServerOptions) -> None:
    """Measure what the KV cache costs a model, against BF16 behind real servers, and write one page."""
    begin = time.monotonic()
    # Before anything is loaded: a folder that is missing should not take half a minute to be missed.
    settings = servers.settings(str(Path(name).resolve()) if Path(name).is_dir() else name, None)
    outcome = Outcome()
    with driver_errors():
        caches.given()
        config, tokenizer = load_config(settings), load_tokenizer(settings)
        settings = settings.overridden(group_size=caches.group_size or min(GROUP, _head_dim(config)))
        material = measures.material(Texts(tokenizer, measures.text), _context(config))
        store = Store(measures.out)
        if not measures.resume:
            store.clear()
        measures.out.mkdir(parents=True, exist_ok=True)
        chosen = [MEASURES[kind](material) for kind in _known(measures.measure, tuple(MEASURES), "--measure")]
        identity, here = model_files(settings.model), machine()
        depends = {"model": identity, "machine": here, "text": material.texts.fingerprint(MEASUREMENT)}
        plan = Plan(settings, chosen, store, measures.out, depends, material.size.at_once)
        maker = CacheMaker(settings, config, caches.flags(servers.flags), material.context)
        done: list[Cache] = []
        try:
            for make in _makers(caches, maker, settings, identity, material, measures.out):
                done.append(make())
                prove(plan, done[-1], outcome, typer.echo)
        except ProveError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo(f"interrupted; answers so far are in {measures.out}, the same command goes on", err=True)
            raise typer.Exit(130) from None
        for measure in chosen:
            if remark := getattr(measure, "remark", None):
                outcome.remark(f"{measure.title}: {remark}")
        command = shlex.join(["oscar", *sys.argv[1:]])
        results = collect(plan, done, outcome, material, here, command)
        results["seconds"] = round(time.monotonic() - begin)
        page = write_report(results, measures.out)
    typer.echo(page.read_text(encoding="utf-8").split("\n## ", 2)[1])
    typer.echo(f"page: {page}\nfigures: {page.with_suffix('.json')}\ntook {results['seconds']} s")
    if outcome.failed:
        raise typer.Exit(1)


def _makers(
    caches: CacheOptions,
    maker: CacheMaker,
    settings: ModelSettings,
    identity: dict[str, Any],
    material: Material,
    out: Path,
) -> list[Any]:
    """What makes each cache, in order; INT2 is fitted only when its turn comes."""
    given = caches.given()
    flags = maker.flags
    found: list[Any] = [maker.bf16]
    if FP8 in caches.names():
        found.append(maker.fp8)
    if INT2 in caches.names() and given is not None:
        found.append(lambda: maker.given(*given))
    elif INT2 in caches.names():
        calibration = Calibration(
            settings, identity, material.texts, material.size.calibration_tokens, out,
            (*maker.defaults, *flags.common, *flags.bf16),
        )  # fmt: skip
        for recipe in caches.recipes():
            found.append(lambda recipe=recipe: maker.fitted(recipe, calibration.rotations(recipe)))
    if NAIVE in caches.names():
        found.append(maker.naive)
    return found


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context(config: Any) -> int:
    found = getattr(config, "max_position_embeddings", None)
    if not found:
        raise DataError("the model's configuration does not say how many tokens it takes (max_position_embeddings)")
    return int(found)


def add_prove_command(app: typer.Typer) -> None:
    """Register the command."""
    app.command("prove")(prove_command)
