"""``origin.json`` in a dump: of which prompts and weights it was made, and in which mode."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.errors import DumpError
from oscar_tools.calibration.weight_files import model_files

ORIGIN = "origin.json"
ACTIVATIONS, COVARIANCES = "activations", "covariances"
MEANINGS = {
    "prompts": "other prompts (the text, or the tokenizer)",
    "model": "other weights or another configuration of the model",
}


def dump_origin(
    model: str, prompts: list[list[int]], mode: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a dump is made of, as JSON values.

    Args:
        model: folder or hub id.
        prompts: token ids, in order.
        mode: :data:`ACTIVATIONS` or :data:`COVARIANCES`.
        overrides: of the model's configuration, the server's ``--json-model-override-args``.

    Raises:
        OSError: a file of the model cannot be read.
    """
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    return {"mode": mode, "prompts": digest, "model": model_files(model), "overrides": dict(overrides or {})}


def write_origin(dump: Path, origin: dict[str, Any]) -> None:
    """Keep the origin in a dump's folder, which is made where it is missing.

    Raises:
        OSError: it cannot be written.
    """
    write_text_atomically(dump / ORIGIN, json.dumps(origin, indent=1) + "\n")


def _differs(before: Any, now: Any) -> bool:
    """Whether two descriptions contradict each other. What one leaves out, as older releases did, or an id whose commit
    was not known, contradicts nothing."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return bool(before != now)
    return any(before[key] != now[key] for key in before.keys() & now.keys() if None not in (before[key], now[key]))


def check_origin(dump: Path, origin: dict[str, Any]) -> str | None:
    """Refuse a dump that is known to be made of something else.

    Returns:
        a remark where not everything could be checked: dumps of older releases do not say what they were made of.

    Raises:
        DumpError: naming what differs.
    """
    remedy = "remove it, or name another OSCAR_ROOT for the new one"
    mode = COVARIANCES if is_covariance_dump(dump) else ACTIVATIONS
    if mode != origin["mode"]:
        raise DumpError(f"{dump}: holds {mode}, {origin['mode']} are asked for; {remedy}")
    try:
        before = dict(json.loads((dump / ORIGIN).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return f"{dump} does not say of which prompts and weights it was made, so they are not compared with yours"
    except (ValueError, TypeError):
        raise DumpError(f"{dump / ORIGIN}: is broken, so that it is not known what {dump} is of; {remedy}") from None
    # Dumps of older releases do not say, and few had any.
    if before.get("overrides", {}) != origin["overrides"]:
        raise DumpError(f"{dump}: was made under other --json-model-override-args than are asked for now; {remedy}")
    for name, what in MEANINGS.items():
        if _differs(before.get(name), origin[name]):
            raise DumpError(f"{dump}: was made of {what} than what is asked for now; {remedy}")
    return None
