"""Runs many launches up to the point where the model would be loaded, in one process: one import for all of them.

Reads a JSON list of {"argv": [...], "env": {...}, "unset": [...]} on stdin; each case gets the command line of
``python -m sglang.launch_server`` and writes {"status", "error", "values"} to the list printed after ``MARKER``:
its exit status (0: accepted), its stderr, and of an accepted command line the arguments named in ``SHOWN``, as SGLang
resolved them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

MARKER = "launch cases:"
SHOWN = ("attention_backend", "decode_attention_backend", "page_size", "kv_cache_quant_group_size")


def run_cases(cases: list[dict[str, Any]], env: dict[str, str], *argv: str) -> list[dict[str, Any]]:
    """Run ``cases`` in a process of their own with environment ``env``, whose own command line ends with ``argv``."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), *argv],
        input=json.dumps(cases),
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition(MARKER)[2])


def main() -> None:
    """Body of the process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    from sglang_oscar.attach import releases

    inherited = dict(os.environ)
    results = []
    for case in json.load(sys.stdin):
        os.environ.clear()
        os.environ.update(inherited | case.get("env", {}))
        for name in case.get("unset", []):
            del os.environ[name]
        result: dict[str, Any] = {"status": 0, "values": {}}
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            try:
                args = prepare_server_args(case["argv"])
                if hasattr(args, "resolve_once"):  # what ``launch_server`` does next
                    args.resolve_once()
                result["values"] = {name: getattr(releases.resolved(args), name, None) for name in SHOWN}
            except SystemExit as error:
                result["status"] = error.code
            except BaseException:
                traceback.print_exc()
                result["status"] = 1
        results.append(result | {"error": stderr.getvalue()})
    print(MARKER + json.dumps(results))


if __name__ == "__main__":
    main()
