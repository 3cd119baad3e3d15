"""Log probabilities of a server beside a plain forward pass that knows rows by their codec alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from oscar_kernels.codec import decode_rows, encode_rows
from oscar_kernels.layout import CODEBOOK, RowLayout
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from support.reference import MODEL, document, fit_rotations, question, token_ids
from support.servers import serve

CHUNK, SINK, RECENT, GROUP = 512, 64, 256, 128
TOKENS = 24
ARGS = [
    "--kv-cache-dtype", "int2", "--dtype", "float32", "--chunked-prefill-size", str(CHUNK),
    "--kv-cache-quant-group-size", str(GROUP),
]  # fmt: skip
LARGEST, MEDIAN = 1e-3, 5e-4
"""Of log probabilities: the largest distance without rows, the median with them. Where float32 rounds apart a code may
be the next one, which a few tokens feel."""


def read_back(side: RotationSet, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Keys or values of a layer as its rows give them back, float32 [kv_heads, n, head_dim]."""
    matrix = side.rotations[layer].double()
    center = 0 if side.centers is None else side.centers[layer][:, None]
    book = side.codebooks.of_layer(layer) if side.codebooks and side.coding(layer) == CODEBOOK else None
    layout = RowLayout(x.shape[0], x.shape[2], GROUP, bits=side.width(layer), coding=side.coding(layer))
    assert side.clip_ratios is not None
    assert side.gains is not None
    y = ((x.double() @ matrix).float() - center).transpose(0, 1)
    rows = encode_rows(y, layout, side.clip_ratios[layer], side.gains[layer], book)
    return ((decode_rows(rows, layout, book).transpose(0, 1) + center).double() @ matrix.inverse()).float()


def expected(ids: list[int], prompt: int, sides: tuple[RotationSet, RotationSet]) -> torch.Tensor:
    """Log probability of each token after the first, float32 [n - 1].

    Args:
        ids: prompt and answer.
        prompt: tokens of the prompt, which is computed chunk by chunk; each later token is computed alone.
        sides: rotations of keys and of values.
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
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="rows").eval()
    with torch.no_grad():
        said = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return said.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def test_log_probabilities_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    """Of a prompt in chunks and of its answer; layers have codebooks, affine keys and values without zero points."""
    options = FitOptions(bits=BitGoal(mean=2.5), key_coding="codebook", value_coding="symmetric")
    env = fit_rotations(tmp_path, documents=3, recipe="focus", options=options)
    key, value = (read_rotation_file(Path(env[f"SGLANG_OSCAR_{side}_ROTATION_PATH"])) for side in "KV")
    assert {key.coding(layer) for layer in range(4)} == {"codebook", "affine"}
    text = document(1300, 40, facts=2)
    prompt = token_ids(text.text + question(next(iter(text.facts))))
    with serve(MODEL, tmp_path / "log", *ARGS, env=env) as server:
        meta = server.generate(prompt, TOKENS, return_logprob=True, logprob_start_len=0)["meta_info"]
    steps = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    found, ids = torch.tensor([step[0] for step in steps]), [prompt[0], *(step[1] for step in steps)]

    def apart(key: RotationSet, value: RotationSet) -> list[torch.Tensor]:
        """Of the first chunk, of the rest of the prompt, and of the answer."""
        away = (found - expected(ids, len(prompt), (key, value))).abs()
        return list(away.split([CHUNK - 1, len(prompt) - CHUNK, TOKENS]))

    exact, behind, answer = apart(key, value)
    assert exact.max() < LARGEST
    assert behind.median() < MEDIAN
    assert answer.median() < MEDIAN
    # What such a comparison sees: the next head's points, the next layer's gains, values that are read short.
    assert key.codebooks is not None
    assert key.gains is not None
    assert value.gains is not None
    points = key.codebooks.points.roll(1, 1)
    for wrong in (
        (replace(key, codebooks=replace(key.codebooks, points=points)), value),
        (replace(key, gains=(*key.gains[1:], key.gains[0])), value),
        (key, replace(value, gains=tuple(0.95 * gain for gain in value.gains))),
    ):
        assert apart(*wrong)[1].median() > 2 * MEDIAN
