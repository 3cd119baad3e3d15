"""The commands ``eval`` and ``ablation``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oscar_rotation.model_table import ModelSettings
from oscar_rotation.recipes import DEFAULT, PUBLISHED
from oscar_tools.calibration.commands import driver_errors
from oscar_tools.calibration.data import dataset_label, named_paths
from oscar_tools.calibration.dump_driver import DumpTask
from oscar_tools.calibration.errors import HarnessError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.model_files import load_config
from oscar_tools.calibration.option_groups import (
    NAME,
    CalibrationOptions,
    DataOptions,
    ServerOptions,
    with_groups,
)
from oscar_tools.evaluation.ablations import ABLATIONS, variant_method
from oscar_tools.evaluation.benchmarks import BENCHMARKS, NIAH_SUITE, PAPER_SUITE
from oscar_tools.evaluation.methods import RECIPE_OF, TITLES, Method, make_method, running_method
from oscar_tools.evaluation.runner import Evaluation, RunningServer, evaluate
from oscar_tools.evaluation.server_facts import ask
from oscar_tools.evaluation.table import collect, warnings, write_tables

SUITES = {"paper": PAPER_SUITE, "niah": NIAH_SUITE}


@dataclass(frozen=True)
class RunOptions:
    """What is asked, how often and how.

    Raises:
        typer.BadParameter: an unknown benchmark, or local data that are not given in a known form.
    """

    benchmarks: Annotated[str, typer.Option(envvar="BENCHMARKS", help="Names with commas, or paper, or niah.")] = (
        "paper"
    )
    seeds: Annotated[int | None, typer.Option(envvar="SEEDS", min=1, help="Runs per benchmark.")] = None
    data: Annotated[
        str, typer.Option(envvar="EVAL_DATA", help="Local data sets: name=path, with commas; or a folder.")
    ] = ""
    limit: Annotated[
        int | None, typer.Option(envvar="LIMIT", min=1, help="Questions per benchmark at most; of MATH500 per level.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(envvar="MAX_TOKENS", min=1, help="Generation length.")] = None
    concurrency: Annotated[int | None, typer.Option(envvar="CONCURRENCY", min=1, help="Requests in flight.")] = None

    def __post_init__(self) -> None:
        benchmark_names(self.benchmarks)
        local_data(self.data)

    def settings(self, settings: ModelSettings) -> ModelSettings:
        """Settings of a model with what the user changed."""
        lengths: dict[str, int] | None = None if self.max_tokens is None else {}
        return settings.overridden(
            seeds=self.seeds, max_tokens=self.max_tokens, max_tokens_of=lengths, concurrency=self.concurrency
        )

    def evaluation(
        self,
        settings: ModelSettings,
        folder: CalibrationFolder,
        methods: list[Method],
        server_args: tuple[str, ...],
        running: RunningServer | None = None,
    ) -> Evaluation:
        """What to evaluate, with which methods, into which folder."""
        return Evaluation(
            settings=settings,
            folder=folder.path,
            benchmarks=benchmark_names(self.benchmarks),
            methods=tuple(methods),
            seeds=tuple(range(settings.seeds)),
            local=local_data(self.data),
            limit=self.limit,
            server_args=server_args,
            running=running,
        )


def add_evaluation_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("eval")(eval_command)
    app.command("ablation")(ablation_command)


def benchmark_names(text: str) -> tuple[str, ...]:
    """Benchmarks from an option.

    Raises:
        typer.BadParameter: an unknown one.
    """
    names = [name for part in text.split(",") for name in SUITES.get(part, (part,))]
    for name in names:
        if name not in BENCHMARKS:
            known = ", ".join([*SUITES, *BENCHMARKS])
            raise typer.BadParameter(f"{name!r} is not one of {known}", param_hint="--benchmarks")
    return tuple(names)


def local_data(text: str) -> dict[str, Path]:
    """Local data sets from an option: ``name=path,...``, or a folder with ``<name>.jsonl`` files.

    Raises:
        typer.BadParameter: neither form, or an unknown benchmark.
    """
    if not text:
        return {}
    if "=" not in text:
        folder = Path(text)
        if not folder.is_dir():
            raise typer.BadParameter(f"{text!r} is neither name=path nor a folder", param_hint="--data")
        return {name: folder / f"{name}.jsonl" for name in BENCHMARKS if (folder / f"{name}.jsonl").exists()}
    try:
        paths = named_paths(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
    unknown = sorted(set(paths) - set(BENCHMARKS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not a benchmark", param_hint="--data")
    return paths


@with_groups
def eval_command(
    name: NAME,
    run: RunOptions,
    calibration: CalibrationOptions,
    servers: ServerOptions,
    methods: Annotated[
        str, typer.Option(envvar="METHODS", help=f"Of {', '.join(TITLES)}; bf16 and the default recipe if empty.")
    ] = "",
    rot_dir: Annotated[
        Path | None, typer.Option(envvar="ROT_DIR", help="Rotations; the newest calibration's if unset.")
    ] = None,
    file_clips: Annotated[
        bool, typer.Option("--file-clips", envvar="FILE_CLIPS", help="Use the files' clips.")
    ] = False,
    url: Annotated[str | None, typer.Option(envvar="SERVER_URL", help="A server that runs; start none.")] = None,
) -> None:
    """Evaluate methods on benchmarks and write a table; finished runs are kept, interrupted ones continued.

    Of a server that runs, the table says what the server says. Where a benchmark got no answer at all, exit status 1.
    """
    settings = run.settings(servers.settings(name, calibration.group_size))
    named = tuple(methods.split(",")) if methods else ()
    with driver_errors():
        place = calibration.root / settings.name / dataset_label(calibration.dataset)
        running, made = None, []
        if url is not None:
            running = RunningServer(url, ask(url))
            made = [running_method(running.facts, named)]
            folder = CalibrationFolder(place / "running" if rot_dir is None else rot_dir.resolve().parent)
        else:
            own = next(method for method, recipe in RECIPE_OF.items() if recipe == DEFAULT)
            chosen = named or ("bf16", own)
            if rot_dir is not None:
                folder = CalibrationFolder(rot_dir.resolve().parent)
            elif set(chosen) & set(RECIPE_OF):
                folder = calibration.latest(settings)
            else:
                folder = CalibrationFolder(place / "uncalibrated")
            for method in chosen:
                rotations = rot_dir or folder.rotations(RECIPE_OF.get(method, PUBLISHED))
                made.append(make_method(method, settings, rotations, file_clips=file_clips))
        evaluation = run.evaluation(settings, folder, made, servers.flags, running)
        _evaluate(evaluation, "results", f"{settings.title}: accuracy")


@with_groups
def ablation_command(
    ablation: Annotated[str, typer.Argument(help=f"One of {', '.join(ABLATIONS)}.")],
    name: NAME,
    run: RunOptions,
    calibration: CalibrationOptions,
    data_options: DataOptions,
    servers: ServerOptions,
    only: Annotated[str, typer.Option(envvar="ONLY", help="Variants, with commas; all if empty.")] = "",
) -> None:
    """Run one of the paper's ablations and write its table."""
    if ablation not in ABLATIONS:
        raise typer.BadParameter(f"{ablation!r} is not one of {', '.join(ABLATIONS)}")
    variants = ABLATIONS[ablation]()
    wanted = [part for part in only.split(",") if part]
    unknown = sorted(set(wanted) - {variant.name for variant in variants})
    if unknown:
        known = ", ".join(variant.name for variant in variants)
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {known}", param_hint="--only")
    settings = run.settings(servers.settings(name, calibration.group_size))
    dataset, local = calibration.dataset, data_options.local(calibration.dataset)
    with driver_errors():
        folder = calibration.latest(settings)
        dump = DumpTask(settings, calibration.root, dataset, local=local, server_args=servers.flags)
        chosen = [variant for variant in variants if not wanted or variant.name in wanted]
        made = [variant_method(variant, settings, folder, dump) for variant in chosen]
        evaluation = run.evaluation(settings, folder, [make_method("bf16", settings), *made], servers.flags)
        _evaluate(evaluation, f"ablation_{ablation}", f"{settings.title}: {ablation}")


def _evaluate(evaluation: Evaluation, stem: str, title: str) -> None:
    if evaluation.running is None:
        # Before the first server starts: rotation files that the model does not take must not cost the runs of others.
        config = load_config(evaluation.settings)
        for method in evaluation.methods:
            method.check(config)
    evaluate(evaluation, typer.echo)
    rows = [(method.name, method.title, evaluation.folder) for method in evaluation.methods]
    results = collect(rows, evaluation.benchmarks)
    as_json, as_markdown = write_tables(evaluation.folder, stem, results, title)
    typer.echo(as_markdown.read_text(encoding="utf-8"))
    typer.echo(f"results: {as_json}\ntable: {as_markdown}")
    if empty := warnings(results, only_empty=True):
        raise HarnessError("; ".join(empty))
