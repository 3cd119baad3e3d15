"""Errors of the drivers; each message is one line that names the fault and the remedy."""

from __future__ import annotations

import json


class DataError(ValueError):
    """A calibration or evaluation data set that is missing, gated or malformed."""


class HarnessError(RuntimeError):
    """The evaluation harness is missing or failed."""


def server_message(body: str) -> str:
    """What a server says in the body of a refusal, as one line: SGLang and OpenAI put it into JSON."""
    try:
        found = json.loads(body)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = body
    return (str(text).strip().splitlines() or ["no reason given"])[0][:300]
