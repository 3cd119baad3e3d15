"""Questions to a running server over HTTP."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import requests

from oscar_tools.calibration.errors import server_message
from oscar_tools.evaluation.prove.divergence import TopTokens

TIMEOUT = 1800.0
"""Seconds; two CPU cores take minutes for a long prompt."""

SLACK = 512
"""Tokens of a cached prefix that may be computed again: the recent window of an int2 server, 256 tokens, and the rest
of a page."""


class AskingError(RuntimeError):
    """A server did not answer, or not from its cache; the message is one line."""


class RefusedError(AskingError):
    """The server answered that it cannot do what was asked."""


@dataclass(frozen=True)
class Reply:
    """What a server answered.

    Attributes:
        text: generated text.
        ids: generated token ids, the end token included.
        finish: "stop" or "length".
        prompt: tokens of the prompt.
        cached: of these, taken from the cache.
        meta: all that SGLang says about the request.
    """

    text: str
    ids: list[int]
    finish: str
    prompt: int
    cached: int
    meta: dict[str, Any]


class Client:
    """Asks one server, greedily.

    Args:
        url: base address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._guard = threading.Lock()
        self._caching: dict[tuple[int, ...], threading.Lock] = {}
        self._cached: set[tuple[int, ...]] = set()

    def capacity(self) -> int | None:
        """Tokens that the server's cache holds; None if it does not say."""
        try:
            reply = requests.get(f"{self.url}/server_info", timeout=60)
            return int(reply.json()["max_total_num_tokens"]) if reply.ok else None
        except (requests.RequestException, ValueError, KeyError):
            return None

    def generate(self, ids: list[int], tokens: int, sampling: dict[str, Any] | None = None, **extra: Any) -> Reply:
        """Continue a prompt.

        Args:
            ids: the prompt.
            tokens: to generate at most.
            sampling: further sampling parameters.
            extra: further fields of the request.

        Raises:
            RefusedError: the server cannot do that.
            AskingError: no answer.
        """
        parameters = {"temperature": 0, "max_new_tokens": tokens} | (sampling or {})
        body = {"input_ids": ids, "sampling_params": parameters} | extra
        try:
            reply = requests.post(f"{self.url}/generate", json=body, timeout=TIMEOUT)
        except requests.RequestException as error:
            raise AskingError(f"no answer from the server ({type(error).__name__})") from None
        if 400 <= reply.status_code < 500:
            raise RefusedError(server_message(reply.text))
        if not reply.ok:
            raise AskingError(f"the server answered {reply.status_code}: {server_message(reply.text)}")
        found = reply.json()
        meta = found["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort":
            raise RefusedError(str(finish.get("message", "aborted")).splitlines()[0])
        return Reply(
            found["text"],
            found.get("output_ids", []),
            finish["type"],
            meta["prompt_tokens"],
            meta["cached_tokens"],
            meta,
        )

    def behind_cache(
        self, prefix: list[int], ids: list[int], tokens: int, sampling: dict[str, Any] | None = None, **extra: Any
    ) -> Reply:
        """Ask with ``ids``, which begin with ``prefix``, behind a request that caches it: one for all that ask behind
        the same prefix, and another where it was pushed out.

        Raises:
            AskingError: see :meth:`generate`; or the prefix was not taken from the cache.
        """
        for _ in range(2):  # Under memory pressure another request may have pushed it out in between.
            self._cache(tuple(prefix))
            reply = self.generate(ids, tokens, sampling, **extra)
            if reply.cached >= len(prefix) - SLACK:
                return reply
            self._cached.discard(tuple(prefix))
        raise AskingError(
            f"only {reply.cached} of {len(prefix)} tokens came from the prefix cache: it is off, or the server has "
            "too little memory"
        )

    def _cache(self, prefix: tuple[int, ...]) -> None:
        with self._guard:
            caching = self._caching.setdefault(prefix, threading.Lock())
        with caching:
            if prefix not in self._cached:
                self.generate(list(prefix), 1)
                self._cached.add(prefix)

    def read(self, ids: list[int], begin: int, top: int, cached: bool = True) -> TopTokens:
        """What the server thinks of the tokens of ``ids`` behind position ``begin``, the first one left out.

        Args:
            ids: a text.
            begin: where to begin, >= 1; what lies before is cached first.
            top: number of most likely tokens to tell.
            cached: False computes the whole text anew instead, apart from all that is cached.

        Returns:
            of ``len(ids) - begin - 1`` tokens.

        Raises:
            AskingError: see :meth:`behind_cache`; or log probabilities are not finite, which SGLang writes as null.
        """
        asked: dict[str, Any] = {"return_logprob": True, "logprob_start_len": begin, "top_logprobs_num": top}
        if cached:
            reply = self.behind_cache(ids[:begin], ids, 1, **asked)
        else:
            # Texts of several lengths may begin alike, so each has a key of its own.
            reply = self.generate(ids, 1, **asked, extra_key=uuid4().hex)
        # SGLang begins with the token at ``begin``, of which it knows nothing.
        scored, tops = reply.meta["input_token_logprobs"][1:], reply.meta["input_top_logprobs"][1:]
        if len(scored) != len(ids) - begin - 1 or len(tops) != len(scored):
            raise AskingError(f"the server scored {len(scored)} of {len(ids) - begin - 1} tokens")
        found = TopTokens(
            np.array([[entry[1] for entry in place] for place in tops], dtype=np.int32),
            np.array([[entry[0] for entry in place] for place in tops], dtype=np.float32),
            np.array([entry[0] for entry in scored], dtype=np.float32),
        )
        if not (np.isfinite(found.logprobs).all() and np.isfinite(found.read).all()):
            raise AskingError("the server's log probabilities are no numbers: its model or its cache computes NaN")
        return found
