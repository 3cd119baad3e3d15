"""Covariance targets of keys and values, accumulated chunk by chunk (paper, section 3 and appendix A.3).

Every target is a sum of x^T x over rows x, one sum per kv head, divided by the number of rows. Sums are float64;
the products inside a block of at most :data:`GRAM_ROWS` rows are float32 (float64 for float64 input), which agrees
with all-float64 arithmetic to better than 1e-5 of the largest entry. Scale does not change a rotation, only the
eigenvalues that are reported. Activations may come on any device and are processed on the accumulator's. On a GPU
the stated agreement needs TF32 off, which is PyTorch's default.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from oscar_rotation.math.attention import attention_outputs

GRAM_ROWS = 4096
"""Rows whose products are summed in the working precision before they join the float64 sum."""


class CovarianceAccumulator:
    """Base of the targets: per kv head a float64 sum of x^T x and the number of rows x.

    Args:
        kv_heads: kv heads of the layer.
        head_dim: channels per head of what is summed.
        device: where the sums live and the work is done.
    """

    def __init__(self, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.device = torch.device(device)
        self.rows = 0
        self.sums = torch.zeros(kv_heads, head_dim, head_dim, dtype=torch.float64, device=self.device)

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk of whole requests.

        Args:
            q: [tokens, q_heads, head_dim], after RoPE.
            k: [tokens, kv_heads, head_dim], after RoPE.
            v: [tokens, kv_heads, head_dim]; heads may have another size than those of ``q`` and ``k``.
            seq_lens: lengths of the requests, one after the other; they sum to tokens.
        """
        raise NotImplementedError

    def per_head(self) -> torch.Tensor:
        """float64 [kv_heads, head_dim, head_dim]: the covariance of each kv head.

        Raises:
            ValueError: if nothing was added yet.
        """
        if self.rows == 0:
            raise ValueError("no activations were added to the covariance")
        return self.sums / self.rows

    def shared(self) -> torch.Tensor:
        """float64 [head_dim, head_dim]: the mean over kv heads, for one rotation per layer."""
        return self.per_head().mean(0)

    def _heads(self) -> list[slice]:
        """Which kv heads are worked on at a time: one on a CPU, to spare memory; all on a GPU, to fill it."""
        width = 1 if self.device.type == "cpu" else self.kv_heads
        return [slice(head, head + width) for head in range(0, self.kv_heads, width)]

    def _rows(self, x: torch.Tensor, heads: slice) -> torch.Tensor:
        """Rows of some kv heads, or of their groups of query heads, in working precision: [heads, rows, head_dim]."""
        group = x.shape[1] // self.kv_heads
        rows = x[:, heads.start * group : heads.stop * group].to(self.device).unflatten(1, (-1, group)).transpose(0, 1)
        return (rows if rows.dtype == torch.float64 else rows.float()).flatten(1, 2)

    def _add(self, heads: slice, left: torch.Tensor, right: torch.Tensor | None = None) -> None:
        """sums[heads] += left^T right; [heads, rows, head_dim] each, ``right`` defaults to ``left``."""
        other = left if right is None else right
        for a, b in zip(left.split(GRAM_ROWS, 1), other.split(GRAM_ROWS, 1), strict=True):
            self.sums[heads] += (a.mT @ b).double()


class QueryCovariance(CovarianceAccumulator):
    """C_Q, target of keys ("qqt"): mean of q^T q over the tokens and query heads of a group (appendix A.4)."""

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk; see the base class."""
        for heads in self._heads():
            self._add(heads, self._rows(q, heads))
        self.rows += q.shape[0] * q.shape[1] // self.kv_heads


class KeyCovariance(CovarianceAccumulator):
    """K^T K / n ("ktk"): the keys' own second moment, which knows nothing of the queries."""

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk; see the base class."""
        for heads in self._heads():
            self._add(heads, self._rows(k, heads))
        self.rows += k.shape[0]


class ValueCovariance(CovarianceAccumulator):
    """V^T V / n ("vtv"): the values' own second moment, which knows nothing of the attention weights."""

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk; see the base class."""
        for heads in self._heads():
            self._add(heads, self._rows(v, heads))
        self.rows += v.shape[0]


class ScoreValueCovariance(CovarianceAccumulator):
    """C_S = V^T S^T S V / n, target of values ("sst"), exact (paper, section 3, equation 2).

    S is the causal softmax attention of every query head within its own request. Since C_S = (S V)^T (S V) / n,
    it is the second moment of the attention outputs, mean over tokens and the query heads of a group; S itself is
    never whole in memory.

    Args:
        kv_heads, head_dim, device: as in the base class.
        sm_scale: factor on the logits; None for 1/sqrt(head_dim of the queries).
        sinks: [q_heads], sink logits, which take their part of the attention; None for a layer without.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        sm_scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(kv_heads, head_dim, device)
        self.sm_scale = sm_scale
        self.sinks = None if sinks is None else sinks.to(self.device).view(kv_heads, -1)

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk; see the base class."""
        group = q.shape[1] // self.kv_heads
        scale = q.shape[2] ** -0.5 if self.sm_scale is None else self.sm_scale
        for heads in self._heads():
            queries = self._rows(q, heads).unflatten(1, (-1, group))
            keys, values = self._rows(k, heads), self._rows(v, heads)
            sinks = None if self.sinks is None else self.sinks[heads]
            for outputs in attention_outputs(queries, keys, values, seq_lens, scale, sinks):
                self._add(heads, outputs)
        self.rows += q.shape[0] * group


class ProxyValueCovariance(CovarianceAccumulator):
    """Cheap stand-in for C_S ("proxy"): V^T diag(w) V / n with w_t = k_t C_Q k_t^T.

    The weight of a token is the energy of its logits over all queries of the group, without softmax or causality,
    as in the method's public description.

    Args:
        query_covariance: [kv_heads, d, d], C_Q per kv head (:meth:`QueryCovariance.per_head`).
        head_dim, device: as in the base class.
    """

    def __init__(self, query_covariance: torch.Tensor, head_dim: int, device: torch.device | str = "cpu") -> None:
        super().__init__(query_covariance.shape[0], head_dim, device)
        self.query_covariance = query_covariance.to(self.device, torch.float64)

    def update(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int]) -> None:
        """Add one chunk; ``q`` and ``seq_lens`` do not count."""
        for heads in self._heads():
            keys, values = self._rows(k, heads), self._rows(v, heads)
            metric = self.query_covariance[heads].to(keys.dtype)
            weights = ((keys @ metric) * keys).sum(-1, keepdim=True)
            self._add(heads, values, values * weights)
        self.rows += v.shape[0]
