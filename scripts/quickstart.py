"""The main job: serve and dump, fit, serve with int2, ask questions, compare.

    python scripts/quickstart.py           # the shipped model
    python scripts/quickstart.py --real    # a real one, in chat: 135M parameters (93 MB), or 1.5B (1.1 GB) on a GPU

Everything is what a user of a large model would run: stock SGLang servers over HTTP, the ``oscar fit`` command, the
``openai`` client. Facts lie in the quantized part of the cache and questions arrive on a cached prefix, so every
answer is read from it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import real_model
import requests
import typer
from quickstart_jobs import DEFAULT_ROW, FITS, GPU_MODEL, REAL_JOBS, Method, ShippedJob
from real_models import DEFAULT
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from oscar_cpu.server import OUR_PREFIXES, environment, has_gpu
from oscar_tools.evaluation.prove.machine import machine
from oscar_tools.evaluation.server_facts import ask as ask_facts
from oscar_tools.local_server import LocalServer, ServerFailedError, serve
from reference_model.retrieval import Document, build_document

CALIBRATION_SEED = 1000
EXTRA_ARGS: list[str] = []
BF16_ARGS: list[str] = []
console = Console()


def clean_environment(extra: dict[str, str]) -> dict[str, str]:
    """The process's environment, made fit for this machine, without settings of earlier experiments."""
    return environment({k: v for k, v in os.environ.items() if not k.startswith(OUR_PREFIXES)}) | extra


def start(job: ShippedJob, method: Method, log: Path, extra: dict[str, str] | None = None) -> Any:
    """A server for a row, with the same memory for every row."""
    memory = 0.5 if has_gpu() else job.cpu_memory
    args = ["--mem-fraction-static", str(memory), "--random-seed", "0", *method.args, *EXTRA_ARGS]
    args += BF16_ARGS if method.group is None else []
    return serve(job.model, log, args, clean_environment(method.env | (extra or {})))


def count_tokens(job: ShippedJob) -> Any:
    """Length of a text in tokens of the model."""
    tokenizer = Tokenizer.from_file(str(job.model / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def ask(job: ShippedJob, server: LocalServer, document: Document) -> int:
    """Ask for every fact of a document; returns the number of right answers.

    The first request caches the document, so that all questions find it quantized.
    """
    job.say(server, document, None, 1)
    with ThreadPoolExecutor(job.facts) as pool:
        answers = pool.map(lambda word: job.say(server, document, word, job.answer_tokens), document.facts)
        return sum(job.right(*pair) for pair in zip(answers, document.facts.values(), strict=True))


def calibrate(job: ShippedJob, folder: Path) -> Path:
    """Dump q, k and v of calibration text from a server and fit rotations; reuses what an earlier run left.

    Returns:
        folder with a folder of two rotation files for each of :data:`quickstart_jobs.FITS`.
    """
    dump, rotations = folder / "qkv_dumps", folder / "rotations"
    if all(list((rotations / fit.folder).glob("v_rotation_*")) for fit in FITS):
        console.print(f"[dim]rotations in {rotations} are reused[/dim]")
        return rotations
    shutil.rmtree(dump, ignore_errors=True)
    count = count_tokens(job)
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": str(job.calibration_tokens), "DUMP_KVCACHE_DIR": str(dump)}
    with console.status("dump: serving in BF16 and recording queries, keys and values"):
        with start(job, Method("BF16"), folder / "dump.log", env) as server:
            seed = CALIBRATION_SEED
            while "dump complete" not in server.text():
                document = build_document(count, job.calibration_length, job.facts, seed)
                job.say(server, document, next(iter(document.facts)), 1)
                seed += 1
    with console.status(f"fit: {', '.join(fit.folder for fit in FITS)}"):
        for fit in FITS:
            out = str(rotations / fit.folder)
            command = [sys.executable, "-m", "oscar_rotation", "fit", str(dump), "--out", out, *fit.args]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return rotations


def evaluate(job: ShippedJob, method: Method, lengths: list[int], documents: int, folder: Path) -> dict[str, Any]:
    """Serve with a method, ask all questions, read the pool size off the server."""
    label = method.name if method.group is None else f"{method.name} g{method.group}"
    count, begin = count_tokens(job), time.monotonic()
    with console.status(f"{label}: starting a server") as status:
        with start(job, method, folder / f"{label.replace(' ', '_')}.log") as server:
            row: dict[str, Any] = {"method": method.name, "group": method.group, "exact": {}}
            for length in lengths:
                status.update(f"{label}: {documents * job.facts} questions at {length} tokens")
                texts = [build_document(count, length, job.facts, seed) for seed in range(documents)]
                row["exact"][str(length)] = sum(ask(job, server, text) for text in texts) / (documents * job.facts)
            row["bits"] = ask_facts(server.url).bits
            row["kv_tokens"] = requests.get(f"{server.url}/server_info", timeout=60).json()["max_total_num_tokens"]
    row["seconds"] = round(time.monotonic() - begin, 1)
    shown = ", ".join(f"{score:.2f} at {length}" for length, score in row["exact"].items())
    console.print(f"{label}: {shown} ({row['seconds']:.0f} s)", highlight=False)
    return row


def table(job: ShippedJob, rows: list[dict[str, Any]], lengths: list[int]) -> Table:
    """The result as a table."""
    out = Table(title=f"Exact answers to retrieval questions, {job.name}")
    for heading in ("method", "group", *[f"exact match at {n}" for n in lengths], "bits/element", "KV tokens"):
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        exact = [f"{row['exact'][str(n)]:.2f}" for n in lengths]
        cells = (row["method"], str(row["group"] or "-"), *exact, f"{row['bits']:.2f}", f"{row['kv_tokens']:,}")
        out.add_row(*cells, style="bold" if row["method"] == DEFAULT_ROW else None)
    return out


def main(
    real: Annotated[bool, typer.Option("--real", help="a real model, in chat, in sizes fit for the machine")] = False,
    model: Annotated[
        str | None,
        typer.Option(help=f"the real model, {DEFAULT} or {GPU_MODEL}; --real takes the latter where there is a GPU"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder for dump, rotations, logs, results; results/quickstart[_...]")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="context lengths in tokens, separated by commas; 1024,2048, or 640 or 4096 of real models"),
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=1, help="documents per length, five questions each, or four of real models")
    ] = None,
    server_args: Annotated[str, typer.Option(help="further flags for every server")] = "",
    bf16_args: Annotated[str, typer.Option(help="further flags of the BF16 servers")] = "",
) -> None:
    """Serve a model in BF16, with the default INT2 cache and with others, and print one table."""
    EXTRA_ARGS.extend(shlex.split(server_args))
    BF16_ARGS.extend(shlex.split(bf16_args))
    if model is not None and model not in REAL_JOBS:
        raise typer.BadParameter(f"{model!r} is not one of {', '.join(REAL_JOBS)}", param_hint="--model")
    job = ShippedJob()
    if real or model:
        model = model or (GPU_MODEL if has_gpu() else DEFAULT)
        job = REAL_JOBS[model]
        if real_model.main(["--model", model, "--out", str(job.model)]):
            raise typer.Exit(1)
    folder, sizes = out or job.out, [int(part) for part in (lengths or job.lengths).split(",")]
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        rotations = calibrate(job, folder)
        count = documents or job.documents
        rows = [evaluate(job, method, sizes, count, folder) for method in job.methods(rotations)]
    except (ServerFailedError, subprocess.CalledProcessError) as error:
        console.print(f"[red]quickstart failed:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    command = shlex.join(["bash", "scripts/quickstart.sh", *sys.argv[1:]])
    result = {**machine(), "command": command, "seconds": round(time.monotonic() - begin), "rows": rows}
    (folder / "table.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(table(job, rows, sizes))
    console.print("bits/element: windows included, at 128K tokens. KV tokens: what fits in the same memory.")
    console.print(f"rotations: {rotations}\nresults and server logs: {folder}\ntook {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    typer.run(main)
