"""What the decode kernel, and with it the store kernel, is compiled for, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from oscar_kernels.cache import Windows
from oscar_kernels.cuda.books import book_bytes
from oscar_kernels.layout import AFFINE, CODEBOOK, SYMMETRIC, RowLayout

MAX_BATCH = 1024
"""Requests of a batch at most: their plan lies in shared memory."""
PLAN_BYTES = 10 * MAX_BATCH + 4 * 20
TILE = 32
MOST_COLUMNS = 16
"""Query heads that read a kv head together at most, but for those of :attr:`Variant.warpgroups`."""
PRODUCT_COLUMNS = 32
"""The same of these."""
SHARED_LIMIT = 227 * 1024
ENOUGH_BYTES = 112 * 1024
"""Of stages, unless there would be fewer than three; see ``src/config.cuh``."""

CODINGS = (AFFINE, SYMMETRIC, CODEBOOK)
"""In the order of ``src/config.cuh``."""


@dataclass(frozen=True)
class Variant:
    """Compile-time constants of one decode kernel; ``src/config.cuh`` derives the rest.

    Args:
        key, value: row geometry of keys and values; they have the same heads.
        windows: sizes of the 16-bit windows.
        gqa: query heads per kv head.
        page_size: tokens of a page.
        q_dtype: dtype of queries and outputs, bfloat16 or float16.
        window_dtype: dtype of sink store and ring, bfloat16 or float16.
        lse: log-sum-exps are written, too.
        drafts: new tokens of a request in verification; 0 for decode.
        queries: of them that are worked on at once; 1 for decode.
        reading_terms: of the matrix that outputs are multiplied by; 0 where they are not.
        reading_sets: such matrices, one or one per kv head.
        shared_book: keys have a codebook that all kv heads and groups share.
        warpgroups: four warps multiply side by side, by ``src/verify.cu``, where more query heads than
            :data:`MOST_COLUMNS` read a kv head together.
    """

    key: RowLayout
    value: RowLayout
    windows: Windows
    gqa: int
    page_size: int
    q_dtype: torch.dtype
    window_dtype: torch.dtype
    lse: bool = False
    drafts: int = 0
    queries: int = 1
    reading_terms: int = 0
    reading_sets: int = 1
    shared_book: bool = False
    warpgroups: bool = False

    @property
    def source(self) -> str:
        """File in ``src``."""
        return "verify.cu" if self.warpgroups else "decode.cu"

    @property
    def function(self) -> str:
        """Name of the kernel in it."""
        return "oscar_verify" if self.warpgroups else "oscar_decode"

    @property
    def exact(self) -> bool:
        """Whether a side is left exact: the kernels read and write codes only."""
        return self.key.exact or self.value.exact

    def unsupported_rows(self) -> str | None:
        """What no kernel reads or writes of these rows, or None."""
        if self.exact:
            return "keys or values of 16 bits"
        if self.key.head_dim != self.value.head_dim:
            return "heads of keys and values that differ in size"
        if self.key.scale_dtype != self.value.scale_dtype:
            return "keys and values with scales of different dtypes"
        return None

    @property
    def columns(self) -> int:
        """Query heads that read a kv head together."""
        return self.gqa * self.queries

    @property
    def passes(self) -> int:
        """Passes over a request."""
        return -(-self.drafts // self.queries) if self.drafts else 1

    @property
    def kv_heads(self) -> int:
        """kv heads of this rank."""
        return self.key.kv_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.key.head_dim

    @cached_property
    def math_warps(self) -> int:
        """Warps of a block at most: fewer where outputs need many registers, or what warps exchange much memory."""
        most = 16 if self.head_dim * -(-self.columns // 8) <= 128 else 8
        fitting = [warps for warps in (16, 8, 4, 2, 1) if warps <= most and self._stages(warps) >= 2]
        return fitting[0] if fitting else most

    def unsupported(self) -> str | None:
        """Why this variant cannot be compiled, or None."""
        page, dtypes, most = self.page_size, {self.q_dtype, self.window_dtype}, MOST_COLUMNS
        if self.warpgroups and not self.fits_warpgroups():
            return "these heads and rows with products of four warps"
        if self.warpgroups:
            most = PRODUCT_COLUMNS
        if (rows := self.unsupported_rows()) is not None:
            return rows
        reasons = (
            (self.columns > most, f"{self.columns} query heads per kv head ({most} at most)"),
            (
                self.kv_heads > self.math_warps,
                f"{self.kv_heads} kv heads on one GPU ({self.math_warps} at most for these heads)",
            ),
            (page % TILE > 0, f"page size {page} (a multiple of {TILE} is needed)"),
            (
                bool(dtypes - {torch.bfloat16, torch.float16}),
                f"queries of {self.q_dtype} with windows of {self.window_dtype}",
            ),
            (
                self._stages(self.math_warps) < 2,
                "codebooks of " * (self.key.coding == CODEBOOK)
                + f"{self.kv_heads} kv heads of {self.head_dim} with {self.columns} query heads each",
            ),
        )
        return next((reason for holds, reason in reasons if holds), None)

    def fits_warpgroups(self) -> bool:
        """Whether ``src/verify.cu`` reads such rows: what it was measured for."""
        key, value = self.key, self.value
        return (
            self.head_dim == value.head_dim == 256 and self.kv_heads == 2 and key.bits in (2, 3) and value.bits == 2
            and self.q_dtype == self.window_dtype
            and all(x.coding == AFFINE and x.groups == 2 and x.scale_dtype.itemsize == 2 for x in (key, value))
        )  # fmt: skip

    def _warps_per_head(self, math_warps: int) -> int:
        """Warps that share a kv head: a power of two."""
        return 1 << max(math_warps // self.kv_heads, 1).bit_length() - 1

    @property
    def warps(self) -> int:
        """Warps of a block that calculate: as many for every kv head."""
        return self.kv_heads * self._warps_per_head(self.math_warps)

    @property
    def threads(self) -> int:
        """Threads of a block: those warps and one that issues copies, with companions where registers move."""
        return (self.warps + (4 if self.warps in (8, 16) else 1)) * 32

    @property
    def spill_floats(self) -> int:
        """float32 words of a block in the workspace, for sums of long segments (``values_float.cuh``)."""
        if self.columns <= 4:
            return 0
        if self.warpgroups:
            return (4 * PRODUCT_COLUMNS // 2 + PRODUCT_COLUMNS // 4 + 1) * 32 * self.warps
        words = -(-self.columns // 8) * (self.head_dim // 16) * 4 + -(-self.columns // 4) + 1
        return words * 32 * self.warps

    def _fixed_bytes(self, math_warps: int) -> int:
        if self.warpgroups:
            team = 7 * 128 + PRODUCT_COLUMNS * 2 * (
                self.head_dim + 2 * self.value.groups * self._stage_tokens(math_warps)
            )
            queries = self.kv_heads * self.columns * self.head_dim * 2 + PRODUCT_COLUMNS * 8
            return _round_up(self.kv_heads * team + queries + PLAN_BYTES + 18 * 16, 128)
        blocks = -(-self.columns // 4)
        exchanged = 1 if self.key.coding == CODEBOOK and not self.shared_book else 4
        exchange = self.kv_heads * (self._warps_per_head(math_warps) // 2) * exchanged * (self.head_dim + 4) * 4
        queries = 2 * (self.kv_heads * self.columns * self.head_dim * 2 + (16 * 8 if self.drafts else 0))
        digits = self.kv_heads * blocks * self.head_dim * 8 if self.head_dim * self.columns > 2048 else 0
        fixed = _round_up(exchange, 128) + queries + digits + PLAN_BYTES + 18 * 16
        if self.key.coding != CODEBOOK:
            return _round_up(fixed, 128)
        return _round_up(fixed + 16, 128) + _round_up(book_bytes(self.kv_heads, self.head_dim, self.shared_book), 128)

    def _stage_tokens(self, math_warps: int) -> int:
        return (TILE // 2 if self.warpgroups else TILE) * self._warps_per_head(math_warps)

    def _stage_bytes(self, math_warps: int) -> int:
        tokens = self._stage_tokens(math_warps)
        return sum(_round_up(tokens * side.row_bytes, 128) for side in (self.key, self.value))

    def _stages(self, math_warps: int) -> int:
        size = self._stage_bytes(math_warps)
        return min((SHARED_LIMIT - self._fixed_bytes(math_warps)) // size, max(ENOUGH_BYTES // size, 3), 16)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; the kernel checks that it comes to the same number."""
        warps = self.math_warps
        return self._fixed_bytes(warps) + self._stages(warps) * self._stage_bytes(warps)

    def defines(self) -> tuple[tuple[str, int], ...]:
        """The macros that ``src`` is compiled with."""
        layout, windows = self.key, self.windows
        values = {
            "KV_HEADS": layout.kv_heads,
            "GQA": self.gqa,
            "HEAD_DIM": layout.head_dim,
            "K_CODING": CODINGS.index(self.key.coding),
            "V_CODING": CODINGS.index(self.value.coding),
            "K_BITS": self.key.bits,
            "V_BITS": self.value.bits,
            "K_GROUP": self.head_dim // max(self.key.groups, 1),
            "V_GROUP": self.value.group_size,
            "SCALE_BYTES": layout.scale_dtype.itemsize,
            "SCALE_BF16": layout.scale_dtype == torch.bfloat16,
            "Q_BF16": self.q_dtype == torch.bfloat16,
            "WINDOW_BF16": self.window_dtype == torch.bfloat16,
            "PAGE": self.page_size,
            "SINK": windows.sink,
            "RECENT": windows.recent,
            "RING": windows.ring,
            "LSE": self.lse,
            "DRAFTS": self.drafts,
            "QUERIES": self.queries,
            "READING_TERMS": self.reading_terms,
            "READING_SETS": self.reading_sets,
            "SHARED_BOOK": self.shared_book,
            "WARPGROUPS": self.warpgroups,
            "MATH_WARPS": self.math_warps,
            "THREADS": self.threads,
            "SHARED_BYTES": self.shared_bytes,
            "SPILL_FLOATS": self.spill_floats,
        }
        return tuple(sorted((f"OSCAR_{name}", int(value)) for name, value in values.items()))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
