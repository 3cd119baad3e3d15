"""Sink logits in a dump and in a fit: they take their part of the attention that errors are weighed by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from oscar_rotation.dump import DumpError, DumpManifest, DumpReader, DumpWriter
from oscar_rotation.dump.covariances import CovarianceWriter
from oscar_rotation.fit.bits import measure
from oscar_rotation.fit.held_out import Request, held_out_requests, moved, requests
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.samples import head_samples
from oscar_rotation.math import attention
from oscar_rotation.math.attention_weights import Exact, attention_kl, key_weights, output_error
from oscar_rotation.math.covariance import ScoreValueCovariance
from oscar_rotation.math.positions import Positions
from oscar_rotation.recipes.focus import FocusMoments, fit_focus_layer
from oscar_rotation.recipes.paper import fit

HEADS, GROUP, D, N = 2, 2, 32, 90
SCALE = 0.3
SINKS = torch.tensor([[3.0, -1.0], [6.0, 2.0]])
"""By kv head. With random logits they take from a percent to nearly all of the attention."""


def draw(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def tensors(n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [heads, n, group, d], k and v [heads, n, d]."""
    return draw(HEADS, n, GROUP, D, seed=1), draw(HEADS, n, D, seed=2), draw(HEADS, n, D, seed=3)


def probabilities(q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor = SINKS) -> torch.Tensor:
    """Of tokens, then of the sink: float64 [heads, n, group, n + 1]."""
    logits = torch.einsum("hngd,hmd->hngm", q.double(), k.double()) * SCALE
    n = logits.shape[1]
    logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril()[None, :, None], float("-inf"))
    return torch.cat([logits, sinks.double()[:, None, :, None].expand(HEADS, n, GROUP, 1)], -1).softmax(-1)


def away(n: int) -> torch.Tensor:
    """Whether a query reads a key in 2 bits, bool [n, 1, n]."""
    exact, places = Exact.of(n), torch.arange(n)
    return ((places[:, None] - places >= exact.recent) & (places >= exact.sink))[:, None]


@pytest.mark.parametrize("path", ["_fused", "_blocked"])
def test_attention_outputs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests, by the kernel for CPUs and by blocks of a few rows, as on a GPU."""
    monkeypatch.setattr(attention, "MIN_ROWS", 8)
    monkeypatch.setattr(attention, "BLOCK_SCORES", 1)
    monkeypatch.setattr(attention, "_fused", getattr(attention, path))
    (q, k, v), lengths = tensors(), [37, N - 37]
    outputs = torch.cat(list(attention.attention_outputs(q, k, v, lengths, SCALE, SINKS)), 1)
    parts = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
    wanted = torch.cat([(probabilities(a, b)[..., :-1].flatten(1, 2) @ c.double()) for a, b, c in parts], 1)
    assert outputs.shape == wanted.shape
    gram, wanted_gram = outputs.double().mT @ outputs.double(), wanted.mT @ wanted
    torch.testing.assert_close(gram, wanted_gram, rtol=1e-4, atol=1e-4)


def test_weights_of_keys() -> None:
    """Mean over readers of p (1 - p), the sink among the outcomes."""
    q, k, _ = tensors()
    p = probabilities(q, k)[..., :-1] * away(N)
    readers = ((N - Exact.of(N).recent - torch.arange(N)).clamp_min(1) * GROUP).double()
    found = key_weights(q, k, SCALE, SINKS).double()
    first = Exact.of(N).sink + Exact.of(N).recent
    wanted = (p * (1 - p))[:, first:].sum((1, 2))
    ratio = found / wanted * readers
    reached = wanted > 0
    torch.testing.assert_close(ratio[reached], torch.ones_like(ratio[reached]), rtol=2e-3, atol=0)
    assert (found - key_weights(q, k, SCALE).double()).norm() > 0.2 * found.norm()


def test_loss_of_attention() -> None:
    """KL over tokens and the sink."""
    q, k, _ = tensors()
    coded, last = k + 0.3 * draw(HEADS, N, D, seed=4), 12
    exact, wrong = (torch.einsum("hngd,hmd->hngm", q.double(), x.double()) * SCALE for x in (k, coded))
    future = ~torch.ones(N, N, dtype=torch.bool).tril()[None, :, None]
    seen = torch.where(away(N), wrong, exact).masked_fill(future, float("-inf"))
    column = SINKS.double()[:, None, :, None].expand(HEADS, N, GROUP, 1)
    p, other = probabilities(q, k), torch.cat([seen, column], -1).log_softmax(-1)
    kl = (p * (p.log() - other).nan_to_num(0)).sum(-1)[:, -last:].mean((1, 2))
    found = attention_kl(q, k, coded, SCALE, last, SINKS)
    torch.testing.assert_close(found.double(), kl, rtol=1e-3, atol=1e-7)


def test_error_of_outputs() -> None:
    """What a sink takes is taken from the values."""
    q, k, _ = tensors()
    wrong, weight, last = 0.2 * draw(HEADS, N, D, seed=7), draw(HEADS, D, 40, seed=8), 12
    p = probabilities(q, k)[..., :-1] * away(N)
    moved = torch.einsum("hngm,hmd->hngd", p, wrong.double()) @ weight[:, None].double()
    energy = moved.square().sum(-1)[:, -last:].mean((1, 2))
    found = output_error(q, k, wrong, SCALE, weight @ weight.mT, last, SINKS)
    torch.testing.assert_close(found.double(), energy, rtol=1e-3, atol=1e-7)


def test_losses_by_bits() -> None:
    """A sink that takes nearly everything leaves that little of values, of their errors and of those of keys."""
    q, k, v = tensors()
    coded = [k + 0.1 * draw(HEADS, N, D, seed=5)], [v + 0.1 * draw(HEADS, N, D, seed=6)]
    without, whole = measure(Request(q, k, v), *coded, SCALE, torch.eye(D).repeat(HEADS, 1, 1))
    share = 1e-4
    strong = torch.full((HEADS, GROUP), 40.0)
    errors, energy = measure(Request(q, k, v, strong), *coded, SCALE, torch.eye(D).repeat(HEADS, 1, 1))
    assert 0 < energy < share * whole
    assert bool((errors < share * without).all())
    weak = Request(q, k, v, torch.full((HEADS, GROUP), -40.0))
    same, energy = measure(weak, *coded, SCALE, torch.eye(D).repeat(HEADS, 1, 1))
    assert energy == pytest.approx(whole)
    torch.testing.assert_close(same, without)


def test_samples_of_clip_ratios() -> None:
    q, k, v = tensors()
    flat = q.transpose(0, 1).flatten(1, 2), k.transpose(0, 1), v.transpose(0, 1)
    samples = head_samples(*flat, [N], SCALE, SINKS.flatten())
    wanted = probabilities(q, k)[..., :-1].transpose(1, 2) @ v.double()[:, None]
    for sample, outputs in zip(samples, wanted, strict=True):
        torch.testing.assert_close(sample.exact.double(), outputs.flatten(0, 1), rtol=1e-4, atol=1e-5)
        assert sample.error(k=sample.k, v=sample.v) == 0


def test_moved_requests_keep_them() -> None:
    q, k, v = tensors()
    place = Positions(torch.logspace(0, -3, D // 2, dtype=torch.float64), 1000)
    (found,) = moved([Request(q, k, v, SINKS)], place)
    assert found.sinks is SINKS


def written(root: Path, sinks: bool, tp_size: int = 1) -> Path:
    """A dump of two layers, of which the second has sink logits; by a number of ranks."""
    lengths = [[4], [150, 170], [200]]
    for rank in range(tp_size):
        writer = DumpWriter(root, total_kv_heads=HEADS, tp_rank=rank, tp_size=tp_size)
        for chunk, parts in enumerate(lengths):
            n = sum(parts)
            q, k, v = draw(n, HEADS * GROUP, D, seed=chunk), draw(n, HEADS, D, seed=7), draw(n, HEADS, D, seed=8)
            v = v * torch.linspace(0.2, 2, n)[:, None, None]
            own = [x.chunk(tp_size, 1)[rank] for x in (q, k, v)]
            for layer in range(2):
                given = SINKS.flatten().chunk(tp_size)[rank] if sinks and layer else None
                writer.write(layer, chunk, *own, parts, given)
        layers = tuple(sorted(writer.sink_layers))
    DumpManifest(
        num_layers=2, q_heads=HEADS * GROUP, kv_heads=HEADS, head_dim=D, tp_size=tp_size, sink_logits=layers
    ).write(root)
    return root


@pytest.mark.parametrize("tp_size", [1, 2])
def test_dumped_by_ranks_and_read(tp_size: int, tmp_path: Path) -> None:
    dump = DumpReader(written(tmp_path / "dump", True, tp_size))
    assert dump.manifest is not None
    assert dump.manifest.sink_logits == (1,)
    assert dump.sink_logits(0) is None
    found = dump.sink_logits(1)
    assert found is not None
    assert torch.equal(found, SINKS.flatten())
    (request,) = held_out_requests(dump, 1, {2: 0}, torch.device("cpu"))
    assert request.sinks is not None
    assert torch.equal(request.sinks, SINKS)
    (tmp_path / "dump" / "manifest.json").unlink()
    again = DumpReader(tmp_path / "dump").sink_logits(1)
    assert again is not None, "a dump without a manifest"
    assert torch.equal(again, found)


def test_broken_ones_are_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "dump", True)
    wrong: list[tuple[torch.Tensor | None, str]] = [
        (None, "missing, the layer has sink logits"),
        (torch.ones(3), "sink logits of 3 heads, the dump has 4 q heads"),
        (torch.ones(4, dtype=torch.int64), "expected floating-point"),
        (torch.full((4,), float("nan")), "holds NaN"),
    ]
    for number, (content, message) in enumerate(wrong):
        root = shutil.copytree(whole, tmp_path / str(number))
        path = root / "layer_1" / "sink_logits.pt"
        path.unlink()
        if content is not None:
            torch.save(content, path)
        with pytest.raises(DumpError, match=message):
            DumpReader(root).sink_logits(1)
    writer, x = DumpWriter(tmp_path / "new", total_kv_heads=HEADS), torch.zeros(5, HEADS, D)
    with pytest.raises(DumpError, match="do not fit q"):
        writer.write(0, 0, torch.zeros(5, HEADS * GROUP, D), x, x, [5], torch.zeros(3))


def outputs_covariance(root: Path, layer: int) -> ScoreValueCovariance:
    dump = DumpReader(root)
    target = ScoreValueCovariance(HEADS, D, sm_scale=D**-0.5, sinks=dump.sink_logits(layer))
    for chunk in (dump.load(layer, index) for index in dump.fit_chunks()):
        target.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
    return target


def test_recipe_paper(tmp_path: Path) -> None:
    """Values of the layer with sink logits get another rotation; activations and covariances give the same."""
    with_sinks, without = written(tmp_path / "with", True), written(tmp_path / "without", False)
    fitted, plain = (fit(root, FitOptions(report=True), device="cpu") for root in (with_sinks, without))
    assert torch.equal(fitted.key.rotations, plain.key.rotations)
    assert torch.equal(fitted.value.rotations[0], plain.value.rotations[0])
    assert fitted.value.eigenvalues is not None
    assert plain.value.eigenvalues is not None
    # Sinks leave tokens less than all of the attention.
    assert fitted.value.eigenvalues[1].sum() < 0.7 * plain.value.eigenvalues[1].sum()
    assert not torch.allclose(fitted.value.rotations[1], plain.value.rotations[1], atol=0.05)
    spectrum = outputs_covariance(with_sinks, 1).shared()
    assert float(fitted.value.eigenvalues[1].sum()) == pytest.approx(float(spectrum.trace()), rel=1e-5)

    root, dump = tmp_path / "streamed", DumpReader(with_sinks)
    for rank in range(2):
        writer = CovarianceWriter(
            root, num_layers=2, kv_shard=rank, kv_shards=2, tp_rank=rank, tp_size=2, sm_scale=D**-0.5
        )
        for chunk in dump.chunks:
            content = dump.load(1, chunk)
            q, k, v = (x.chunk(2, 1)[rank] for x in (content.q, content.k, content.v))
            for layer in range(2):
                given = SINKS[rank] if layer else None
                writer.write(layer, chunk, q, k, v, content.seq_lens, given)
        writer.finish()
    assert dump.manifest is not None
    dump.manifest.model_copy(update={"tp_size": 2, "sink_logits": ()}).write(root)
    streamed = fit(root, FitOptions(), device="cpu")
    assert (streamed.value.rotations - fitted.value.rotations).abs().max() < 1e-4


def test_recipe_focus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moments of keys are weighed, and shares chosen, by attention in which the sink has its part."""
    dump = DumpReader(written(tmp_path / "dump", True))
    sinks = dump.sink_logits(1)
    made = [FocusMoments(HEADS, D, D, SCALE, sinks=x) for x in (sinks, None)]
    for moments in made:
        for chunk in (dump.load(1, 1),):
            moments.update_keys(chunk)
            moments.update_values(chunk)
    (_, center), (_, other) = (moments.keys(0.9) for moments in made)
    assert (center - other).norm() > 0.05 * other.norm()
    seen = []

    def note(q: torch.Tensor, k: torch.Tensor, coded: torch.Tensor, scale: float, queries: int, given: torch.Tensor):  # type: ignore[no-untyped-def]
        seen.append(given)
        return attention_kl(q, k, coded, scale, queries, given)

    monkeypatch.setattr("oscar_rotation.recipes.focus.attention_kl", note)
    held_out = list(requests(dump.load(1, 2), sinks))
    fit_focus_layer(made[0], held_out, torch.eye(D).repeat(HEADS, 1, 1))
    assert seen
    assert all(torch.equal(given, SINKS) for given in seen)
