"""FlashAttention-3 as the attention kernel of extend: the one that SGLang's own kernels bring, compiled.

FlashInfer compiles its prefill at the first start of a server, for minutes; this one is there (``sgl_kernel``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from oscar_kernels.reference import LOG2_E

MEASURED = 9
"""Major compute capability on which it has run here, with draft models, too."""


class FlashAttention3:
    """Attention of several requests that lie one after the other (:class:`oscar_kernels.extend_plan.Ragged`).

    Args:
        device: where queries are.

    Attributes:
        capabilities: major compute capabilities that it is for: Ampere, Ada and Hopper.
        head_dims: of keys and values that it takes.
        needs: what brings it.
        splitting: an option of every call where it splits long prefixes itself, else nothing. By default it would leave
            most of the GPU idle where few queries see many keys; with 0 it cuts keys as it sees fit, and takes memory
            for partial results of no more queries than that.
    """

    capabilities: tuple[int, ...] = (8, 9)
    head_dims: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (256, 256), (192, 128))
    needs = "sglang-kernel with FlashAttention-3 (flash_ops)"
    splitting: ClassVar[dict[str, Any]] = {"num_splits": 0}

    @staticmethod
    def installed() -> bool:
        """Whether SGLang's kernels are there with FlashAttention-3 among them; nothing of theirs is imported."""
        spec = importlib.util.find_spec("sgl_kernel")
        if spec is None or spec.origin is None:
            return False
        return any(Path(spec.origin).parent.glob("flash_ops.*"))

    @classmethod
    def missing(cls, head_dim: int, value_head_dim: int | None = None) -> str | None:
        """Why it cannot be had; None where it can.

        Args:
            head_dim: channels of a head.
            value_head_dim: of the values; None where keys have as many.
        """
        heads = (head_dim, head_dim if value_head_dim is None else value_head_dim)
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in cls.capabilities:
            return "it is not for this GPU"
        if not cls.installed():
            return f"{cls.needs} is not installed"
        if heads not in cls.head_dims:
            return f"it does not take head_dim {' and '.join(map(str, dict.fromkeys(heads)))}"
        return None

    def __init__(self, device: torch.device) -> None:
        self._attend, self._device = self.function(), device

    @staticmethod
    def function() -> Callable[..., Any]:
        """SGLang's."""
        from sgl_kernel.flash_attn import flash_attn_varlen_func

        function: Callable[..., Any] = flash_attn_varlen_func
        return function

    def plan(
        self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim_qk: int, **options: Any,
    ) -> None:  # fmt: skip
        """Take note of where requests begin; int32 [requests + 1] on the host."""
        self._lengths: dict[str, Any] = {}
        for side, indptr in (("q", qo_indptr), ("k", kv_indptr)):
            self._lengths[f"cu_seqlens_{side}"] = indptr.to(self._device, non_blocking=True)
            self._lengths[f"max_seqlen_{side}"] = int((indptr[1:] - indptr[:-1]).max())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any) -> torch.Tensor:
        """[tokens, q_heads, head_dim]."""
        out: torch.Tensor = self._attend(
            q, k, v, **self._lengths, softmax_scale=options["sm_scale"], causal=causal, **self.splitting
        )
        return out

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same and float32 [tokens, q_heads], the log2 of the sum of exp2 of the logits (times log2 e)."""
        out, sums, *_ = self._attend(
            q, k, v, **self._lengths, softmax_scale=options["sm_scale"], causal=causal,
            return_softmax_lse=True, **self.splitting,
        )  # fmt: skip
        # It returns natural logarithms, [q_heads, tokens].
        return out, torch.mul(sums.T, LOG2_E, out=torch.empty(q.shape[:2], dtype=sums.dtype, device=sums.device))


def measured(head_dim: int) -> bool:
    """Whether FlashAttention-3 can be had on a GPU on which it has run here.

    Args:
        head_dim: channels of a head.
    """
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == MEASURED
    return hopper and FlashAttention3.missing(head_dim) is None
