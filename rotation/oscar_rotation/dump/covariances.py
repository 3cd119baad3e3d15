"""Covariances accumulated inside a server: a dump of kilobytes per head instead of gigabytes of activations.

    <root>/covariances.tp<i>of<n>.safetensors     one per tensor-parallel rank
    <root>/manifest.json                          as of an activation dump

Tensors ``qqt``, ``ktk``, ``sst``, ``vtv``: float64 [layers, kv_heads of the rank, d, d], sums of x^T x;
header strings: ``format``, ``format_version``, ``rows`` (target -> rows summed), ``kv_shard``, ``kv_shards``,
``tokens``, ``requests``. Where ranks replicate kv heads, each sums over its own query heads, and adding the shards of
one slice of kv heads gives the mean over all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oscar_rotation.atomic import write_atomically
from oscar_rotation.dump.layout import WARMUP_CHUNK
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.errors import DumpError
from oscar_rotation.math.covariance import (
    CovarianceAccumulator,
    KeyCovariance,
    QueryCovariance,
    ScoreValueCovariance,
    ValueCovariance,
)

FORMAT = "oscar-covariances"
FORMAT_VERSION = "1"
STREAMED = ("qqt", "ktk", "sst", "vtv")
_PATTERN = re.compile(r"covariances\.tp(\d+)of(\d+)\.safetensors")


class CovarianceWriter:
    """Takes the place of :class:`~oscar_rotation.dump.writer.DumpWriter` and keeps sums instead of activations.

    The sums live on the device of the activations, layers x kv heads x head_dim^2 x 32 bytes in all.

    Args:
        root: folder of the dump.
        num_layers: attention layers.
        kv_shard, kv_shards: which slice of the kv heads this rank holds, and how many there are.
        tp_rank, tp_size: this rank and the number of ranks.
        sm_scale: factor on the attention logits.
    """

    def __init__(
        self, root: Path, *, num_layers: int, kv_shard: int, kv_shards: int, tp_rank: int, tp_size: int, sm_scale: float
    ) -> None:
        self.root, self.num_layers, self.sm_scale = root, num_layers, sm_scale
        self.kv_shard, self.kv_shards, self.tp_rank, self.tp_size = kv_shard, kv_shards, tp_rank, tp_size
        self.layers: dict[int, dict[str, CovarianceAccumulator]] = {}
        self.tokens = self.requests = 0

    def write(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq_lens: Sequence[int],
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Add one chunk of one layer; arguments as for a dump of activations. The warm-up chunk is left out."""
        if chunk == WARMUP_CHUNK:
            return
        if layer not in self.layers:
            of_keys, of_values = ((x.shape[1], x.shape[2], x.device) for x in (k, v))
            self.layers[layer] = {
                "qqt": QueryCovariance(*of_keys),
                "ktk": KeyCovariance(*of_keys),
                "sst": ScoreValueCovariance(*of_values, self.sm_scale, sinks),
                "vtv": ValueCovariance(*of_values),
            }
        for accumulator in self.layers[layer].values():
            accumulator.update(q, k, v, seq_lens)
        if layer == 0:
            self.tokens += sum(seq_lens)
            self.requests += len(seq_lens)

    def finish(self) -> None:
        """Write this rank's file, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        layers = [self.layers[layer] for layer in range(self.num_layers)]
        tensors = {name: torch.stack([layer[name].sums for layer in layers]).cpu() for name in STREAMED}
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "rows": json.dumps({name: layers[0][name].rows for name in STREAMED}),
            "kv_shard": str(self.kv_shard),
            "kv_shards": str(self.kv_shards),
            "tokens": str(self.tokens),
            "requests": str(self.requests),
        }
        path = self.root / f"covariances.tp{self.tp_rank}of{self.tp_size}.safetensors"

        def fill(temporary: Path) -> None:
            temporary.write_bytes(save(tensors, metadata=header))

        write_atomically(path, fill)


@dataclass(frozen=True)
class StreamedCovariances:
    """Covariances of all layers and kv heads.

    Attributes:
        manifest: of the dump.
        targets: target -> float64 [layers, kv_heads, d, d], means over rows.
        tokens, requests: size of the calibration set.
    """

    manifest: DumpManifest
    targets: dict[str, torch.Tensor]
    tokens: int
    requests: int


def is_covariance_dump(root: Path) -> bool:
    """Whether a folder holds covariances instead of activations."""
    return root.is_dir() and any(_PATTERN.fullmatch(path.name) for path in root.iterdir())


def read_covariances(root: Path) -> StreamedCovariances:
    """Read, check and gather the shards of all ranks.

    Raises:
        DumpError: an interrupted dump, a missing, unreadable or foreign shard, or sums that cannot be covariances.
    """
    manifest = DumpManifest.read(root)
    if manifest is None or not manifest.complete:
        raise DumpError(f"{root}: the dump was interrupted before its covariances were complete; dump again")
    channels = dict(zip(STREAMED, [manifest.head_dim] * 2 + [manifest.value_channels] * 2, strict=True))
    shape = (manifest.num_layers, manifest.kv_heads)
    sums = {name: torch.zeros(*shape, d, d, dtype=torch.float64) for name, d in channels.items()}
    rows = {name: torch.zeros(manifest.kv_heads, dtype=torch.float64) for name in STREAMED}
    facts: dict[str, str] = {}
    for rank in range(manifest.tp_size):
        path = root / f"covariances.tp{rank}of{manifest.tp_size}.safetensors"
        facts, tensors = _read_shard(path)
        width = manifest.kv_heads // int(facts["kv_shards"])
        heads = slice(int(facts["kv_shard"]) * width, (int(facts["kv_shard"]) + 1) * width)
        counts = json.loads(facts["rows"])
        for name in STREAMED:
            part = tensors.get(name)
            expected = (shape[0], width, channels[name], channels[name])
            if part is None or part.dtype != torch.float64 or tuple(part.shape) != expected:
                found = "missing" if part is None else f"{part.dtype} {list(part.shape)}"
                raise DumpError(f"{path}: '{name}' is {found}, expected torch.float64 {list(expected)}")
            if not bool(part.isfinite().all()):
                raise DumpError(f"{path}: '{name}' holds NaN or infinite values; dump again")
            sums[name][:, heads] += part
            rows[name][heads] += counts[name]
    for name in STREAMED:
        if not bool((rows[name] > 0).all()):
            raise DumpError(f"{root}: kv heads without any rows in '{name}'; dump again")
    means = {name: sums[name] / rows[name][None, :, None, None] for name in STREAMED}
    return StreamedCovariances(manifest, means, int(facts["tokens"]), int(facts["requests"]))


def _read_shard(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    if not path.exists():
        raise DumpError(f"{path}: missing, the manifest names this rank; dump again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise DumpError(f"{path}: not a readable safetensors file, probably truncated ({error}); dump again") from error
    if facts.get("format") != FORMAT or facts.get("format_version") != FORMAT_VERSION:
        raise DumpError(f"{path}: not a covariance dump of version {FORMAT_VERSION}; dump again")
    missing = {"rows", "kv_shard", "kv_shards", "tokens", "requests"} - set(facts)
    if missing:
        raise DumpError(f"{path}: the header lacks {', '.join(sorted(missing))}; dump again")
    return facts, tensors
