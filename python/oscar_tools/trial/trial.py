"""A trial: the same random model in stock SGLang and in int2 mode with exact rows, each in a forked process."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_tools.trial import scheduler
from sglang_oscar.attach.model_classes import ALLOW

EXACT = {
    ALLOW: "1",
    "SGLANG_OSCAR_K_ROTATION_PATH": "hadamard",
    "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard",
    "SGLANG_OSCAR_K_BITS": "16",
    "SGLANG_OSCAR_V_BITS": "16",
}
"""Rows of 16 bits: what differs from stock is rounding in another basis."""
COMMON = (
    "--load-format dummy --skip-tokenizer-init --disable-overlap-schedule --random-seed 0 --mem-fraction-static 0.2 "
    f"--max-total-tokens 8192 --max-running-requests 2 --chunked-prefill-size {scheduler.CHUNK} --enable-fp32-lm-head "
    "--moe-runner-backend triton"
)
INT2 = "--kv-cache-dtype int2 --kv-cache-quant-group-size 64"
STOCK = "--attention-backend torch_native --disable-hybrid-swa-memory"
"""In one pool, SGLang's attention in torch sees the windows of layers."""
REFUSAL = "--kv-cache-dtype int2 does not support"
SECONDS = 600
DRIFT = 0.25
"""Largest difference of log probabilities that rounding makes."""
SIGNAL, LEAST = 8, 0.1
"""How many times more a prompt's first two thirds must matter, and how much, or a wrong cache would not show."""


@dataclass
class Outcome:
    """What a trial found.

    Attributes:
        error: why there are no figures; None where there are.
        refused: whether that is int2 mode's own line.
        drift: largest difference of log probabilities from stock's, over all tokens of the vocabulary.
        signal: what another beginning of the prompt changes in stock's first choice.
        steps: choices that were compared.
        hits: tokens that the second turn found in the cache.
    """

    error: str | None = None
    refused: bool = False
    drift: float = 0.0
    signal: float = 0.0
    steps: int = 0
    hits: int = 0

    @property
    def passed(self) -> bool:
        """Whether int2 mode answers as stock does, and would show if it did not."""
        return self.error is None and self.drift <= DRIFT and self.signal >= max(SIGNAL * self.drift, LEAST)

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        return f"drift {self.drift:.3f} of {self.signal:.2f} in {self.steps} steps, {self.hits} tokens cached"


def warm_up() -> None:
    """Import what all trials need, before processes are forked."""
    torch.set_num_threads(1)
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def try_model(model: Path | str, args: Sequence[str] = ()) -> Outcome:
    """Try a model; :func:`warm_up` must have been called.

    Args:
        model: a folder with a configuration; weights are not read.
        args: further flags of both servers.
    """
    base = ["--model-path", str(model), *COMMON.split(), *args]
    int2 = _forked([*base, *INT2.split()], EXACT)
    if isinstance(int2, str) and REFUSAL in int2:
        return Outcome(int2, refused=True)
    stock = _forked([*base, *STOCK.split()], {})
    if isinstance(stock, str):
        return Outcome(f"stock SGLang on a CPU: {stock}")
    return Outcome(int2) if isinstance(int2, str) else compare(stock, int2)


def compare(stock: dict[str, Any], int2: dict[str, Any]) -> Outcome:
    """Compare answers of :func:`oscar_tools.trial.scheduler.answers`, each up to the first choice that differs."""
    drift, steps = 0.0, 0
    for turn in stock.keys() - {"hits"}:
        (ids, logits), (other_ids, other_logits) = stock[turn], int2[turn]
        if turn == "second" and stock["first"][0] != int2["first"][0]:
            continue  # the prompts differ
        same = next((i for i, pair in enumerate(zip(ids, other_ids, strict=True)) if len({*pair}) > 1), len(ids) - 1)
        change = difference(logits[: same + 1], other_logits[: same + 1])
        drift, steps = max(drift, change), steps + same + 1
    signal = difference(stock["first"][1][:1], stock["other"][1][:1])
    return Outcome(drift=drift, signal=signal, steps=steps, hits=int2["hits"])


def difference(a: Any, b: Any) -> float:
    """Largest difference of the log probabilities of two [steps, vocabulary] logits; inf where one is NaN."""
    one, other = (torch.as_tensor(logits).log_softmax(-1) for logits in (a, b))
    change = (one - other).abs().max()
    return float(change) if torch.isfinite(change) else float("inf")


def _forked(argv: list[str], variables: dict[str, str]) -> dict[str, Any] | str:
    """Answers of a server in a forked process, or the last line of what went wrong."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(argv, variables, there))
    process.start()
    there.close()
    try:
        found: dict[str, Any] | str = here.recv() if here.poll(SECONDS) else f"no answer in {SECONDS} seconds"
    except EOFError:
        process.join()
        found = f"ended with status {process.exitcode}"
    process.kill()
    process.join()
    return found


def _child(argv: list[str], variables: dict[str, str], result: Any) -> None:
    with tempfile.TemporaryFile("w+") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        os.environ.update(variables)
        try:
            result.send(scheduler.answers(argv))
        except SystemExit:
            sys.stderr.flush()
            log.seek(0)
            result.send(log.read().strip().rpartition("\n")[2])
        except BaseException as error:
            result.send(f"{type(error).__name__}: {error}".strip().partition("\n")[0][:160])
    os._exit(0)
