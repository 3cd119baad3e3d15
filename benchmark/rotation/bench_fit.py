"""How long a fit takes: a dump of random activations on disk, and ``fit`` as ``oscar fit`` runs it.

    python benchmark/rotation/bench_fit.py
    python benchmark/rotation/bench_fit.py --layers 2 --device cpu
    python benchmark/rotation/bench_fit.py --recipe focus
    python benchmark/rotation/bench_fit.py --recipe focus --bits 2.5 --key-coding auto --value-coding auto

The default is 30K tokens of 36 layers with 32 query heads, 8 kv heads and head_dim 128. The dump is written first and
is not part of the time; reading it is. It lies in the page cache as far as memory goes (13 GB by default) unless --cold
drops it from there. Requests have the given lengths, each length the same share of the tokens, one request to a chunk.
Recipes that read a model get random output projections.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from oscar_kernels.layout import AFFINE
from oscar_rotation.dump import DumpManifest, DumpWriter
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.device import choose_device
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.recipes import FITTED, FitRequest

WARMUP = 8


def request_lengths(tokens: int, lengths: list[int]) -> list[int]:
    """Request lengths that sum to ``tokens``; every length gets the same share of the tokens."""
    share, out = -(-tokens // len(lengths)), []
    for length in lengths:
        left = min(share, tokens - sum(out))
        out += [length] * (left // length) + ([left % length] if left % length else [])
    return out


def random_pool(numbers: int, head_dim: int) -> torch.Tensor:
    """Normal numbers in BF16 whose scale grows along the channels."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0.3, 2.0, head_dim)
    pool = torch.empty(numbers // head_dim, head_dim, dtype=torch.bfloat16)
    for rows in pool.split(1 << 16):
        rows.copy_(torch.randn(rows.shape, generator=generator) * scales)
    return pool.flatten()


def reset_peak_memory() -> None:
    """Start anew with the process's peak of resident memory; where that is not allowed, the pool counts as well."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> float:
    """The peak since then, in GB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e9


def write_layer(
    writer: DumpWriter, layer: int, lengths: list[int], heads: tuple[int, int, int], source: torch.Tensor
) -> None:
    """One layer of a dump, cut from a pool of random numbers at other places for every layer and chunk."""
    q_heads, kv_heads, head_dim = heads
    for chunk, length in enumerate([WARMUP, *lengths]):
        width = (q_heads + 2 * kv_heads) * head_dim
        begin = (layer * 7919 + chunk * 104729) % (source.numel() // head_dim - length * width // head_dim) * head_dim
        q, k, v = (
            source[begin : begin + length * width].view(length, -1, head_dim).split([q_heads, kv_heads, kv_heads], 1)
        )
        writer.write(layer, chunk, q, k, v, [length])


def write_model(folder: Path, layers: Iterable[int], q_heads: int, kv_heads: int, head_dim: int) -> Path:
    """A folder with what recipes read of a model: output projections, a file per layer, and the configuration."""
    folder.mkdir()
    width = q_heads * head_dim
    weight = torch.randn(width, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    for layer in layers:
        save_file({f"model.layers.{layer}.self_attn.o_proj.weight": weight}, folder / f"model-{layer:05d}.safetensors")
    config = {"model_type": "llama", "max_position_embeddings": 32768, "rope_theta": 1e6, "head_dim": head_dim,
              "num_attention_heads": q_heads, "num_key_value_heads": kv_heads}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def drop_from_cache(root: Path) -> None:
    """Let the kernel forget the files, so that reading them is reading the disk."""
    for path in root.rglob("*.pt"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(
    tokens: Annotated[int, typer.Option(help="Calibration tokens.")] = 30000,
    requests: Annotated[str, typer.Option(help="Request lengths, with commas.")] = "300,2048,7500",
    layers: int = 36,
    layer_ids: Annotated[str | None, typer.Option(help="Which of a model they are, with commas, if not all.")] = None,
    q_heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    recipe: Annotated[str, typer.Option(help="paper, plus or focus; what follows is of paper.")] = "paper",
    method: Annotated[str, typer.Option(help="As in `oscar fit`.")] = "qqt_sst",
    clip: Annotated[bool, typer.Option(help="Fit clip ratios, too.")] = False,
    report: Annotated[bool, typer.Option(help="Measure errors, too.")] = False,
    cold: Annotated[bool, typer.Option(help="Drop the dump from the page cache before the fit.")] = False,
    bits: Annotated[str | None, typer.Option(help="As in `oscar fit`.")] = None,
    key_coding: Annotated[str, typer.Option(help="As in `oscar fit`.")] = AFFINE,
    value_coding: Annotated[str, typer.Option(help="As in `oscar fit`.")] = AFFINE,
    folder: Annotated[Path | None, typer.Option(help="Where the dump goes; a temporary folder by default.")] = None,
    rotations: Annotated[Path | None, typer.Option(help="Keep the rotation files in this folder.")] = None,
    out: Annotated[Path, typer.Option(help="JSON with the result.")] = Path("results/bench_fit.json"),
) -> None:
    """Write a dump, fit it, report seconds and memory."""
    chosen = choose_device(device)
    lengths = request_lengths(tokens, [int(length) for length in requests.split(",")])
    source = random_pool((max(lengths) * (q_heads + 2 * kv_heads) + (1 << 17)) * head_dim, head_dim)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        root = Path(temporary) / "dump"
        writer = DumpWriter(root, total_kv_heads=kv_heads)
        begin = time.perf_counter()
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            heads = (q_heads, kv_heads, head_dim)
            jobs = [pool.submit(write_layer, writer, layer, lengths, heads, source) for layer in range(layers)]
            for job in jobs:
                job.result()
            del jobs
        ids = None if layer_ids is None else tuple(map(int, layer_ids.split(",")))
        if ids is not None:
            sizes = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
            DumpManifest(num_layers=layers, layer_ids=ids, **sizes).write(root)
        fitted = FITTED[recipe]
        model = write_model(Path(temporary) / "model", ids or range(layers), *heads) if fitted.needs_weights else None
        if cold:
            drop_from_cache(root)
        written = time.perf_counter() - begin
        del source
        size = sum(path.stat().st_size for path in root.rglob("*.pt"))
        if chosen.type == "cuda":
            torch.zeros(1, device=chosen)  # the CUDA context, which a process makes once
        reset_peak_memory()
        before = time.process_time()
        begin = time.perf_counter()
        options = FitOptions.of_method(
            method, fit_clip=clip, report=report, bits=BitGoal.parse(bits) if bits else None, key_coding=key_coding,
            value_coding=value_coding,
        )  # fmt: skip
        request = FitRequest(root, options, str(model) if model else None, device)
        result = fitted.fit(request).of_model("", ids)
        result.save(rotations or Path(temporary) / "rotations", result.usual_formats(fitted.suffixes))
        seconds = time.perf_counter() - begin
        cpu_seconds, peak = time.process_time() - before, peak_memory()
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if chosen.type == "cuda" else None,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "command": shlex.join(["python", "benchmark/rotation/bench_fit.py", *sys.argv[1:]]),
        "recipe": recipe,
        "tokens": sum(lengths),
        "requests": {length: len(list(same)) for length, same in itertools.groupby(lengths)},
        "layers": layers,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dump_gigabytes": round(size / 1e9, 2),
        "dump_from": "disk" if cold else "page cache as far as memory goes",
        "write_seconds": round(written, 1),
        "fit_seconds": round(seconds, 1),
        "fit_cpu_seconds": round(cpu_seconds, 1),
        "peak_resident_gigabytes": round(peak, 2),
    }
    if chosen.type == "cuda":
        facts["peak_gpu_gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(facts, indent=2))


if __name__ == "__main__":
    typer.run(main)
