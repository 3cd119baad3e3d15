"""What the serving benchmarks measure, models and caches, and what they ask."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rotations import rotations_of
from shapes import config_of, has_images, write_model

from oscar_cpu.server import environment, has_gpu
from oscar_rotation.defaults import BITS
from oscar_tools.evaluation.server_facts import ask
from oscar_tools.local_server import LocalServer


class Subject(NamedTuple):
    """A model to serve: its name in results, its folder, flags of its servers, and ids that prompts are made of."""

    name: str
    folder: Path
    flags: list[str]
    vocabulary: int

    def prompt(self, seed: int, length: int) -> list[int]:
        """As :func:`prompt`, of ids that the model has."""
        return [token % self.vocabulary for token in prompt(seed, length)]


def subject(model: Path | None, shape: str, folder: Path) -> Subject:
    """The model of a folder, or random weights in a shape, for which ``folder`` gets a config.

    Raises:
        ValueError: there is no such shape.
    """
    flags = ["--mem-fraction-static", "0.85"]
    if model:
        config = json.loads((model / "config.json").read_text())
        return Subject(model.name, model, [*flags, "--skip-tokenizer-init"], config["vocab_size"])
    write_model(folder, shape)
    # A model of images cannot do without a tokenizer; its warm-up would ask for a text in words that this one has not.
    own = ["--skip-server-warmup"] if has_images(config_of(shape)) else ["--skip-tokenizer-init"]
    return Subject(shape, folder, [*flags, "--load-format", "dummy", *own], 100_000)


class Mode(NamedTuple):
    """A cache: flags and environment of a server, and ``--bits`` where matrices are fitted."""

    args: list[str]
    env: dict[str, str]
    fit: str | None = None

    @property
    def stock(self) -> bool:
        """Whether SGLang serves it by itself."""
        return "int2" not in self.args

    def facts(self, server: LocalServer) -> dict[str, Any]:
        """What its server says of itself, for results: JSON of :class:`ServerFacts`.

        Raises:
            HarnessError: that is another kind of cache.
        """
        found = ask(server.url)
        found.check(not self.stock, "a stock cache" if self.stock else "int2")
        return found.to_json()

    def environment(self, model: Path) -> dict[str, str]:
        """Variables of a server of the model in a folder, which gets matrices where the cache has fitted ones."""
        return environment() | self.env | ({} if self.fit is None else rotations_of(model, self.fit))


INT2 = ["--kv-cache-dtype", "int2"]


def fitted(bits: str) -> Mode:
    """Int2 mode with fitted matrices.

    Args:
        bits: as ``oscar fit --bits`` takes them.
    """
    return Mode(INT2, {}, bits)


BASELINE = "flashinfer" if has_gpu() else "torch_native"
"""Attention backend of stock SGLang: its best one for these shapes, and on a CPU one that runs on any."""
EXACT = {
    f"SGLANG_OSCAR_{side}_{name}": value
    for side in "KV"
    for name, value in (("ROTATION_PATH", "identity"), ("BITS", "16"))
}
"""Int2 mode's rows with 16 bits a side, for the difference that its arithmetic alone makes."""
FP8 = ["--kv-cache-dtype", "fp8_e4m3"]
FA3 = ["--attention-backend", "fa3", "--page-size", "64"]
"""SGLang's default on Hopper. With its default pages of one token FP8 is a tenth slower."""
XQA = ["--prefill-attention-backend", "fa3", "--decode-attention-backend", "trtllm_mha", "--page-size", "64"]
"""On Hopper TensorRT-LLM's decode attention in SGLang is XQA, for steps of decoding only."""
MODES = {
    "bf16": Mode(["--attention-backend", BASELINE], {}),
    "fp8": Mode(["--attention-backend", BASELINE, *FP8], {}),
    "fa3": Mode(FA3, {}),
    "fa3_fp8": Mode([*FA3, *FP8], {}),
    "xqa": Mode(XQA, {}),
    "xqa_fp8": Mode([*XQA, *FP8], {}),
    "exact": Mode(INT2, EXACT),
    "int2": fitted(BITS),
    **{bits: fitted(bits) for bits in ("k2v2", "k3v2", "k4v2")},
    "calibrating": Mode(INT2, {}),
}
"""By their names in results. ``int2`` has the bits of a user who sets nothing; ``calibrating`` is what that user gets,
with matrices that its first start makes of the model. The others are named by their bits."""


def chain(drafts: int) -> list[str]:
    """Flags of a server whose draft layer makes chains, which are verified ``drafts`` tokens at a time."""
    return ["--speculative-num-steps", str(drafts - 1), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(drafts)]  # fmt: skip


def eagle3(draft: Path, drafts: int) -> list[str]:
    """The same with an EAGLE3 head."""
    return ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft), *chain(drafts)]


def asking(ids: list[int], tokens: int) -> dict[str, Any]:
    """Body of a request to /generate for exactly ``tokens`` tokens."""
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


async def chunks_of(reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """JSON of every event of a streamed answer, as it comes."""
    async for line in reply.content:
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            yield line.removeprefix(b"data:")


def connector() -> aiohttp.TCPConnector:
    """Any number of connections. None idles for as long as SGLang keeps it open, 5 seconds: a request that crosses its
    end is lost.
    """
    return aiohttp.TCPConnector(limit=0, keepalive_timeout=2)


async def send_all(url: str, lengths: list[int], tokens: int) -> list[int]:
    """Send a request for every prompt length at once, each with a prompt of its own, and wait for all.

    Returns:
        their HTTP statuses.
    """

    async def one(session: aiohttp.ClientSession, number: int, length: int) -> int:
        async with session.post(f"{url}/generate", json=asking(prompt(number, length), tokens)) as reply:
            await reply.read()
            return reply.status

    limit = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=connector(), timeout=limit) as session:
        return await asyncio.gather(*(one(session, number, length) for number, length in enumerate(lengths)))


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids, the same ones for every call with the same arguments."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 100000) for _ in range(length)]
