"""``oscar prove`` as a command, its servers replaced by stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from oscar_tools.cli import app
from oscar_tools.evaluation.prove.sizes import Size
from oscar_tools.local_server import ServerFailedError
from support.reference import MODEL, ROOT
from support.server_answers import INT2, server_info
from support.stand_in_server import stand_in_server

TINY = Size("reduced", 1024, 2, 32, 2, 1, 1, 9, 1, 2, 8192, 2)
"""A run of seconds."""
BLUR = {"bf16": 0.0, "fp8": 0.3, "int2": 1.0, "naive": 4.0}
SAYS = {"fp8": server_info(kv_cache_dtype="fp8_e4m3"), "int2": server_info(INT2), "naive": server_info(INT2)}
"""Cache -> what its server says, where it is not in 16 bits."""
ROTATIONS = [f"--{side}-rotation={ROOT}/test/data/reference_{side}_rotation.safetensors" for side in "kv"]


class Servers:
    """Stand-ins in place of SGLang servers; ``options`` are those of one cache's server."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.refuse: set[str] = set()
        self.args: dict[str, tuple[str, ...]] = {}

    @contextmanager
    def serve(self, model: Any, log: Path, args: Any, env: Any, *_: Any) -> Iterator[Any]:
        cache = log.stem.removeprefix("server_")
        self.started.append(cache)
        if cache in self.refuse:
            log.write_text("ValueError: no such cache here\nbye\n")
            raise ServerFailedError(f"the server ended with status 1; end of {log}:\nmany lines")
        self.args[cache] = tuple(args)
        kind = cache.partition("-chunk")[0]
        options = {"info": SAYS.get(kind)} | self.options.get(cache, {})
        with stand_in_server(log, BLUR[kind], **options) as server:
            yield server


def prove(out: Path, *arguments: str) -> Result:
    """Run the command on the shipped model."""
    caches = [] if "--cache" in arguments else ["--cache", "fp8", "--cache", "int2", *ROTATIONS]
    return CliRunner().invoke(app, ["prove", str(MODEL), "--size", "reduced", "--out", str(out), *caches, *arguments])


def figures(out: Path) -> dict[str, Any]:
    """Cache -> figures."""
    return {row["name"]: row["figures"] for row in json.loads((out / "prove.json").read_text())["caches"]}
