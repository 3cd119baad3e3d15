"""A stand-in for an SGLang server, so that a whole run takes a second: its model is one row of logits,
turned by the last token.

It says of its cache what it is told to, and answers ``/generate`` in SGLang's form: greedy tokens, log probabilities
of the prompt, cached tokens of a prefix that it saw before. ``blur`` adds noise to the logits, as a cache would.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from support.server_answers import server_info

VOCABULARY = 4096
RECENT = 256


class RowModel:
    """Next-token log probabilities by the last token, with noise by everything before it."""

    def __init__(self, blur: float) -> None:
        self.blur = blur
        self.row = np.random.default_rng(7).normal(size=VOCABULARY) * 3

    def logprobs(self, ids: list[int]) -> np.ndarray:
        """Of the token behind ``ids``: [VOCABULARY]."""
        noise = np.random.default_rng(abs(hash(tuple(ids[-8:])))).normal(size=VOCABULARY) * self.blur
        logits = np.roll(self.row, 37 * ids[-1]) + noise
        found: np.ndarray = logits - np.log(np.exp(logits).sum())
        return found


@dataclass
class StandIn:
    """A server that looks like :class:`oscar_tools.local_server.LocalServer`."""

    url: str
    log: Path
    alive: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)

    def healthy(self) -> bool:
        """Whether it answers."""
        return self.alive


@contextmanager
def stand_in_server(
    log: Path,
    blur: float,
    dies_after: int | None = None,
    caches: bool = True,
    grammar: bool = True,
    info: dict[str, Any] | None = None,
) -> Iterator[StandIn]:
    """Serve until the end of the block.

    Args:
        log: written once.
        blur: noise of the logits.
        dies_after: requests that are answered before the server hangs up on every further one.
        caches: whether prefixes are found again.
        grammar: whether JSON schemas are taken.
        info: JSON of ``/server_info``; a stock cache's by default.
    """
    model = RowModel(blur)
    seen: dict[str, list[list[int]]] = {}
    lock = threading.Lock()
    log.write_text("loading\nRuntimeError: out of tape\n")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.asked.append(body)
                if dies_after is not None and len(server.asked) > dies_after:
                    server.alive = False
                    self.close_connection = True
                    return
                status, answer = reply(body)
            self.send(status, answer)

        def do_GET(self) -> None:
            self.send(200, server_info() if info is None else info)

        def send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, sampling = body["input_ids"], body["sampling_params"]
        if "json_schema" in sampling and not grammar:
            return 400, {"error": {"message": "Grammar-based generation is not supported"}}
        known = seen.setdefault(body.get("extra_key", ""), [])
        cached = max((shared(old, ids) for old in known), default=0) if caches else 0
        cached = min(cached, max(0, len(ids) - RECENT)) // 64 * 64
        known.append(ids)
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "cached_tokens": cached,
            "finish_reason": {"type": "length"},
        }
        if body.get("return_logprob"):
            begin, top = body["logprob_start_len"], body["top_logprobs_num"]
            scored: list[Any] = [[None, ids[begin], None]]
            tops: list[Any] = [None]
            for i in range(begin + 1, len(ids)):
                found = model.logprobs(ids[:i])
                scored.append([float(found[ids[i]]), ids[i], None])
                tops.append([[float(found[t]), int(t), None] for t in np.argsort(-found)[:top]])
            meta |= {"input_token_logprobs": scored, "input_top_logprobs": tops}
        out: list[int] = []
        for _ in range(sampling["max_new_tokens"]):
            out.append(int(model.logprobs(ids + out).argmax()))
        text = '{"key": "a", "number": 1, "comment": ""}' if "json_schema" in sampling else "".join(map(chr, out))
        return 200, {"text": text, "output_ids": out, "meta_info": meta}

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = StandIn(f"http://127.0.0.1:{http.server_port}", log)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


def shared(old: list[int], new: list[int]) -> int:
    """Length of the common beginning."""
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            return i
    return min(len(old), len(new))
