"""Extend with a stock 16-bit attention kernel: the chunk as it is, the cached prefix from a bounded workspace.

The chunk of every request is attended to exactly, with the model's own keys and values and a causal mask. Prefixes
are dequantized into a workspace of fixed size, in the rotated basis, and attended to with rotated queries; what does
not fit at once is done in several passes. Chunks of few tokens are not worth that: the decode kernel takes each token
as a request whose cache is the prefix. What is too much for the passes is read in place by the Triton extend kernel.
All results are merged by their log-sum-exp. Chunks of one token, which are requests that decode within a mixed batch,
are left to the caller, who stores them and decodes. A batch that fits is joined instead: prefixes and chunks lie in
one load of the workspace, where the caller's store puts the chunks.

The attention kernel is FlashInfer's ragged prefill or FlashAttention-3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from oscar_kernels.cache import BatchTables, Chunks, Copies, LayerCache
from oscar_kernels.extend_plan import Decode, ExtendPlan, Joined, Pass, Short
from oscar_kernels.parts import attend_parts, split_heads
from oscar_kernels.ragged_plan import RaggedPlanner
from oscar_kernels.spans import Spans
from oscar_kernels.triton.extend import extend_parts
from oscar_kernels.triton.merge_states import merge_states_
from oscar_kernels.triton.prefix import copy_prefixes

CopyPrefixes = Callable[[LayerCache, BatchTables, Spans, torch.Tensor, torch.Tensor], None]
"""Writes spans of cached keys and values in 16 bits; see :func:`oscar_kernels.triton.prefix.copy_prefixes`."""


class RaggedExtend:
    """Runs the extends of a model: chunks, passes of dequantized prefixes, short chunks, and their merge.

    Args:
        planner: of batches, whose plans this runs.
        decode: decode kernel for up to SHORT_BATCH requests.
        copy: turns prefixes into 16 bits.
    """

    def __init__(self, planner: RaggedPlanner, decode: Decode, copy: CopyPrefixes = copy_prefixes) -> None:
        self.planner, self._decode, self._copy = planner, decode, copy
        self._workspace = planner.new_workspace()

    def warm_up(self) -> None:
        """Plan and run a chunk of one token: whatever the attention kernel compiles or loads, it does here."""
        self.planner.plan_chunks([1])
        k, v = (torch.zeros_like(room[:1]) for room in self._workspace)
        q = k.new_zeros(1, self.planner.q_heads, k.shape[2])
        self.planner.chunk.forward_return_lse(q, k, v, causal=True, sm_scale=1.0)

    def run(
        self,
        plan: ExtendPlan,
        caches: Sequence[LayerCache],
        tables: BatchTables,
        chunks: Chunks,
        q_rot: torch.Tensor | None,
        sm_scale: float,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the planned batch in one layer, before its chunks are stored.

        Args:
            plan: of this forward pass, not joined.
            caches: the layer's, without the chunks: one, or one of every part (:mod:`oscar_kernels.parts`).
            tables: the batch.
            chunks: the new tokens; ``v`` in the model's own basis where nothing is cached.
            q_rot: their queries rotated; None only where ``plan.has_prefix`` is false.
            sm_scale: factor on the logits.
            lse: float32 [tokens, q_heads]; takes the log2 of the sum of exp2 of the logits (times log2 e). None for
                nothing.

        Returns:
            [tokens, q_heads, head_dim] in the basis of ``chunks.v``; of ``plan.decoding``, without the prefix.
        """
        assert plan.joined is None
        q, k, v = chunks.q, chunks.k, chunks.v
        if not plan.has_prefix and lse is None:
            return self.planner.chunk.forward(q, k, v, causal=True, sm_scale=sm_scale)
        out, sums = self.planner.chunk.forward_return_lse(q, k, v, causal=True, sm_scale=sm_scale)
        if plan.has_prefix:
            assert q_rot is not None
            self._add_prefixes(plan, caches, tables, out, sums, chunks, q_rot, sm_scale)
        if lse is not None:
            lse.copy_(sums)
        return out

    def load_joined(self, joined: Joined, caches: Sequence[LayerCache], tables: BatchTables) -> Copies:
        """Dequantize the prefixes of a joined batch in one layer, before its chunks are stored.

        Args:
            joined: of this forward pass's plan.
            caches, tables: as in :meth:`run`.

        Returns:
            where the store that follows is to copy the chunks to.
        """
        return Copies(*self._dequantize(joined, caches, tables), joined.chunk_rows)

    def _dequantize(
        self, load: Pass | Joined, caches: Sequence[LayerCache], tables: BatchTables
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the workspace with a load's prefixes; returns its keys and values [rows, kv_heads, head_dim]."""
        keys, values = (room[: load.rows] for room in self._workspace)
        for cache, *own in zip(caches, split_heads(keys, caches), split_heads(values, caches), strict=True):
            self._copy(cache, tables, load.spans, *own)
        return keys, values

    def run_joined(
        self, loaded: Copies, q_rot: torch.Tensor, sm_scale: float, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of a joined batch in one layer, behind the store that has copied its chunks.

        Args:
            loaded: from :meth:`load_joined`.
            q_rot, sm_scale, lse: as in :meth:`run`.

        Returns:
            [tokens, q_heads, head_dim] in the basis of the cached values.
        """
        if lse is None:
            return self.planner.chunk.forward(q_rot, loaded.k, loaded.v, causal=True, sm_scale=sm_scale)
        out, sums = self.planner.chunk.forward_return_lse(q_rot, loaded.k, loaded.v, causal=True, sm_scale=sm_scale)
        lse.copy_(sums)
        return out

    def _add_prefixes(
        self,
        plan: ExtendPlan,
        caches: Sequence[LayerCache],
        tables: BatchTables,
        out: torch.Tensor,
        lse: torch.Tensor,
        chunks: Chunks,
        q_rot: torch.Tensor,
        sm_scale: float,
    ) -> None:
        """Merge what is cached before the chunks into their attention to themselves, in place."""
        for load in plan.passes:
            keys, values = self._dequantize(load, caches, tables)
            queries = q_rot[load.tokens].repeat(load.splits, 1, 1) if load.splits > 1 else q_rot[load.tokens]
            parts = load.attention.forward_return_lse(queries, keys, values, causal=False, sm_scale=sm_scale)
            for part in zip(*(x.chunk(load.splits) for x in parts), strict=True):
                merge_states_(out[load.tokens], lse[load.tokens], *part)
        for short in plan.short:
            own, own_lse = out[short.tokens], lse[short.tokens]
            part_lse = torch.empty_like(own_lse)

            def decode(part: int, q: torch.Tensor, sums: torch.Tensor | None, short: Short = short) -> torch.Tensor:
                return self._decode(caches[part], short.tables, q, sm_scale, lse=sums)

            part_out = attend_parts(caches, decode, q_rot[short.tokens], part_lse)
            merge_states_(own, own_lse, part_out, part_lse)
            out[short.tokens], lse[short.tokens] = own, own_lse
        if plan.in_place is not None:
            part_lse = torch.empty_like(lse)
            part_out = extend_parts(caches, plan.in_place, chunks, q_rot, sm_scale, part_lse, prefix_only=True)
            merge_states_(out, lse, part_out, part_lse)
