"""What the first start of a server costs, by cache: seconds until the first token, and megabytes of compiled kernels.

Every cache is started twice in a home folder of its own, which is empty at first: ``cold``, where kernels are compiled
that no package brings, and ``warm``, with what the first start left. Where servers make rotations, a third start,
``recalibrated``, has the kernels and no rotations: that of another model of the same shape. A home folder holds all
that SGLang, FlashInfer, Triton, PyTorch, the CUDA driver and the plugin keep of compiled kernels. Weights are random or
lie in a folder; nothing is downloaded. Python's modules are read once before anything is measured, so that the first
server does not pay for the disk.

Seconds are counted from launching the server to each of:

* ``recording``, ``recorded``, ``calibrated``: where a server makes its rotations first, its recording server is
  started, all text is recorded, and the rotations are there;
* ``imported``: modules are imported and loading the weights begins;
* ``weights``: they are loaded;
* ``pools``: the cache's memory is there;
* ``graphs``: the last CUDA graph is captured, where any is;
* ``ready``: SGLang has answered a request of its own and says that it is ready;
* ``first_token``: the first token of a request from outside. The request is sent once the script has seen that the
  server is well, which takes up to a second or two; that wait is not counted.

Also recorded: seconds to the first token of that request and of another, of other tokens and as long; megabytes under
the home folder by what wrote them; bytes that installing the plugin adds, as files and compressed like a wheel,
without dependencies, which are SGLang's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shutil
import site
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from machine import describe
from shapes import SHAPES
from subjects import MODES, Mode, Subject, asking, subject

from oscar_cpu.server import environment
from oscar_tools.calibration.self_calibration import FACTS
from oscar_tools.local_server import READY, serve

STAGES = {
    "recording": re.compile(r"int2 calibration: starting a server that records"),
    "recorded": re.compile(r"int2 calibration: recording: (\d+) of \1 prompts"),
    "calibrated": re.compile(r"int2 rotations from calibration on the spot"),
    "imported": re.compile(r"Load weight begin"),
    "weights": re.compile(r"Load weight end"),
    "pools": re.compile(r"Memory pool end"),
    "graphs": re.compile(r"Capture .*\bend\b"),
    "ready": re.compile(re.escape(READY)),
}
PACKAGES = ("sglang_oscar", "oscar_tools", "oscar_cpu", "oscar_kernels", "oscar_rotation")
PLACES = (
    "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH",
    "SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "TVM_FFI_CACHE_DIR", "TILELANG_CACHE_DIR",
)  # fmt: skip
"""Variables that would keep kernels elsewhere than in the home folder."""
IMPORTS = "import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler"
MEGABYTE = 1e6


def at_home(env: dict[str, str], home: Path) -> dict[str, str]:
    """``env`` with ``home`` for the home folder, and all caches in it."""
    moved = {name: value for name, value in env.items() if name not in PLACES}
    own = {"HOME": home, "XDG_CACHE_HOME": home / ".cache", "TORCHINDUCTOR_CACHE_DIR": home / ".cache" / "inductor"}
    # Packages that are installed for one user stay where they are.
    return moved | {name: str(path) for name, path in own.items()} | {"PYTHONUSERBASE": site.getuserbase()}


@contextlib.contextmanager
def watched(log: Path, begin: float) -> Iterator[dict[str, float]]:
    """While inside, note when a log comes to each of :data:`STAGES`, in seconds since ``begin`` on the monotonic clock.

    Of a stage that comes several times the last counts.
    """
    seen: dict[str, float] = {}
    over = threading.Event()

    def look(text: str) -> None:
        for name, pattern in STAGES.items():
            if pattern.search(text):
                seen[name] = time.monotonic() - begin

    def follow() -> None:
        read, last = 0, False
        while not last:
            last = over.wait(0.02)
            if not log.exists():
                continue
            with log.open("rb") as file:
                file.seek(read)
                new = file.read()
            whole = new if last else new[: new.rfind(b"\n") + 1]
            read += len(whole)
            look(whole.decode(errors="replace"))

    log.unlink(missing_ok=True)
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def first_token(url: str, ids: list[int]) -> float:
    """Seconds to the first token of a request.

    Raises:
        requests.HTTPError: the server refused.
    """
    begin = time.monotonic()
    requests.post(f"{url}/generate", json=asking(ids, 1), timeout=3600).raise_for_status()
    return time.monotonic() - begin


def written(home: Path) -> dict[str, float]:
    """Megabytes (10^6 bytes) of files under a home folder, by its subfolders and those of its ``.cache``."""
    found: dict[str, int] = {}
    for path in home.rglob("*"):
        if path.is_file() and not path.is_symlink():
            parts = path.relative_to(home).parts
            name = "/".join(parts[: 2 if parts[0] == ".cache" and len(parts) > 2 else 1])
            found[name] = found.get(name, 0) + path.stat().st_size
    return {name: round(size / MEGABYTE, 3) for name, size in sorted(found.items())}


def forget_rotations(home: Path) -> bool:
    """Remove calibrations under a home folder; returns whether there were any."""
    found = [path.parent for path in home.glob(f".cache/*/*/{FACTS}")]
    for folder in found:
        shutil.rmtree(folder)
    return bool(found)


def plugin_bytes() -> dict[str, int]:
    """Files of the plugin's packages: how many, their bytes, and the bytes of a compressed archive of them.

    Raises:
        ModuleNotFoundError: a package is not on the path.
    """
    archive, count, total = io.BytesIO(), 0, 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name in PACKAGES:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise ModuleNotFoundError(name)
            folder = Path(spec.origin).parent
            for path in sorted(folder.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    count, total = count + 1, total + path.stat().st_size
                    file.write(path, f"{name}/{path.relative_to(folder)}")
    return {"files": count, "bytes": total, "compressed_bytes": len(archive.getvalue())}


def start(mode: Mode, what: Subject, flags: list[str], home: Path, log: Path, length: int) -> dict[str, Any]:
    """Start a server and ask it twice.

    Args:
        mode: the cache.
        what: the model.
        flags: of every server.
        home: its home folder.
        log: for its output.
        length: tokens of a prompt.

    Returns:
        seconds since the launch by stage; ``request_s`` of both requests; ``megabytes`` under ``home``, all in all and
        by folder.
    """
    questions = [what.prompt(seed, length) for seed in (1, 2)]
    env = at_home(mode.environment(what.folder), home)
    begin = time.monotonic()
    with watched(log, begin) as seen, serve(what.folder, log, flags, env) as server:
        took = [first_token(server.url, ids) for ids in questions]
        said = mode.facts(server)
    by_folder = written(home)
    return {
        **{name: round(seen[name], 2) if name in seen else None for name in STAGES},
        "first_token": round(seen["ready"] + took[0], 2),
        "request_s": [round(seconds, 3) for seconds in took],
        "megabytes": round(sum(by_folder.values()), 3),
        "by_folder": by_folder,
        "server": said,
    }


def main(
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "qwen3-8b",
    model: Annotated[Path | None, typer.Option(help="model folder in place of a shape")] = None,
    modes: Annotated[str, typer.Option(help=f"of {', '.join(MODES)}, with commas")] = "bf16,int2",
    length: Annotated[int, typer.Option(min=1, help="tokens of a prompt")] = 1024,
    server_args: Annotated[str, typer.Option(help="further flags for all servers")] = "",
    out: Annotated[Path, typer.Option(help="result as JSON; logs go beside it")] = Path("results/start.json"),
) -> None:
    """Measure the first start of a server and those after it."""
    result: dict[str, Any] = describe() | {"shape": model.name if model else shape, "length": length}
    result["plugin"] = plugin_bytes()
    print(f"plugin: {result['plugin']}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = [*STAGES, "first_token", "megabytes"]
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as homes:
        what = subject(model and model.absolute(), shape, Path(temporary))
        reader = Path(homes) / "reader"
        reader.mkdir()
        subprocess.run([sys.executable, "-c", IMPORTS], env=at_home(environment(), reader), check=True)
        print("  ".join(f"{column:>11}" for column in ["", "", *columns]), flush=True)
        for name in modes.split(","):
            home, given = Path(homes) / name, [*what.flags, *MODES[name].args, *server_args.split()]
            home.mkdir()
            for kind in ("cold", "warm", "recalibrated"):
                if kind == "recalibrated" and not forget_rotations(home):
                    continue
                log = out.with_suffix(f".{name}.{kind}.log")
                row = start(MODES[name], what, given, home, log, length)
                result[f"{name}_{kind}"] = row
                cells = [name, kind, *("-" if row[column] is None else row[column] for column in columns)]
                print("  ".join(f"{cell:>11}" for cell in cells), flush=True)
                out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
