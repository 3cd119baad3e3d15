"""What a running server says of its KV cache: reports state this, never what a command line asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import requests

from oscar_tools.calibration.errors import HarnessError
from sglang_oscar.memory.facts import KEY
from sglang_oscar.names import DTYPE

TIMEOUT = 60.0
"""Seconds."""

SIXTEEN_BITS = {"auto": "BF16", "bfloat16": "BF16", "bf16": "BF16", "float16": "FP16", "half": "FP16"}
KNOWN = {name: (title, 16.0) for name, title in SIXTEEN_BITS.items()} | {
    "float32": ("FP32", 32.0),
    "float": ("FP32", 32.0),
    "fp8_e4m3": ("FP8 (e4m3)", 8.0),
    "fp8_e5m2": ("FP8 (e5m2)", 8.0),
}
"""SGLang's name of a dtype -> title, bits per element."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        dtype: of the KV cache, as SGLang calls it; that of the model where the cache follows it.
        title: in tables.
        bits: per element of keys and values, windows included, at 128K tokens; None of a dtype not known here.
        int2: what the plugin says of an INT2 cache (:func:`sglang_oscar.memory.facts.facts`); None of another cache.
        model: path or id.
        version: of SGLang.
    """

    dtype: str
    title: str
    bits: float | None
    int2: dict[str, Any] | None
    model: str
    version: str

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def check(self, int2: bool, title: str) -> None:
        """Refuse a server whose cache is not what it was started for.

        Args:
            int2: whether that is int2 mode.
            title: of what it was started for.

        Raises:
            HarnessError: it is something else.
        """
        if int2 != (self.int2 is not None):
            raise HarnessError(f"{title}: the server says that its cache is {self.title}; see --server-args")


def ask(url: str) -> ServerFacts:
    """Ask a server.

    Args:
        url: base address.

    Raises:
        HarnessError: it does not answer, is no SGLang server, or is in int2 mode and does not say of which rotations.
    """
    try:
        reply = requests.get(f"{url.rstrip('/')}/server_info", timeout=TIMEOUT)
        reply.raise_for_status()
        return read(reply.json(), url)
    except (requests.RequestException, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines() or [""]
        raise HarnessError(
            f"{url}/server_info: not the answer of an SGLang server ({type(error).__name__}: {reason[0][:200]})"
        ) from None


def read(info: dict[str, Any], url: str = "the server") -> ServerFacts:
    """Facts from the JSON of ``/server_info``.

    Raises:
        HarnessError: an INT2 cache of a plugin that does not say more.
        KeyError: no SGLang server wrote it.
    """
    dtype = str(info["kv_cache_dtype"])
    model, version = str(info["model_path"]), str(info.get("version"))
    if dtype == DTYPE:
        found = next((state[KEY] for state in info["internal_states"] if KEY in state), None)
        if found is None:
            raise HarnessError(f"{url}: does not say what its int2 cache is; serve with this release of sglang-oscar")
        return ServerFacts(dtype, f"INT2, recipe {found['recipe']}", found["bits_at_128k"], found, model, version)
    dtype = str(info.get("dtype", dtype)) if dtype == "auto" else dtype
    title, bits = KNOWN.get(dtype, (dtype, None))
    return ServerFacts(dtype, title, bits, None, model, version)
