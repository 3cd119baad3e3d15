"""Covariance targets against brute force in float64 with the whole softmax matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from oscar_rotation.math import attention
from oscar_rotation.math.covariance import (
    CovarianceAccumulator,
    KeyCovariance,
    ProxyValueCovariance,
    QueryCovariance,
    ScoreValueCovariance,
    ValueCovariance,
)

HEAD_DIM = 16
Activations = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_activations(lengths: Sequence[int], q_heads: int, kv_heads: int, seed: int = 0) -> Activations:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator) * torch.linspace(0.3, 2, HEAD_DIM)

    return draw(q_heads), draw(kv_heads), draw(kv_heads)


def brute_force_scores(
    q: torch.Tensor, k: torch.Tensor, lengths: Sequence[int], head: int, group: int, sm_scale: float
) -> torch.Tensor:
    """S of one query head, [tokens, tokens] float64: causal, and zero across requests."""
    tokens = q.shape[0]
    request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (request[:, None] == request[None]) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    logits = q[:, head].double() @ k[:, head // group].double().T * sm_scale
    exponentials = (logits - logits.max()).exp() * visible
    return exponentials / exponentials.sum(1, keepdim=True)


def brute_force(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Target ``name`` per kv head, float64 [kv_heads, d, d]."""
    tokens, q_heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = q_heads // kv_heads
    out = torch.zeros(kv_heads, HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for head in range(q_heads):
        kv = head // group
        values, queries = v[:, kv].double(), q[:, head].double()
        if name == "qqt":
            out[kv] += queries.T @ queries / (tokens * group)
        elif name == "sst":
            scores = brute_force_scores(q, k, lengths, head, group, HEAD_DIM**-0.5)
            out[kv] += values.T @ scores.T @ scores @ values / (tokens * group)
    for kv in range(kv_heads):
        keys, values = k[:, kv].double(), v[:, kv].double()
        if name == "ktk":
            out[kv] = keys.T @ keys / tokens
        elif name == "vtv":
            out[kv] = values.T @ values / tokens
        elif name == "proxy":
            queries = q[:, kv * group : (kv + 1) * group].double().reshape(-1, HEAD_DIM)
            metric = queries.T @ queries / queries.shape[0]
            for token in range(tokens):
                weight = keys[token] @ metric @ keys[token]
                out[kv] += weight * torch.outer(values[token], values[token]) / tokens
    return out


def build(name: str, q: torch.Tensor, k: torch.Tensor) -> CovarianceAccumulator:
    kv_heads = k.shape[1]
    if name == "proxy":
        queries = QueryCovariance(kv_heads, HEAD_DIM)
        queries.update(q, k, k, [q.shape[0]])
        return ProxyValueCovariance(queries.per_head(), HEAD_DIM)
    classes: dict[str, Callable[[int, int], CovarianceAccumulator]] = {
        "qqt": QueryCovariance,
        "ktk": KeyCovariance,
        "vtv": ValueCovariance,
        "sst": ScoreValueCovariance,
    }
    return classes[name](kv_heads, HEAD_DIM)


def relative_error(measured: torch.Tensor, reference: torch.Tensor) -> float:
    return float((measured - reference).abs().max() / reference.abs().max())


TARGETS = ["qqt", "ktk", "vtv", "sst", "proxy"]
HEADS = [(4, 2), (6, 1), (3, 3)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", TARGETS)
def test_equals_brute_force(name: str, heads: tuple[int, int]) -> None:
    lengths = [7, 1, 40, 19]
    q, k, v = random_activations(lengths, *heads)
    target = build(name, q, k)
    target.update(q, k, v, lengths)
    reference = brute_force(name, q, k, v, lengths)
    assert relative_error(target.per_head(), reference) < 1e-5
    assert relative_error(target.shared(), reference.mean(0)) < 1e-5
    assert target.shared().dtype == torch.float64


@pytest.mark.parametrize("name", TARGETS)
def test_float64_input_is_processed_in_float64(name: str) -> None:
    lengths = [20, 13]
    q, k, v = (x.double() for x in random_activations(lengths, 4, 2))
    target = build(name, q, k)
    target.update(q, k, v, lengths)
    assert relative_error(target.per_head(), brute_force(name, q, k, v, lengths)) < 1e-12


@pytest.mark.parametrize("name", TARGETS)
def test_streaming_equals_one_chunk(name: str) -> None:
    lengths = [7, 30, 12, 5]
    q, k, v = random_activations(lengths, 4, 2)
    whole, parts = build(name, q, k), build(name, q, k)
    whole.update(q, k, v, lengths)
    parts.update(q[:37], k[:37], v[:37], lengths[:2])
    parts.update(q[37:], k[37:], v[37:], lengths[2:])
    assert relative_error(parts.per_head(), whole.per_head()) < 1e-6


@pytest.mark.parametrize("name", TARGETS)
def test_all_heads_at_once_equal_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # How a GPU works: every kv head in one batch, attention in blocks.
    monkeypatch.setattr(CovarianceAccumulator, "_heads", lambda self: [slice(0, self.kv_heads)])
    monkeypatch.setattr(attention, "_fused", attention._blocked)
    monkeypatch.setattr(attention, "MIN_ROWS", 5)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 1)
    lengths = [7, 1, 40, 19]
    q, k, v = random_activations(lengths, 6, 3)
    target = build(name, q, k)
    target.update(q, k, v, lengths)
    assert relative_error(target.per_head(), brute_force(name, q, k, v, lengths)) < 1e-5


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_attention_in_blocks_equals_the_fused_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [33, 2, 17]
    q, k, v = random_activations(lengths, 4, 2)
    monkeypatch.setattr(attention, "MIN_ROWS", rows)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 1)
    monkeypatch.setattr(attention, "_fused", attention._blocked)
    target = ScoreValueCovariance(2, HEAD_DIM)
    target.update(q, k, v, lengths)
    assert relative_error(target.per_head(), brute_force("sst", q, k, v, lengths)) < 1e-5


def test_scores_are_never_whole_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    softmax = torch.softmax

    def watched(scores: torch.Tensor, dim: int) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return softmax(scores, dim=dim)

    monkeypatch.setattr(torch, "softmax", watched)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 1)
    monkeypatch.setattr(attention, "_fused", attention._blocked)
    q, k, v = random_activations([3000], 2, 1)
    ScoreValueCovariance(1, HEAD_DIM).update(q, k, v, [3000])
    assert 0 < largest <= attention.MIN_ROWS * 3000


def test_request_boundaries_matter() -> None:
    q, k, v = random_activations([60], 4, 2)
    one, two = ScoreValueCovariance(2, HEAD_DIM), ScoreValueCovariance(2, HEAD_DIM)
    one.update(q, k, v, [60])
    two.update(q, k, v, [25, 35])
    assert relative_error(one.per_head(), two.per_head()) > 1e-2


def test_sm_scale_is_honoured() -> None:
    q, k, v = random_activations([40], 2, 1)
    target = ScoreValueCovariance(1, HEAD_DIM, sm_scale=0.7)
    target.update(q, k, v, [40])
    reference = torch.zeros(HEAD_DIM, HEAD_DIM, dtype=torch.float64)
    for head in range(2):
        outputs = brute_force_scores(q, k, [40], head, 2, 0.7) @ v[:, 0].double()
        reference += outputs.T @ outputs / 80
    assert relative_error(target.shared(), reference) < 1e-5


def test_nothing_added_is_an_error() -> None:
    with pytest.raises(ValueError, match="no activations"):
        QueryCovariance(1, 8).shared()
