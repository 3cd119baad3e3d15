"""An OpenAI endpoint that answers the tiny benchmarks of ``benchmark_data``: all questions rightly but one."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WRONG = ("number 3?", "add_1", "Triple", "three times", "Find 10", "$2^2$")
"""What the questions that are answered wrongly contain; of haystacks, those with several keys."""


def answer(prompt: str) -> str:  # noqa: PLR0911 (one return per kind of question)
    """The answer to one prompt."""
    if "magic numbers" in prompt:
        keys = re.findall(r"magic numbers for (\w+) is: (\d+)", prompt)
        asked = re.findall(r"magic numbers for (\w+) mentioned", prompt)[-1]
        return "0" if len(keys) > 1 else dict(keys)[asked]
    wrong = any(mark in prompt for mark in WRONG)
    if sides := re.search(r"polygon of (\d+) sides", prompt):
        letters = dict(re.findall(r"^([A-D])\) (.+)$", prompt, re.MULTILINE))
        right = next(letter for letter, text in letters.items() if text.strip() == sides[1])
        return f"ANSWER: {'ABCD'['BADC'.index(right)] if wrong else right}"
    if added := re.search(r"def add_(\d+)", prompt):
        return f"```python\ndef add_{added[1]}(x: int) -> int:\n    return x + {0 if wrong else added[1]}\n```"
    if "print its double" in prompt:
        return "```python\nprint(2 * int(input()))\n```"
    if "three times" in prompt:
        return "```python\nclass Solution:\n    def triple(self, n: int) -> int:\n        return n\n```"
    if added := re.search(r"Find (\d+) \+ \d+", prompt):
        return f"\\boxed{{{1 if wrong else 2 * int(added[1])}}}"
    squared = re.search(r"\$(\d+)\^2\$", prompt)
    assert squared, prompt
    return f"It is $\\boxed{{{1 if wrong else int(squared[1]) ** 2}}}$."


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)  # type: ignore[attr-defined]
        content = asked["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[0]["text"]
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer(text)}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def answering_endpoint() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve answers; yields the base address and the requests as they come."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
