"""What ``/server_info`` says, and a stand-in that says it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INT2 = {
    "version": "0.1.0",
    "recipe": "plus",
    "rotations": {"keys": "k.safetensors", "values": "v.safetensors", "origin": "the cache"},
    "fingerprint": "ab" * 32,
    "codes": "keys 2, values 2",
    "bits": 2.25,
    "bits_at_128k": 2.289,
    "group_sizes": [128],
    "sink": 64,
    "recent": 256,
    "recomputed": 256,
}


def server_info(int2: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The parts of the JSON that are read, of a stock server or of one in int2 mode."""
    stock = {
        "kv_cache_dtype": "auto",
        "dtype": "auto",
        "model_path": "/m",
        "version": "0.5.23",
        "internal_states": [{}],
    }
    if int2 is not None:
        stock |= {"kv_cache_dtype": "int2", "internal_states": [{"oscar": int2}]}
    return stock | fields


@contextmanager
def answering(info: dict[str, Any]) -> Iterator[str]:
    """A server that answers every GET with this JSON; its base address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            body = json.dumps(info).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
