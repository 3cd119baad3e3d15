"""Reading and validating a dump."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from oscar_rotation.dump.layout import (
    CHUNK_PATTERN,
    KINDS,
    LAYER_PATTERN,
    TENSOR_KINDS,
    WARMUP_CHUNK,
    chunk_name,
    layer_folder,
    output_reader_name,
    sink_logits_name,
)
from oscar_rotation.dump.manifest import MANIFEST_NAME, DumpManifest
from oscar_rotation.errors import DumpError
from oscar_rotation.math.finite import all_finite


@dataclass(frozen=True)
class DumpChunk:
    """One chunk of one layer, heads of all ranks gathered.

    Attributes:
        q: [tokens, q_heads, head_dim], after RoPE, in the dtype of the dump, on the CPU.
        k: [tokens, kv_heads, head_dim], after RoPE.
        v: [tokens, kv_heads, head_dim of the values].
        seq_lens: request lengths; they sum to tokens.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_lens: tuple[int, ...]

    def to(self, device: torch.device) -> DumpChunk:
        """The chunk with its activations on a device; from pinned memory the copy is asynchronous."""
        q, k, v = (x.to(device, non_blocking=x.is_pinned()) for x in (self.q, self.k, self.v))
        return DumpChunk(q, k, v, self.seq_lens)

    def pinned(self) -> DumpChunk:
        """The chunk in memory that a GPU can copy from by itself."""
        return DumpChunk(self.q.pin_memory(), self.k.pin_memory(), self.v.pin_memory(), self.seq_lens)

    def split(self, requests: int) -> tuple[DumpChunk, DumpChunk]:
        """The first ``requests`` requests and the others, as views."""
        tokens = sum(self.seq_lens[:requests])
        head = DumpChunk(self.q[:tokens], self.k[:tokens], self.v[:tokens], self.seq_lens[:requests])
        return head, DumpChunk(self.q[tokens:], self.k[tokens:], self.v[tokens:], self.seq_lens[requests:])


class DumpReader:
    """A dump whose files are all there; their contents are checked as they are loaded.

    Args:
        root: folder of the dump.
        allow_incomplete: use the chunks that every layer has in full instead of refusing a dump that was
            interrupted.

    Attributes:
        manifest: content of manifest.json, or None.
        num_layers: layers 0 .. num_layers - 1.
        chunks: chunk numbers, ascending.

    Raises:
        DumpError: no such folder, no layers, a gap in the layers, a file missing for one of q, k, v, seq_lens, a
            shard missing, an unexpected file, or an interrupted dump.
    """

    def __init__(self, root: str | Path, *, allow_incomplete: bool = False) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            fault = "is not a folder" if self.root.exists() else "no such folder"
            raise DumpError(f"{self.root}: {fault}; name the folder that holds layer_0, layer_1, ...")
        self.manifest = DumpManifest.read(self.root)
        if self.manifest is not None and not self.manifest.complete and not allow_incomplete:
            raise DumpError(
                f"{self.root / MANIFEST_NAME}: the dump was interrupted (complete is false); "
                "dump again, or allow incomplete dumps to use its whole chunks"
            )
        self.num_layers = self._count_layers()
        self._shards: dict[tuple[int, str], dict[int, int]] = {}
        for layer in range(self.num_layers):
            for kind in KINDS:
                self._shards[layer, kind] = self._scan(layer, kind, allow_incomplete)
        self.chunks = self._common_chunks(allow_incomplete)
        self._geometry: tuple[int, int, int, int] | None = None
        if self.manifest is not None:
            stated = self.manifest
            self._geometry = (stated.q_heads, stated.kv_heads, stated.head_dim, stated.value_channels)

    def fit_chunks(self, include_warmup: bool = False) -> list[int]:
        """Chunks to fit on: all but chunk 0, the warm-up request, unless ``include_warmup``.

        Raises:
            DumpError: if none is left.
        """
        chosen = [chunk for chunk in self.chunks if include_warmup or chunk != WARMUP_CHUNK]
        if not chosen:
            raise DumpError(
                f"{self.root}: holds only chunk {WARMUP_CHUNK}, the warm-up request, which a fit leaves out; "
                "dump more requests, or include the warm-up chunk"
            )
        return chosen

    def load(self, layer: int, chunk: int, *, check_values: bool = True) -> DumpChunk:
        """Load and check one chunk of one layer.

        Args:
            layer, chunk: which one.
            check_values: False leaves out the look for NaN and infinite values, for callers that look themselves.

        Raises:
            DumpError: a truncated or unreadable file, a wrong shape or dtype, token counts that disagree, NaN or
                infinite values, or heads that differ from the manifest or from other chunks.
        """
        gathered = {kind: self._gather(layer, kind, chunk, check_values) for kind in TENSOR_KINDS}
        q, k, v = (gathered[kind] for kind in TENSOR_KINDS)
        path = {kind: self._path(layer, kind, chunk) for kind in KINDS}
        for kind, other in (("k", k), ("v", v)):
            if other.shape[0] != q.shape[0]:
                raise DumpError(f"{path[kind]}: holds {other.shape[0]} tokens, {path['q']} holds {q.shape[0]}")
        if v.shape[:2] != k.shape[:2]:
            raise DumpError(f"{path['v']}: shape {list(v.shape)} differs from {path['k']}: {list(k.shape)}")
        if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            raise DumpError(f"{path['q']}: shape {list(q.shape)} does not fit {path['k']}: {list(k.shape)}")
        geometry = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        if self._geometry is None:
            self._geometry = geometry
        if geometry != self._geometry:
            raise DumpError(
                f"{path['q']}: q heads, kv heads, head_dim of keys and of values are {geometry}, "
                f"{'manifest.json says' if self.manifest else 'elsewhere in the dump they are'} {self._geometry}"
            )
        return DumpChunk(q, k, v, self._lengths(path["seq_lens"], q.shape[0]))

    def seq_lens(self, layer: int, chunk: int) -> tuple[int, ...]:
        """Request lengths of one chunk, without loading its activations.

        Raises:
            DumpError: a file that is not a list of lengths.
        """
        return self._lengths(self._path(layer, "seq_lens", chunk))

    def sink_logits(self, layer: int) -> torch.Tensor | None:
        """Sink logits of a layer, heads of all ranks gathered: float32 [q_heads]; None where it has none.

        Raises:
            DumpError: the manifest says that it has some and a file is missing; an unreadable file; other heads than
                the dump's queries; NaN or infinite values.
        """
        shards = self._shards[layer, "q"][self.chunks[0]]
        paths = [layer_folder(self.root, layer) / sink_logits_name(shard, shards) for shard in range(shards)]
        stated = self.manifest is not None and layer in self.manifest.sink_logits
        if not stated and not any(path.exists() for path in paths):
            return None
        parts = []
        for path in paths:
            if not path.exists():
                raise DumpError(f"{path}: missing, the layer has sink logits; dump again")
            part = _load_tensor(path)
            if part.ndim != 1 or not part.is_floating_point():
                raise DumpError(f"{path}: {part.dtype} {list(part.shape)}, expected floating-point [q_heads]")
            if not bool(part.isfinite().all()):
                raise DumpError(f"{path}: holds NaN or infinite values; dump again")
            parts.append(part.float())
        gathered = torch.cat(parts)
        heads = self._geometry[0] if self._geometry else self.load(layer, self.chunks[0]).q.shape[1]
        if len(gathered) != heads:
            raise DumpError(f"{paths[0]}: sink logits of {len(gathered)} heads, the dump has {heads} q heads")
        return gathered

    @property
    def has_output_readers(self) -> bool:
        """Whether the dump says what reads attention outputs."""
        return self.manifest is not None and self.manifest.output_readers

    def output_reader(self, layer: int) -> torch.Tensor:
        """W^T W of a layer's output projection by kv head, summed over the query heads of its group; only of a dump
        that has it: float32 [kv_heads, d, d], d channels of a head of the values.

        Raises:
            DumpError: a file is missing or unreadable, of other heads than the dump, or holds NaN or infinite values.
        """
        assert self._geometry is not None
        q_heads, kv_heads, _, head_dim = self._geometry
        shards = self._shards[layer, "q"][self.chunks[0]]
        paths = [layer_folder(self.root, layer) / output_reader_name(shard, shards) for shard in range(shards)]
        reader = torch.cat([_load_tensor(path) for path in paths])
        if reader.shape != (q_heads, head_dim, head_dim) or not all_finite(reader):
            raise DumpError(
                f"{paths[0]}: {list(reader.shape)}, expected finite [{q_heads}, {head_dim}, {head_dim}]; dump again"
            )
        return reader.float().view(kv_heads, -1, head_dim, head_dim).sum(1)

    def _count_layers(self) -> int:
        found: dict[int, Path] = {}
        for folder in sorted(self.root.iterdir()):
            match = LAYER_PATTERN.fullmatch(folder.name)
            if match and folder == layer_folder(self.root, int(match[1])):
                found[int(match[1])] = folder
        if not found:
            raise DumpError(f"{self.root}: holds no layer_<id> folder; is this a dump?")
        count = self.manifest.num_layers if self.manifest else max(found) + 1
        for layer in range(max(count, max(found) + 1)):
            if layer not in found:
                raise DumpError(f"{layer_folder(self.root, layer)}: missing, the dump has a gap; dump again")
            if layer >= count:
                raise DumpError(f"{found[layer]}: unexpected, {MANIFEST_NAME} says {count} layers")
        return count

    def _scan(self, layer: int, kind: str, allow_incomplete: bool) -> dict[int, int]:
        """Chunk number -> number of shards, for the chunks whose shards are all there."""
        folder = layer_folder(self.root, layer) / kind
        if not folder.is_dir():
            raise DumpError(f"{folder}: missing; dump again")
        found: dict[tuple[int, int], set[int]] = {}
        for path in sorted(folder.iterdir()):
            match = CHUNK_PATTERN.fullmatch(path.name)
            shard, count = (int(match[2] or 0), int(match[3] or 1)) if match else (0, 0)
            if match is None or path.name != chunk_name(int(match[1]), shard, count) or shard >= count:
                if path.suffix == ".pt" and not path.name.startswith("."):
                    expected = f"{chunk_name(1)} or {chunk_name(1, 0, 2)}"
                    raise DumpError(f"{path}: unexpected name, a chunk is called like {expected}")
                continue
            found.setdefault((int(match[1]), count), set()).add(shard)
        shards: dict[int, int] = {}
        for (chunk, count), present in found.items():
            if chunk in shards:
                raise DumpError(f"{folder / chunk_name(chunk, 0, count)}: chunk {chunk} is there in two sharded forms")
            lost = sorted(set(range(count)) - present)
            if lost and not allow_incomplete:
                raise DumpError(f"{folder / chunk_name(chunk, lost[0], count)}: missing shard; dump again")
            if not lost:
                shards[chunk] = count
        return shards

    def _common_chunks(self, allow_incomplete: bool) -> list[int]:
        everywhere = set.intersection(*(set(shards) for shards in self._shards.values()))
        anywhere = set.union(*(set(shards) for shards in self._shards.values()))
        if anywhere - everywhere and not allow_incomplete:
            chunk = min(anywhere - everywhere)
            for (layer, kind), shards in self._shards.items():
                if chunk not in shards:
                    path = layer_folder(self.root, layer) / kind / chunk_name(chunk)
                    raise DumpError(
                        f"{path}: missing, other files of chunk {chunk} are there; the dump was interrupted: "
                        "dump again, or allow incomplete dumps to use its whole chunks"
                    )
        if not everywhere:
            raise DumpError(f"{self.root}: holds no whole chunk; dump again")
        return sorted(everywhere)

    def _path(self, layer: int, kind: str, chunk: int, shard: int = 0) -> Path:
        return layer_folder(self.root, layer) / kind / chunk_name(chunk, shard, self._shards[layer, kind][chunk])

    def _gather(self, layer: int, kind: str, chunk: int, check_values: bool) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        for shard in range(self._shards[layer, kind][chunk]):
            path = self._path(layer, kind, chunk, shard)
            part = _load_tensor(path)
            if part.ndim != 3 or 0 in part.shape:
                raise DumpError(f"{path}: shape {list(part.shape)}, expected [tokens, heads, head_dim]")
            if not part.is_floating_point():
                raise DumpError(f"{path}: dtype {part.dtype}, expected a floating-point one")
            if check_values and not all_finite(part):
                raise DumpError(f"{path}: holds NaN or infinite values; dump again")
            if parts and (part.shape[0], part.shape[2]) != (parts[0].shape[0], parts[0].shape[2]):
                raise DumpError(f"{path}: shape {list(part.shape)} does not fit shard 0: {list(parts[0].shape)}")
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _lengths(self, path: Path, tokens: int | None = None) -> tuple[int, ...]:
        lengths = _load_tensor(path)
        if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool or lengths.ndim > 1:
            raise DumpError(f"{path}: {lengths.dtype} {list(lengths.shape)}, expected integers [requests]")
        values = tuple(int(length) for length in lengths.flatten().tolist())
        if min(values, default=0) < 1:
            raise DumpError(f"{path}: request lengths must be at least 1, got {list(values[:8])}")
        if tokens is not None and sum(values) != tokens:
            raise DumpError(f"{path}: request lengths sum to {sum(values)}, the chunk holds {tokens} tokens")
        return values


def _load_tensor(path: Path) -> torch.Tensor:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its zip and pickle layers do
        raise DumpError(f"{path}: not a readable tensor file, probably truncated ({type(error).__name__})") from error
    if not isinstance(content, torch.Tensor):
        raise DumpError(f"{path}: holds a {type(content).__name__}, expected a tensor")
    return content
