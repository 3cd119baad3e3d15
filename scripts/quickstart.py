"""The main job on the shipped model: serve and dump, fit, serve with int2, ask questions, compare.

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
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import requests
import typer
from openai import OpenAI
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from reference_model.retrieval import DIGITS, Document, build_document, question
from sglang_oscar.cpu.server import OUR_PREFIXES, environment, has_gpu
from sglang_oscar.evaluation.methods import bits_per_element
from sglang_oscar.local_server import LocalServer, ServerFailedError, serve
from sglang_oscar.settings import variable

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "reference"
FACTS = 5
CALIBRATION_TOKENS = 16000
CALIBRATION_SEED = 1000
K_FILE, V_FILE = "k_rotation_balanced_u_h_br.safetensors", "v_rotation_balanced_u_h_br.safetensors"
K_PAPER, V_PAPER = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"
"""What ``oscar fit`` calls its files, by default and with ``--recipe paper``."""
DEFAULT_ROW = "INT2 (recipe plus)"
EXTRA_ARGS: list[str] = []
console = Console()


@dataclass(frozen=True)
class Method:
    """One row of the table: how its server is started."""

    name: str
    group: int | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def args(self) -> list[str]:
        """Server flags of the method."""
        if self.group is None:
            return [] if has_gpu() else ["--attention-backend", "torch_native"]
        return ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", str(self.group)]


def rotation_env(k: Path | str, v: Path | str) -> dict[str, str]:
    """Variables that name the rotations."""
    return {variable("k_rotation"): str(k), variable("v_rotation"): str(v)}


def methods(rotations: Path) -> list[Method]:
    """Rows of the table: BF16, what a user gets who sets nothing, and others to compare with. Naive INT2 has neither
    windows nor clipping; QuaRot-INT2 has both, like OSCAR, the published recipe."""
    plain = {variable("windows_enabled"): "0", variable("k_clip_ratio"): "1", variable("v_clip_ratio"): "1"}
    rows = [Method("BF16"), Method(DEFAULT_ROW, 128, rotation_env(rotations / K_FILE, rotations / V_FILE))]
    for group in (64, 128):
        rows += [
            Method("naive INT2", group, rotation_env("identity", "identity") | plain),
            Method("QuaRot-INT2", group, rotation_env("hadamard", "hadamard")),
            Method("OSCAR INT2", group, rotation_env(rotations / K_PAPER, rotations / V_PAPER)),
        ]
    return rows


def clean_environment(extra: dict[str, str]) -> dict[str, str]:
    """The process's environment, made fit for this machine, without settings of earlier experiments."""
    return environment({k: v for k, v in os.environ.items() if not k.startswith(OUR_PREFIXES)}) | extra


def start(method: Method, log: Path, extra: dict[str, str] | None = None) -> Any:
    """A server for a row, with the same memory for every row."""
    args = ["--mem-fraction-static", "0.5" if has_gpu() else "0.2", "--random-seed", "0", *method.args, *EXTRA_ARGS]
    return serve(MODEL, log, args, clean_environment(method.env | (extra or {})))


def count_tokens() -> Any:
    """Length of a text in tokens of the shipped model."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def complete(server: LocalServer, prompt: str, tokens: int) -> str:
    """A greedy completion through the OpenAI API."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=600)
    reply = client.completions.create(model=str(MODEL), prompt=prompt, max_tokens=tokens, temperature=0)
    return reply.choices[0].text


def ask(server: LocalServer, document: Document) -> int:
    """Ask for every fact of a document; returns the number of exact answers.

    The first completion caches the document, so that all questions find it quantized.
    """
    complete(server, document.text, 1)
    with ThreadPoolExecutor(FACTS) as pool:
        answers = pool.map(lambda word: complete(server, document.text + question(word), DIGITS), document.facts)
        return sum(answer == number for answer, number in zip(answers, document.facts.values(), strict=True))


def calibrate(folder: Path) -> Path:
    """Dump q, k and v of calibration text from a server and fit rotations; reuses what an earlier run left.

    Returns:
        folder with the two rotation files of each recipe.
    """
    dump, rotations = folder / "qkv_dumps", folder / "rotations"
    if all((rotations / name).exists() for name in (K_FILE, V_FILE, K_PAPER, V_PAPER)):
        console.print(f"[dim]rotations in {rotations} are reused[/dim]")
        return rotations
    shutil.rmtree(dump, ignore_errors=True)
    count = count_tokens()
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": str(CALIBRATION_TOKENS), "DUMP_KVCACHE_DIR": str(dump)}
    with console.status("dump: serving in BF16 and recording queries, keys and values"):
        with start(Method("BF16"), folder / "dump.log", env) as server:
            seed = CALIBRATION_SEED
            while "dump complete" not in server.text():
                document = build_document(count, 1900, FACTS, seed)
                complete(server, document.text + question(next(iter(document.facts))), 1)
                seed += 1
    with console.status("fit: rotations of the default recipe and of the published one"):
        command = [sys.executable, "-m", "oscar_rotation", "fit", str(dump), "--out", str(rotations)]
        for recipe in ([], ["--recipe", "paper"]):
            subprocess.run([*command, *recipe], check=True, stdout=subprocess.DEVNULL)
    return rotations


def evaluate(method: Method, lengths: list[int], documents: int, folder: Path) -> dict[str, Any]:
    """Serve with a method, ask all questions, read the pool size off the server."""
    label = method.name if method.group is None else f"{method.name} g{method.group}"
    count, begin = count_tokens(), time.monotonic()
    with console.status(f"{label}: starting a server") as status:
        with start(method, folder / f"{label.replace(' ', '_')}.log") as server:
            row: dict[str, Any] = {"method": method.name, "group": method.group, "exact": {}}
            for length in lengths:
                status.update(f"{label}: {documents * FACTS} questions at {length} tokens")
                texts = [build_document(count, length, FACTS, seed) for seed in range(documents)]
                row["exact"][str(length)] = sum(ask(server, text) for text in texts) / (documents * FACTS)
            row["kv_tokens"] = requests.get(f"{server.url}/server_info", timeout=60).json()["max_total_num_tokens"]
    config = SimpleNamespace(**json.loads((MODEL / "config.json").read_text()))
    row["bits"] = 16.0 if method.group is None else bits_per_element(config, method.group, method.env)
    row["seconds"] = round(time.monotonic() - begin, 1)
    shown = ", ".join(f"{score:.2f} at {length}" for length, score in row["exact"].items())
    console.print(f"{label}: {shown} ({row['seconds']:.0f} s)", highlight=False)
    return row


def table(rows: list[dict[str, Any]], lengths: list[int]) -> Table:
    """The result as a table."""
    out = Table(title="Exact answers to retrieval questions, shipped model")
    for heading in ("method", "group", *[f"exact match at {n}" for n in lengths], "bits/element", "KV tokens"):
        out.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        exact = [f"{row['exact'][str(n)]:.2f}" for n in lengths]
        cells = (row["method"], str(row["group"] or "-"), *exact, f"{row['bits']:.2f}", f"{row['kv_tokens']:,}")
        out.add_row(*cells, style="bold" if row["method"] == DEFAULT_ROW else None)
    return out


def main(
    out: Annotated[Path, typer.Option(help="folder for dump, rotations, logs, results")] = ROOT / "results/quickstart",
    lengths: Annotated[str, typer.Option(help="context lengths in tokens, separated by commas")] = "1024,2048",
    documents: Annotated[int, typer.Option(min=1, help="documents per length, five questions each")] = 6,
    server_args: Annotated[str, typer.Option(help="further flags for every server")] = "",
) -> None:
    """Serve the shipped model in BF16, with the default INT2 cache and with others, and print one table."""
    EXTRA_ARGS.extend(shlex.split(server_args))
    sizes = [int(part) for part in lengths.split(",")]
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    try:
        rotations = calibrate(out)
        rows = [evaluate(method, sizes, documents, out) for method in methods(rotations)]
    except (ServerFailedError, subprocess.CalledProcessError) as error:
        console.print(f"[red]quickstart failed:[/red] {error}", highlight=False)
        raise typer.Exit(1) from None
    (out / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    console.print(table(rows, sizes))
    console.print("bits/element: windows included, at 128K tokens. KV tokens: what fits in the same memory.")
    console.print(f"rotations: {rotations}\nresults and server logs: {out}\ntook {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    typer.run(main)
