"""Names of the files of a dump.

    <root>/layer_<id>/{q,k,v,seq_lens}/<chunk>.pt

A tensor-parallel server writes shards instead of q, k and v files: ``<chunk>.tp<i>of<n>.pt``, shard i of n along
the heads. q has one shard per rank. k and v have one per *distinct* slice of kv heads, min(tp_size, kv_heads) in
all, so heads that several ranks replicate are stored once. Every name states n: a lost shard shows. seq_lens is
the same on all ranks and is written once, unsharded, by rank 0.

    <root>/layer_<id>/sink_logits.pt

Float [q_heads], where heads of the layer have sink logits: numbers that a softmax runs over besides the logits of the
tokens. Ranks write ``sink_logits.tp<i>of<n>.pt``, as they write q.

    <root>/layer_<id>/output_reader.pt

Float32 [q_heads, head_dim, head_dim], W^T W of each head's part W [hidden, head_dim] of the output projection: what an
error of its attention output is worth. Ranks write ``output_reader.tp<i>of<n>.pt``. Dumps without it are fitted with
the weights of the checkpoint.

    <root>/tokens

How many tokens are to be recorded, said before the first prompt; ``DUMP_KVCACHE_TOKENS`` where it is missing.
"""

from __future__ import annotations

import re
from pathlib import Path

KINDS = ("q", "k", "v", "seq_lens")
TENSOR_KINDS = ("q", "k", "v")
WARMUP_CHUNK = 0
"""The first chunk: a server's warm-up request of a few tokens, of no use to a fit."""

TOKENS_NAME = "tokens"

LAYER_PATTERN = re.compile(r"layer_(\d+)")
CHUNK_PATTERN = re.compile(r"(\d+)(?:\.tp(\d+)of(\d+))?\.pt")


def layer_folder(root: Path, layer: int) -> Path:
    """``<root>/layer_<id>``."""
    return root / f"layer_{layer}"


def chunk_name(chunk: int, shard: int = 0, shards: int = 1) -> str:
    """File name of one chunk, or of one of its shards.

    >>> chunk_name(3), chunk_name(3, 1, 4)
    ('3.pt', '3.tp1of4.pt')
    """
    return _shard_name(str(chunk), shard, shards)


def sink_logits_name(shard: int = 0, shards: int = 1) -> str:
    """File name of a layer's sink logits, or of one of its shards.

    >>> sink_logits_name(), sink_logits_name(1, 4)
    ('sink_logits.pt', 'sink_logits.tp1of4.pt')
    """
    return _shard_name("sink_logits", shard, shards)


def output_reader_name(shard: int = 0, shards: int = 1) -> str:
    """File name of what reads a layer's attention outputs, or of one of its shards.

    >>> output_reader_name(), output_reader_name(1, 4)
    ('output_reader.pt', 'output_reader.tp1of4.pt')
    """
    return _shard_name("output_reader", shard, shards)


def _shard_name(stem: str, shard: int, shards: int) -> str:
    return f"{stem}.pt" if shards == 1 else f"{stem}.tp{shard}of{shards}.pt"
