"""The command ``oscar prove``."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from oscar_rotation.errors import DumpError, RotationFileError
from sglang_oscar.calibration.commands import driver_errors
from sglang_oscar.calibration.errors import DataError
from sglang_oscar.calibration.model_files import context_length, load_config, load_tokenizer
from sglang_oscar.calibration.option_groups import NAME, ServerOptions, with_groups
from sglang_oscar.calibration.weight_files import model_files
from sglang_oscar.errors import Int2Error
from sglang_oscar.evaluation.prove.caches import BF16, FP8, INT2, NAIVE, Cache, CacheMaker
from sglang_oscar.evaluation.prove.calibration import Calibration, Fit
from sglang_oscar.evaluation.prove.machine import machine
from sglang_oscar.evaluation.prove.measure_options import MeasureOptions
from sglang_oscar.evaluation.prove.measures import Material
from sglang_oscar.evaluation.prove.options import CacheOptions
from sglang_oscar.evaluation.prove.report import collect, write_report
from sglang_oscar.evaluation.prove.run import Outcome, Plan, ProveError, prove
from sglang_oscar.evaluation.prove.store import Store
from sglang_oscar.evaluation.prove.texts import MEASUREMENT, Texts
from sglang_oscar.local_server import ServerFailedError

GROUP = 128
"""Channels per group unless a head has fewer."""

Makers = dict[str, Callable[[], Cache]]
"""Name of a cache -> what makes it, in the order in which caches are asked; INT2 is fitted when its turn comes."""


@with_groups
def prove_command(name: NAME, caches: CacheOptions, measures: MeasureOptions, servers: ServerOptions) -> None:
    """Measure what the KV cache costs a model, against BF16 behind real servers, and write one page."""
    begin = time.monotonic()
    settings = servers.settings(str(Path(name).resolve()) if Path(name).is_dir() else name, None)
    caches.given()
    with driver_errors():
        config, tokenizer = load_config(settings), load_tokenizer(settings)
        settings = settings.overridden(group_size=caches.group_size or min(GROUP, _head_dim(config)))
        caches.check_rows(_head_dim(config), settings.group_size)
        material = measures.material(Texts(tokenizer, measures.text), _context(config, servers.flags))
        chosen = measures.measures(material)
        for measure in chosen:
            measure.prepare()
        store, out = Store(measures.out), measures.out
        if not measures.resume:
            store.clear()
        out.mkdir(parents=True, exist_ok=True)
        identity, here = model_files(settings.model), machine()
        depends = {"model": identity, "machine": here, "text": material.texts.fingerprint(MEASUREMENT)}
        plan = Plan(settings, chosen, store, out, depends, material.size.at_once)
        maker = CacheMaker(settings, config, caches.flags(servers.flags), material.context)
        makers = _makers(caches, maker, identity, material, out)
        asked, outcome = _ask_all(plan, makers)
        for measure in chosen:
            if remark := getattr(measure, "remark", None):
                outcome.remark(f"{measure.title}: {remark}")
        results = collect(plan, asked, outcome, material, here, shlex.join(["oscar", *sys.argv[1:]]))
        results["seconds"] = round(time.monotonic() - begin)
        page = write_report(results, out)
    typer.echo(page.read_text(encoding="utf-8").split("\n## ")[1])
    typer.echo(f"page: {page}\nfigures: {page.with_suffix('.json')}\ntook {results['seconds']} s")
    if outcome.failed:
        raise typer.Exit(1)


def _ask_all(plan: Plan, makers: Makers) -> tuple[list[Cache], Outcome]:
    """Ask every cache that can be made; what cannot becomes a remark.

    Raises:
        typer.Exit: the BF16 cache could not be asked (1), or the user interrupted (130).
    """
    asked: list[Cache] = []
    outcome = Outcome()
    try:
        for name, make in makers.items():
            try:
                cache = make()
            except (DataError, DumpError, Int2Error, RotationFileError, ServerFailedError) as error:
                # The first line is the fault; of a dumping server that ended, its log follows.
                outcome.remark(f"{name}: left out, {str(error).splitlines()[0]}", failed=True)
                typer.echo(outcome.remarks[-1], err=True)
                continue
            asked.append(cache)
            prove(plan, cache, outcome, typer.echo)
    except ProveError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; answers so far are in {plan.folder}, the same command goes on", err=True)
        raise typer.Exit(130) from None
    return asked, outcome


def _makers(caches: CacheOptions, maker: CacheMaker, identity: dict[str, Any], material: Material, out: Path) -> Makers:
    """What makes each cache that is asked for.

    Raises:
        DataError: rotations are to be fitted and there is too little text.
    """
    given, flags = caches.given(), maker.flags
    found: Makers = {BF16: maker.bf16}
    if FP8 in caches.names():
        found[FP8] = maker.fp8
    if INT2 in caches.names() and given is not None:
        made = maker.given(*given)  # Now: files that do not fit the model should not cost the time of two servers.
        found[INT2] = lambda: made
    elif INT2 in caches.names():
        args = (*maker.defaults, *flags.common, *flags.bf16)
        tokens = material.size.calibration_tokens
        calibration = Calibration(maker.settings, identity, material.texts, tokens, out, args)
        calibration.prepare()
        for fit in caches.fits():
            found[f"{INT2}, {fit.title}"] = _fitted(maker, calibration, fit)
    if NAIVE in caches.names():
        found[NAIVE] = maker.naive
    return found


def _fitted(maker: CacheMaker, calibration: Calibration, fit: Fit) -> Callable[[], Cache]:
    return lambda: maker.fitted(fit, calibration.rotations(fit))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context(config: Any, flags: tuple[str, ...]) -> int:
    if not getattr(config, "max_position_embeddings", None):
        raise DataError("the model's configuration does not say how many tokens it takes (max_position_embeddings)")
    found = context_length(config, flags)
    assert found is not None
    return found


def add_prove_command(app: typer.Typer) -> None:
    """Register the command."""
    app.command("prove")(prove_command)
