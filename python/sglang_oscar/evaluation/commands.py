"""The commands ``eval`` and ``ablation``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oscar_rotation.model_table import ModelSettings
from sglang_oscar.drivers.calibration_data import dataset_label
from sglang_oscar.drivers.commands import (
    DATASET,
    GPU,
    GROUP,
    LOCAL,
    MODEL,
    NAME,
    ROOT,
    SERVER_ARGS,
    TP,
    driver_errors,
    settings_of,
)
from sglang_oscar.drivers.dump_driver import DumpRequest
from sglang_oscar.drivers.folders import CalibrationFolder, latest_calibration
from sglang_oscar.evaluation.ablations import ABLATIONS, variant_method
from sglang_oscar.evaluation.benchmarks import BENCHMARKS, NIAH_SUITE, PAPER_SUITE
from sglang_oscar.evaluation.methods import TITLES, Method, make_method
from sglang_oscar.evaluation.runner import EvaluationPlan, evaluate
from sglang_oscar.evaluation.table import collect, write_tables

SUITES = {"paper": PAPER_SUITE, "niah": NIAH_SUITE}
BENCHMARKS_OPTION = Annotated[
    str, typer.Option("--benchmarks", envvar="BENCHMARKS", help="Names with commas, or paper, or niah.")
]
SEEDS = Annotated[int | None, typer.Option(envvar="SEEDS", min=1, help="Runs per benchmark.")]
LIMIT = Annotated[int | None, typer.Option(envvar="LIMIT", min=1, help="Questions per benchmark at most.")]
DATA = Annotated[
    str, typer.Option("--data", envvar="EVAL_DATA", help="Local data sets: name=path, with commas; or a folder.")
]
MAX_TOKENS = Annotated[int | None, typer.Option(envvar="MAX_TOKENS", min=1, help="Generation length.")]
ROT_DIR = Annotated[Path | None, typer.Option(envvar="ROT_DIR", help="Rotations; the newest calibration's if unset.")]
CONCURRENCY = Annotated[int | None, typer.Option(envvar="CONCURRENCY", min=1, help="Requests in flight.")]


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
    pairs = dict(part.split("=", 1) for part in text.split(","))
    unknown = sorted(set(pairs) - set(BENCHMARKS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not a benchmark", param_hint="--data")
    return {name: Path(path) for name, path in pairs.items()}


def eval_command(
    name: NAME,
    benchmarks: BENCHMARKS_OPTION = "paper",
    methods: Annotated[str, typer.Option(envvar="METHODS", help=f"Of {', '.join(TITLES)}.")] = "bf16,oscar",
    rot_dir: ROT_DIR = None,
    model: MODEL = None,
    root: ROOT = Path("rotation"),
    dataset: DATASET = "GPQA",
    group_size: GROUP = None,
    tp: TP = None,
    gpu: GPU = None,
    seeds: SEEDS = None,
    data: DATA = "",
    limit: LIMIT = None,
    max_tokens: MAX_TOKENS = None,
    concurrency: CONCURRENCY = None,
    file_clips: Annotated[
        bool, typer.Option("--file-clips", envvar="FILE_CLIPS", help="Use the files' clips.")
    ] = False,
    url: Annotated[str | None, typer.Option(envvar="SERVER_URL", help="A server that runs; start none.")] = None,
    server_args: SERVER_ARGS = "",
) -> None:
    """Evaluate methods on benchmarks and write a table; finished runs are kept, interrupted ones continued."""
    settings = _settings(settings_of(name, model, group_size, gpu), tp, seeds, max_tokens, concurrency)
    names, chosen, local = benchmark_names(benchmarks), methods.split(","), local_data(data)
    with driver_errors():
        folder = _calibration(settings, root, dataset, rot_dir, needed="oscar" in chosen)
        rotations = rot_dir or folder.rotations
        made = [make_method(method, settings, rotations, file_clips=file_clips) for method in chosen]
        plan = _plan(settings, folder, names, made, local, limit, server_args, url)
        evaluate(plan, typer.echo)
        _tables(plan, "results", f"{settings.title}: accuracy")


def ablation_command(
    ablation: Annotated[str, typer.Argument(help=f"One of {', '.join(ABLATIONS)}.")],
    name: NAME,
    benchmarks: BENCHMARKS_OPTION = "paper",
    only: Annotated[str, typer.Option(envvar="ONLY", help="Variants, with commas; all if empty.")] = "",
    model: MODEL = None,
    root: ROOT = Path("rotation"),
    dataset: DATASET = "GPQA",
    dataset_path: LOCAL = None,
    group_size: GROUP = None,
    tp: TP = None,
    gpu: GPU = None,
    seeds: SEEDS = None,
    data: DATA = "",
    limit: LIMIT = None,
    max_tokens: MAX_TOKENS = None,
    concurrency: CONCURRENCY = None,
    server_args: SERVER_ARGS = "",
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
    settings = _settings(settings_of(name, model, group_size, gpu), tp, seeds, max_tokens, concurrency)
    names, local, extra = benchmark_names(benchmarks), local_data(data), tuple(server_args.split())
    with driver_errors():
        folder = latest_calibration(root, settings.name, dataset_label(dataset), None, settings.group_size)
        dump = DumpRequest(settings, root, dataset, local=dataset_path, server_args=extra)
        chosen = [variant for variant in variants if not wanted or variant.name in wanted]
        made = [variant_method(variant, settings, folder, dump) for variant in chosen]
        plan = _plan(settings, folder, names, [make_method("bf16", settings), *made], local, limit, server_args, None)
        evaluate(plan, typer.echo)
        _tables(plan, f"ablation_{ablation}", f"{settings.title}: {ablation}")


def _settings(
    settings: ModelSettings, tp: int | None, seeds: int | None, max_tokens: int | None, concurrency: int | None
) -> ModelSettings:
    lengths: dict[str, int] | None = None if max_tokens is None else {}
    return settings.overridden(
        tp_eval=tp, seeds=seeds, max_tokens=max_tokens, max_tokens_of=lengths, concurrency=concurrency
    )


def _calibration(
    settings: ModelSettings, root: Path, dataset: str, rot_dir: Path | None, *, needed: bool
) -> CalibrationFolder:
    """The folder that results go to: that of the rotations, else the model's own."""
    if rot_dir is not None:
        return CalibrationFolder(rot_dir.resolve().parent)
    if needed:
        return latest_calibration(root, settings.name, dataset_label(dataset), None, settings.group_size)
    return CalibrationFolder(root / settings.name / dataset_label(dataset) / "uncalibrated")


def _plan(
    settings: ModelSettings,
    folder: CalibrationFolder,
    names: tuple[str, ...],
    methods: list[Method],
    local: dict[str, Path],
    limit: int | None,
    server_args: str,
    url: str | None,
) -> EvaluationPlan:
    return EvaluationPlan(
        settings=settings,
        folder=folder.path,
        benchmarks=names,
        methods=tuple(methods),
        seeds=tuple(range(settings.seeds)),
        local=local,
        limit=limit,
        server_args=tuple(server_args.split()),
        url=url,
    )


def _tables(plan: EvaluationPlan, stem: str, title: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(plan.settings.model, trust_remote_code=True)
    rows = [(method.name, method.title, method.bits(config), plan.folder) for method in plan.methods]
    as_json, as_markdown = write_tables(plan.folder, stem, collect(rows, plan.benchmarks), title)
    typer.echo(as_markdown.read_text(encoding="utf-8"))
    typer.echo(f"results: {as_json}\ntable: {as_markdown}")
