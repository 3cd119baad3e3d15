"""Writing a dump from inside a running model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from oscar_rotation.atomic import write_atomically
from oscar_rotation.dump.layout import chunk_name, layer_folder, output_reader_name, sink_logits_name
from oscar_rotation.errors import DumpError


class DumpWriter:
    """Writes one rank's share of a dump; every file appears whole or not at all.

    One writer serves all layers of a rank. With tensor parallelism each rank has its own and passes its own heads;
    ranks need not talk to each other. Typical use in a forward hook of attention::

        writer = DumpWriter(root, tp_rank=rank, tp_size=size, total_kv_heads=8)
        writer.write(layer, chunk, q, k, v, seq_lens)       # per layer, per forward pass

    and, on rank 0, ``DumpManifest(..., complete=False).write(root)`` before the first chunk and the same with
    ``complete=True`` and the token count after the last, so that an interrupted dump is recognised.

    A chunk holds *whole* sequences from position 0: the fit rebuilds causal attention inside each request, so
    a request with a cached prefix, or a later part of a chunked prefill, must not be written.

    Args:
        root: folder of the dump; made when the first chunk is written.
        tp_rank, tp_size: this rank and the number of ranks of the attention's tensor parallelism.
        total_kv_heads: kv heads of the whole model. Where tp_size exceeds it, ranks replicate kv heads as SGLang
            and Megatron lay them out (rank r holds head r * total_kv_heads // tp_size), and only the first rank
            of each head writes it.

    Raises:
        ValueError: if the numbers do not fit together.
    """

    def __init__(self, root: str | Path, *, total_kv_heads: int, tp_rank: int = 0, tp_size: int = 1) -> None:
        if total_kv_heads < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
            raise ValueError(f"total_kv_heads {total_kv_heads}, rank {tp_rank} of {tp_size}: out of range")
        if max(tp_size, total_kv_heads) % min(tp_size, total_kv_heads):
            raise ValueError(f"{total_kv_heads} kv heads and {tp_size} ranks: one must divide the other")
        self.root = Path(root)
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.kv_shards = min(tp_size, total_kv_heads)
        self.kv_heads = total_kv_heads // self.kv_shards
        replicas = tp_size // self.kv_shards
        self.kv_shard = tp_rank // replicas
        self.writes_kv = tp_rank % replicas == 0
        self.sink_layers: set[int] = set()

    def write(
        self,
        layer: int,
        chunk: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        seq_lens: torch.Tensor | Sequence[int],
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write one chunk of one layer, and with its first chunk the layer's sink logits.

        Args:
            layer: attention layer, from 0.
            chunk: number of the chunk, from 0; the same forward pass has the same number in all layers and ranks.
            q: [tokens, q_heads of this rank, head_dim], after RoPE; any device and float dtype, kept as is.
            k: [tokens, kv_heads of this rank, head_dim], after RoPE.
            v: [tokens, kv_heads of this rank, head_dim of the values].
            seq_lens: lengths of the requests, one after the other in the tokens; they sum to ``tokens``.
            sinks: [q_heads of this rank], sink logits of the layer; None for a layer without.

        Raises:
            DumpError: if the shapes do not fit together.
            OSError: if a file cannot be written.
        """
        lengths = torch.as_tensor(seq_lens).detach().to("cpu", torch.int64).flatten().clone()
        self._check(q, k, v, lengths)
        folder = layer_folder(self.root, layer)
        if sinks is not None and layer not in self.sink_layers:
            if sinks.shape != q.shape[1:2]:
                raise DumpError(f"sink logits {list(sinks.shape)} do not fit q {list(q.shape)}")
            _save(folder / sink_logits_name(self.tp_rank, self.tp_size), sinks)
            self.sink_layers.add(layer)
        _save(folder / "q" / chunk_name(chunk, self.tp_rank, self.tp_size), q)
        if self.writes_kv:
            name = chunk_name(chunk, self.kv_shard, self.kv_shards)
            _save(folder / "k" / name, k)
            _save(folder / "v" / name, v)
        if self.tp_rank == 0:
            _save(folder / "seq_lens" / chunk_name(chunk), lengths)

    def write_output_reader(self, layer: int, reader: torch.Tensor) -> None:
        """Write what reads the attention outputs of a layer.

        Args:
            layer: attention layer, from 0.
            reader: float32 [q_heads of this rank, d, d], d channels of a head of the values.

        Raises:
            OSError: the file cannot be written.
        """
        _save(layer_folder(self.root, layer) / output_reader_name(self.tp_rank, self.tp_size), reader)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> None:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        if not q.ndim == k.ndim == v.ndim == 3:
            raise DumpError(f"a dump takes [tokens, heads, head_dim] tensors, got {shapes}")
        alike = k.shape[:2] == v.shape[:2] and q.shape[::2] == k.shape[::2]
        if not alike or q.shape[1] % k.shape[1]:
            raise DumpError(f"dumped tensors do not fit together: {shapes}")
        if k.shape[1] != self.kv_heads:
            raise DumpError(f"this rank should hold {self.kv_heads} kv heads, got {shapes}")
        if lengths.numel() == 0 or int(lengths.min()) < 1 or int(lengths.sum()) != q.shape[0]:
            raise DumpError(f"seq_lens {lengths.tolist()[:8]} do not add up to {q.shape[0]} tokens")


def _save(path: Path, tensor: torch.Tensor) -> None:
    # clone: a view, say of a fused qkv projection, would drag its whole storage into the file.
    content = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    write_atomically(path, lambda temporary: torch.save(content, temporary))
