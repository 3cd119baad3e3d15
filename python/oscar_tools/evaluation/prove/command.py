"""The command ``oscar prove``."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from oscar_kernels.layout import largest_group
from oscar_tools.calibration.commands import driver_errors
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.model_files import context_length, load_config, load_tokenizer
from oscar_tools.calibration.option_groups import NAME, ServerOptions, with_groups
from oscar_tools.calibration.weight_files import model_files, model_folder
from oscar_tools.evaluation.prove.caches import BF16, FP8, FP8_SCALED, INT2, NAIVE, Cache, CacheMaker
from oscar_tools.evaluation.prove.calibration import Calibration, forget_fits
from oscar_tools.evaluation.prove.machine import machine
from oscar_tools.evaluation.prove.measure_options import MeasureOptions
from oscar_tools.evaluation.prove.measures import Effects
from oscar_tools.evaluation.prove.options import CacheOptions
from oscar_tools.evaluation.prove.report import collect, write_report
from oscar_tools.evaluation.prove.run import Proof, ProveError, Prover
from oscar_tools.evaluation.prove.several import Makers, ask_all
from oscar_tools.evaluation.prove.specs import Spec
from oscar_tools.evaluation.prove.store import Store, alone_in
from oscar_tools.evaluation.prove.texts import MEASUREMENT, Texts
from sglang_oscar.names import DEFAULT_GROUP_SIZE


@with_groups
def prove_command(name: NAME, caches: CacheOptions, measures: MeasureOptions, servers: ServerOptions) -> None:
    """Measure what the KV cache costs a model, against BF16 behind real servers, and write one page."""
    begin = time.monotonic()
    settings = servers.settings(str(Path(name).resolve()) if Path(name).is_dir() else name, None)
    caches.given()
    caches.check_memory(servers.flags)
    with driver_errors(), ExitStack() as stack:
        config, tokenizer = load_config(settings), load_tokenizer(settings)
        settings = settings.overridden(
            group_size=caches.group_size or largest_group(_head_dim(config), DEFAULT_GROUP_SIZE)
        )
        caches.check_specs(_head_dim(config), settings.group_size)
        material = measures.material(Texts(tokenizer, measures.text), _context(config, caches, servers))
        chosen = measures.measures(material)
        if caches.chunks() and not any(isinstance(measure, Effects) for measure in chosen):
            raise typer.BadParameter(f"has no meaning without --measure {Effects.name}", param_hint="--chunk-sizes")
        for measure in chosen:
            measure.prepare()
        stack.enter_context(alone_in(measures.out))
        store, out = Store(measures.out), measures.out
        if not measures.resume:
            store.clear()
            forget_fits(out)
        identity, here = model_files(settings.model), machine()
        depends = {"model": identity, "machine": here, "text": material.texts.fingerprint(MEASUREMENT)}
        proof = Proof(settings, chosen, store, out, depends, material.size.at_once, caches.servers)
        maker = CacheMaker(settings, config, caches.flags(servers.flags), material.context)
        reach = max(measure.reach() for measure in chosen)
        context = caches.fit_context or (reach if reach < material.context else None)
        texts, tokens = material.texts, material.size.calibration_tokens
        makers = _makers(caches, maker, Calibration(settings, identity, texts, tokens, out, maker.dump_args, context))
        prover = Prover(proof, typer.echo)
        asked, outcome = _ask(prover, makers), prover.outcome
        for measure in chosen:
            if remark := getattr(measure, "remark", None):
                outcome.remark(f"{measure.title}: {remark}")
        results = collect(proof, asked, outcome, material, here, shlex.join(["oscar", *sys.argv[1:]]))
        results["seconds"] = round(time.monotonic() - begin)
        page = write_report(results, out)
    typer.echo(page.read_text(encoding="utf-8").split("\n## ")[1])
    typer.echo(f"page: {page}\nfigures: {page.with_suffix('.json')}\ntook {results['seconds']} s")
    if outcome.failed:
        raise typer.Exit(1)


def _ask(prover: Prover, makers: Makers) -> list[Cache]:
    """As :func:`ask_all`, with its errors as a line and an exit code.

    Raises:
        typer.Exit: the BF16 cache could not be asked (1), or the user interrupted (130).
    """
    try:
        return ask_all(prover, makers)
    except ProveError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; answers so far are in {prover.proof.folder}, the same command goes on", err=True)
        raise typer.Exit(130) from None


def _makers(caches: CacheOptions, maker: CacheMaker, calibration: Calibration) -> Makers:
    """What makes each cache that is asked for.

    Raises:
        DataError: rotations are to be fitted and there is too little text.
    """
    given, names = caches.given(), caches.names()
    specs = caches.specs() if INT2 in names and given is None else ()
    if FP8_SCALED in names or any(spec.fitted for spec in specs):
        calibration.prepare()
    found: dict[str, Callable[[], Cache]] = {BF16: maker.bf16}
    if FP8 in names:
        found[FP8] = maker.fp8
    if FP8_SCALED in names:
        found[FP8_SCALED] = lambda: maker.fp8_scaled(calibration.scaled_model(model_folder(maker.settings.model)))
    int2: dict[str, Callable[[], Cache]] = {}
    if given is not None and INT2 in names:
        made = maker.given(*given)  # Now: files that do not fit the model should not cost the time of two servers.
        int2[INT2] = lambda: made
    for spec in specs:
        int2[f"{INT2}, {spec.title}"] = _int2(maker, calibration, spec)
    found |= int2
    if NAIVE in names:
        found[NAIVE] = maker.naive
    for name, make in ({BF16: maker.bf16} | dict(islice(int2.items(), 1))).items():
        found |= {f"{name}, chunks of {tokens:,}": _chunked(make, tokens) for tokens in caches.chunks()}
    return found


def _chunked(make: Callable[[], Cache], tokens: int) -> Callable[[], Cache]:
    return lambda: make().chunked(tokens)


def _int2(maker: CacheMaker, calibration: Calibration, spec: Spec) -> Callable[[], Cache]:
    return lambda: maker.int2(spec, calibration.rotations(spec) if spec.fitted else None)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _context(config: Any, caches: CacheOptions, servers: ServerOptions) -> int:
    """Tokens that all servers take."""
    if not getattr(config, "max_position_embeddings", None):
        raise DataError("the model's configuration does not say how many tokens it takes (max_position_embeddings)")
    flags = caches.flags(servers.flags)
    found = [context_length(config, (*flags.common, *own)) for own in (flags.bf16, flags.fp8, flags.int2)]
    return min(length for length in found if length is not None)


def add_prove_command(app: typer.Typer) -> None:
    """Register the command."""
    app.command("prove")(prove_command)
