"""Store and attention on a GPU (:mod:`sglang_oscar.attention.kernels`): CUDA, Triton, and stock kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from oscar_kernels.cache import Chunks, Copies, LayerCache, StoreSlots
from oscar_kernels.cuda import prefix as cuda_prefix
from oscar_kernels.cuda import prompt as cuda_prompt
from oscar_kernels.cuda import store as cuda_store
from oscar_kernels.cuda.books import arranged_book, has_shared_book, searched_points
from oscar_kernels.errors import KernelError
from oscar_kernels.extend_plan import ExtendPlan
from oscar_kernels.format import LayerFormat
from oscar_kernels.parts import Part, attend_parts, join_heads, split_heads
from oscar_kernels.prepared import PreparedLayer, SplitMatrix, prepare
from oscar_kernels.ragged_extend import RaggedExtend
from oscar_kernels.triton.ahead import compiling
from oscar_kernels.triton.extend import extend_parts
from oscar_kernels.triton.finite import make_values_finite_
from oscar_kernels.triton.rotate import rotate
from oscar_kernels.triton.sink_logits import scale_by_sinks_
from sglang_oscar.attention import decode_choice, warm_up
from sglang_oscar.attention.batch import Batch
from sglang_oscar.attention.call import Call
from sglang_oscar.attention.extend_choice import ragged_extend, why_not_flash
from sglang_oscar.attention.extend_workspace import FLASH_ATTENTION, ExtendWorkspace
from sglang_oscar.attention.prefix_copies import PrefixCopies
from sglang_oscar.attention.prompt_store import PromptStore
from sglang_oscar.errors import Int2Error
from sglang_oscar.memory.cache import Int2Cache
from sglang_oscar.memory.layer import AnyLayer, CachedLayer, parts_of

logger = logging.getLogger(__name__)

MOST_CUDA_TOKENS = 128
"""Larger decode batches are stored as prompts are, by a kernel that reads rotations less often."""
MOST_CUDA_TOKENS_OF_BOOKS = 512
"""As many where keys are points of one codebook a layer: there it is the Triton kernel, 2.6 times as long at 512."""


def most_cuda_tokens(cache: LayerCache) -> int:
    """Tokens of a step up to which the CUDA kernel stores them, where a server has it."""
    return MOST_CUDA_TOKENS_OF_BOOKS if has_shared_book(cache) else MOST_CUDA_TOKENS


class GpuKernels:
    """Args:
    cache: of the pool that is attended to.
    dtype: dtype of queries, keys and values, bfloat16 or float16.
    device: the GPU.
    q_heads: query heads on this rank.
    drafts: new tokens of a request that are verified at once; 0 without speculation.
    max_batch: requests of a step at most.
    sink_logits: whether layers come with them.
    steps: requests of the steps of decode or verification that SGLang captures.

    Raises:
        Int2Error: kernels that are asked for cannot be built, or cannot do this.
    """

    def __init__(
        self,
        cache: Int2Cache,
        dtype: torch.dtype,
        device: torch.device,
        q_heads: int,
        drafts: int,
        max_batch: int,
        sink_logits: bool,
        steps: Sequence[int],
    ) -> None:
        self._dtype = dtype
        parts = parts_of(cache.layers.values())
        self._prepared = {id(part): prepare(part.format, dtype) for part in parts}
        cache.derived.append(self._made_of)
        found = (prepared.value.reading for prepared in self._prepared.values())
        readings = list({reading and (reading.count, reading.sets): reading for reading in found}.values())
        self._page_size = cache.page_size
        # Kernels are compiled for every kind of rows.
        caches = list({(part.cache.k_layout, part.cache.v_layout): part.cache for part in parts}.values())
        plan, workspace = cache.plan, cache.plan.part(ExtendWorkspace)
        task = decode_choice.DecodeTask(
            cache.settings.decode_backend, caches, cache.page_size, q_heads, dtype, short_chunks=workspace is not None,
            drafts=drafts, sink_logits=sink_logits, readings=readings, kv_heads=plan.geometry.any_layer.kv_heads,
            pairs=self._pairs(cache.layers.values()),
        )  # fmt: skip
        self._decode = decode_choice.choose(task, max_batch)
        if drafts:
            decode_choice.prepare_verify(self._decode, task, max_batch)
        self._prompts, copies = PromptStore(self._prepared, cache.page_size), PrefixCopies()
        cuda = isinstance(self._decode, decode_choice.CudaDecode)
        self._arranged = self._build_cuda(task, parts, None if workspace is None else copies) if cuda else {}
        self._ragged: RaggedExtend | None = None
        dims = (plan.geometry.any_layer.head_dim, plan.geometry.any_layer.value_head_dim)
        reason = why_not_flash(cache.settings.extend_backend, dims, sink_logits)
        against = f" (not FlashAttention: {reason})"
        if workspace is None:
            logger.info("int2 extend: Triton kernel for chunk and prefix%s", against)
        else:
            self._ragged = ragged_extend(workspace, plan.geometry, device, self._decode, copies)
            logger.info(
                "int2 extend: %s for chunk and dequantized prefix, decode kernel for that of short chunks%s",
                workspace.kernel,
                "" if workspace.backend in FLASH_ATTENTION else against,
            )
        limits = None if self._ragged is None else self._ragged.planner.limits
        longest = cache.req_to_token_pool.req_to_token.shape[1]
        hits = warm_up.PrefixHits(cache.page_size, limits, max_batch, longest)
        kinds = {tuple((x.cache.k_layout, x.cache.v_layout) for x in of.parts): of for of in cache.layers.values()}
        dummies = warm_up.Dummies(self, list(kinds.values()), cache.page_size, q_heads, dtype, sink_logits)
        # In a server whose layers are of several kinds, a compiler at a time takes minutes.
        with compiling():
            warm_up.chunks_behind_prefixes(dummies, hits)
            warm_up.logits(dtype, device)
            warm_up.captured(dummies, {min(step, max_batch) for step in steps}, drafts)
        warm_up.chunks_behind_prefixes(dummies, hits)
        warm_up.logits(dtype, device)

    def _build_cuda(
        self, task: decode_choice.DecodeTask, parts: Sequence[CachedLayer], copies: PrefixCopies | None
    ) -> dict[int, PreparedLayer]:
        """Compile and load the CUDA kernels of stores and, with ``copies``, of prefixes.

        Returns:
            layers as the store of a step takes them, by their ``id``.

        Raises:
            Int2Error: a kernel cannot be built or loaded.
        """
        coded = [part for part in parts if not part.cache.exact]
        arranged = {id(layer): cuda_store.arrange(self._prepared[id(layer)]) for layer in coded}
        for layer in coded:
            if layer.cache.k_codebook is not None:  # made before steps are captured
                arranged_book(layer.cache.k_codebook)
                searched_points(layer.cache.k_codebook)
        page, heads = task.page_size, [task.heads(layer.cache) for layer in coded]
        steps = (cuda_store.variant_of(x.cache, of, page, self._dtype) for x, of in zip(coded, heads, strict=True))
        prompts = self._prompts.arrange(zip(coded, heads, strict=True), self._dtype)
        prefixes = [] if copies is None else copies.arrange(task.caches, page, self._dtype)
        try:
            others = [*map(cuda_prompt.job, prompts), *map(cuda_prefix.job, prefixes)]
            cuda_store.build(zip(steps, arranged.values(), strict=True), others)
            for kind in prompts:
                cuda_prompt.prepare(kind)
            for variant in prefixes:
                cuda_prefix.prepare(variant)
        except KernelError as error:
            raise Int2Error(f"{error}; or set {decode_choice.VARIABLE}=triton") from error
        return arranged

    def _made_of(self, layer: CachedLayer, new: LayerFormat) -> Iterator[tuple[Any, Any]]:
        """What kernels read of a layer, beside what they would read of a new format; see :attr:`Int2Cache.derived`."""
        prepared = prepare(new, self._dtype)
        yield self._prepared[id(layer)], prepared
        if id(layer) in self._arranged:
            yield self._arranged[id(layer)], cuda_store.arrange(prepared)
        yield from self._prompts.made_of(layer, prepared)
        old, book = layer.cache.k_codebook, new.key.codebook
        if old is not None and book is not None:
            yield arranged_book(old), arranged_book(book)
            yield searched_points(old), searched_points(book)

    def _pairs(self, layers: Iterable[AnyLayer]) -> list[list[tuple[LayerCache, SplitMatrix | None]]]:
        """See :class:`sglang_oscar.attention.decode_choice.DecodeTask`."""
        kinds = {}
        for layer in layers:
            caches = [part.cache for part in layer.parts]
            if len(caches) == 2 and not any(cache.exact for cache in caches):
                readings = [self._prepared[id(part)].value.reading for part in layer.parts]
                own = list(zip(caches, readings, strict=True))
                kind = [(x.k_layout, x.v_layout, has_shared_book(x), of and (of.count, of.sets)) for x, of in own]
                kinds[tuple(kind)] = own
        return list(kinds.values())

    def decode(self, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        return self._step(layer, batch, call, None)

    def verify(self, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        assert batch.visible is not None
        return self._step(layer, batch, call, batch.visible)

    def _step(self, layer: AnyLayer, batch: Batch, call: Call, visible: torch.Tensor | None) -> torch.Tensor:
        """Store new tokens of all parts, then attend."""
        calls = list(call.apart(layer))
        parts = [
            Part(part.cache, self._store(part, batch, own), own.sums(), self._reading(part)) for part, own in calls
        ]
        out = self._decode.attend(parts, batch.tables, visible, call.sm_scale)
        # A factor of a whole head, so it may come after the product.
        outs = split_heads(out, [part.cache for part in parts])
        for (part, own), its, to in zip(calls, parts, outs, strict=True):
            own.with_sinks(to, its.lse, part.format.key.transform.plain_center, scale_by_sinks_)  # in place
        return out

    def _reading(self, layer: CachedLayer) -> SplitMatrix | None:
        """What outputs of decode and verification are multiplied by, in the order that the layer's kernel reads."""
        return self._arranged.get(id(layer), self._prepared[id(layer)]).value.reading

    def _store(self, layer: CachedLayer, batch: Batch, call: Call) -> torch.Tensor:
        """Store new tokens of a step; returns the rotated queries."""
        rotated: torch.Tensor | None
        arranged = self._arranged.get(id(layer))
        if arranged is None or len(call.q) > most_cuda_tokens(layer.cache):
            rotated = self._prompts(layer, batch.slots, call.k, call.v, call.q)
        else:
            vectors = layer.cache, batch.slots, call.k, call.v
            rotated = cuda_store.store(*vectors, arranged, call.q, self._page_size, decoding=True)
        assert rotated is not None
        return rotated

    def plan_extend(self, batch: Batch) -> ExtendPlan | None:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        if self._ragged is None:
            return None
        assert batch.prefix_lens is not None
        assert batch.extend_lens is not None
        return self._ragged.planner.plan(batch.tables, batch.prefix_lens, batch.extend_lens)

    def extend(self, layer: AnyLayer, batch: Batch, call: Call) -> torch.Tensor:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        plan = batch.extend_plan
        lse = call.sums()
        make_values_finite_(call.k, call.v)
        joined = plan is not None and plan.joined is not None
        out = self._extend_joined(layer, batch, call, lse) if joined else self._extend_apart(layer, batch, call, lse)
        # Without a prefix nothing is attended to that is in the basis of the cache.
        if plan is not None and not plan.has_prefix:
            return call.with_sinks(out, lse, None, scale_by_sinks_)
        # Keys of the chunk are centered where cached ones are attended to, too.
        out = call.with_sinks(out, lse, _plain_center(layer), scale_by_sinks_)
        return self._rotate(layer, out, lambda prepared: prepared.value.reading)

    def _extend_joined(self, layer: AnyLayer, batch: Batch, call: Call, lse: torch.Tensor | None) -> torch.Tensor:
        """Attend to prefixes and chunks at once, each as the store leaves it before its codes."""
        assert self._ragged is not None
        assert batch.extend_plan is not None
        assert batch.extend_plan.joined is not None
        # The store may overwrite what the rings hold of the prefixes.
        caches = [part.cache for part in layer.parts]
        copies = self._ragged.load_joined(batch.extend_plan.joined, caches, batch.tables)
        keys, values = split_heads(copies.k, caches), split_heads(copies.v, caches)
        rotated = []
        for (part, own), k, v in zip(call.apart(layer), keys, values, strict=True):
            to = Copies(k, v, copies.rows)
            queries = self._prompts(part, batch.slots, own.k, own.v, own.q, to)
            assert queries is not None
            rotated.append(queries)
        return self._ragged.run_joined(copies, join_heads(rotated), call.sm_scale, lse)

    def _extend_apart(self, layer: AnyLayer, batch: Batch, call: Call, lse: torch.Tensor | None) -> torch.Tensor:
        """Attend to chunks as they are and to prefixes, and store the chunks."""
        plan, starts = batch.extend_plan, batch.chunk_starts
        caches, tables, sm_scale = [part.cache for part in layer.parts], batch.tables, call.sm_scale
        assert starts is not None
        # Without a prefix values need no rotation, keys need not be centered.
        cached = plan is None or plan.has_prefix
        values = self._rotate(layer, call.v, lambda prepared: prepared.value.matrix) if cached else call.v
        rotated = self._rotate(layer, call.q, lambda prepared: prepared.key.reading) if cached else None
        chunk, center = call.k, _plain_center(layer)
        if cached and center is not None:
            chunk = (call.k - center).to(call.k.dtype)
        chunks = Chunks(call.q, chunk, values, starts)
        if plan is None:
            assert rotated is not None
            out = extend_parts(caches, tables, chunks, rotated, sm_scale, lse)
        else:
            assert self._ragged is not None
            out = self._ragged.run(plan, caches, tables, chunks, rotated, sm_scale, lse)
        for part, its in call.apart(layer):
            self._prompts(part, batch.slots, its.k, its.v)
        if plan is not None and plan.decoding is not None:
            assert rotated is not None
            own, later = plan.decoding.tokens, plan.decoding.tables
            own_lse = None if lse is None else lse.new_empty(len(own), lse.shape[1])

            def decode(part: int, q: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
                return self._decode(caches[part], later, q, sm_scale, lse=sums)

            out[own] = attend_parts(caches, decode, rotated[own], own_lse)
            if lse is not None and own_lse is not None:
                lse[own] = own_lse
        return out

    def store(self, layer: CachedLayer, slots: StoreSlots, k: torch.Tensor, v: torch.Tensor) -> None:
        """See :class:`sglang_oscar.attention.kernels.Kernels`."""
        self._prompts(layer, slots, k, v)

    def _rotate(
        self, layer: AnyLayer, x: torch.Tensor, by: Callable[[PreparedLayer], SplitMatrix | None]
    ) -> torch.Tensor:
        """Vectors of all heads, [tokens, heads, head_dim], times a matrix that each part of the layer has."""
        parts, matrices = layer.parts, [by(self._prepared[id(part)]) for part in layer.parts]
        apart = zip(split_heads(x, [part.cache for part in parts]), matrices, strict=True)
        return join_heads(own if matrix is None else rotate(own, matrix) for own, matrix in apart)


def _plain_center(layer: AnyLayer) -> torch.Tensor | None:
    """Of the keys of all heads, [kv_heads, head_dim]; None where they are not centered."""
    centers = [part.format.key.transform.plain_center for part in layer.parts]
    found = [center for center in centers if center is not None]
    return torch.cat(found) if len(found) > 1 else centers[0]
