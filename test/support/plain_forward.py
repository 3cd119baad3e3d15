"""A plain forward pass of the reference model, or one like it, that knows rows by their codec alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from oscar_cpu.server import has_gpu
from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.layout import CODEBOOK, RowLayout
from oscar_rotation.files.rotation_set import RotationSet
from support.reference import MODEL

CHUNK, SINK, RECENT, GROUP = 512, 64, 256, 128
ARGS = [
    "--kv-cache-dtype", "int2", "--dtype", "bfloat16" if has_gpu() else "float32", "--chunked-prefill-size", str(CHUNK),
    "--kv-cache-quant-group-size", str(GROUP),
]  # fmt: skip
"""Of a server that is compared with it, where there is no GPU: on one int2 mode computes in 16 bits."""
LARGEST, MEDIAN = 1e-3, 5e-4
"""Of log probabilities: the largest distance without rows, the median with them. Where float32 rounds apart a code may
be the next one, which a few tokens feel."""


def read_back(side: RotationSet, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Keys or values of a layer as its rows give them back, float32 [kv_heads, n, head_dim]."""
    matrix = side.rotations[layer].double()
    center = 0 if side.centers is None else side.centers[layer][:, None]
    y = ((x.double() @ matrix).float() - center).transpose(0, 1)
    for heads, bits, coding, clip, gain in side.runs(layer):
        own = y[:, heads]
        book = side.codebooks.of_layer(layer, heads) if side.codebooks and coding == CODEBOOK else None
        layout = RowLayout(own.shape[1], x.shape[2], GROUP, bits=bits, coding=coding)
        assert clip is not None
        assert gain is not None
        y[:, heads] = decode_rows(encode_rows(own, layout, clip, gain, book), layout, book)
    return ((y.transpose(0, 1) + center).double() @ matrix.inverse()).float()


def expected(ids: list[int], prompt: int, sides: tuple[RotationSet, RotationSet], folder: Path = MODEL) -> torch.Tensor:
    """Log probability of each token after the first, float32 [n - 1].

    Args:
        ids: prompt and answer.
        prompt: tokens of the prompt, which is computed chunk by chunk; each later token is computed alone.
        sides: rotations of keys and of values.
        folder: of the model.
    """
    at = torch.arange(len(ids))
    # A query reads rows between the sink and the recent window of what was cached: of a decoded token itself included.
    cached = torch.where(at < prompt, at // CHUNK * CHUNK, at + 1)
    coded = (at >= SINK) & (at < cached[:, None] - RECENT)
    future = at > at[:, None]

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, scaling: float, **__: Any
    ) -> tuple[torch.Tensor, None]:
        group = q.shape[1] // k.shape[1]
        stored = [read_back(side, module.layer_idx, x[0])[None] for side, x in zip(sides, (k, v), strict=True)]
        k, v, stored_k, stored_v = (x.repeat_interleave(group, 1) for x in (k, v, *stored))
        logits = torch.where(coded, q @ stored_k.mT, q @ k.mT) * scaling
        p = logits.masked_fill(future, -torch.inf).softmax(-1)
        return ((p * ~coded) @ v + (p * coded) @ stored_v).transpose(1, 2), None

    AttentionInterface.register("rows", attend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="rows").eval()
    with torch.no_grad():
        said = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return said.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
