"""The recipe focus as it is served: the fit on a dump, what it must agree with, its choice, and the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.dump import DumpChunk, DumpError, DumpManifest, DumpReader
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.fit.held_out import requests
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.load import load_rotation
from oscar_rotation.math import attention_weights
from oscar_rotation.math.attention_weights import Exact, attention_kl, key_weights, sensitivity
from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.recipes import focus
from oscar_rotation.recipes.focus import SHARES, FocusMoments, fit_focus, fit_focus_layer
from oscar_rotation.recipes.plus import CLIP_RATIO, KEY_GAIN, VALUE_GAIN, Moments, fit_plus, fit_plus_layer

KV_HEADS, GROUP, D = 2, 2, 32
K_NAME, V_NAME = "k_rotation_focused_u_h_br.safetensors", "v_rotation_balanced_u_h_br.safetensors"
runner = CliRunner()


def heads(chunk: DumpChunk) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys of every request of a chunk."""
    return ((request.q, request.k) for request in requests(chunk))


def drawn(lengths: tuple[int, ...], seed: int = 0, queries: float = 1.0) -> DumpChunk:
    """Random activations whose keys are off center, heads on different scales."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    q = queries * torch.randn(n, KV_HEADS * GROUP, D, generator=generator) * torch.linspace(0.2, 2, D)
    k = torch.randn(n, KV_HEADS, D, generator=generator) * torch.linspace(3, 0.3, D) + torch.tensor([[1.0], [-4.0]])
    return DumpChunk(q, k, torch.randn(n, KV_HEADS, D, generator=generator), lengths)


def moments_of(*chunks: DumpChunk) -> FocusMoments:
    moments = FocusMoments(KV_HEADS, D, D, D**-0.5)
    for chunk in chunks:
        moments.update_keys(chunk)
        moments.update_values(chunk)
    return moments


READER = torch.eye(D).expand(KV_HEADS, -1, -1)


def test_weights_are_the_sensitivities() -> None:
    for q, k in heads(drawn((200, 33, 1))):
        torch.testing.assert_close(key_weights(q, k, 0.3), sensitivity(q, k, 0.3).keys, rtol=1e-4, atol=1e-8)


def test_of_a_long_request_some_queries_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key's weight is the mean over those of the looked-at queries that read it from its row."""
    monkeypatch.setattr(attention_weights, "READERS", 40)
    ((q, k),) = heads(drawn((333,)))
    n, exact = 333, Exact.of(333)
    p = (torch.einsum("hngd,hmd->hngm", q, k) * 0.3).masked_fill(torch.ones(n, n).triu(1).bool()[:, None], -torch.inf)
    p = p.softmax(-1).double()
    asked = torch.arange(exact.sink + exact.recent, n, -(-(n - exact.sink - exact.recent) // 40))
    assert len(asked) <= 40
    for key in (exact.sink, 100, 200, n - exact.recent - 30):
        readers = asked[asked >= key + exact.recent]
        expected = (p * (1 - p))[:, readers, :, key].mean((1, 2)).float()
        torch.testing.assert_close(key_weights(q, k, 0.3)[:, key], expected, rtol=1e-3, atol=1e-8)


def test_without_attention_it_is_plus_per_kv_head() -> None:
    """With no share of attention keys are those of plus, balanced by kv head; values are those of plus in any case."""
    chunk = drawn((150, 90), seed=4)
    moments, known = moments_of(chunk), Moments(KV_HEADS, D, D)
    known.update(chunk.q, chunk.k, chunk.v, chunk.seq_lens)
    stored, center = moments.keys(0.0)
    torch.testing.assert_close(center, known.center(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored, known.keys_by_head(), rtol=1e-4, atol=1e-3)
    layer = fit_focus_layer(moments, list(requests(drawn((80,), seed=5))), READER)
    torch.testing.assert_close(layer.value.transform, fit_plus_layer(known, READER).value.transform)


def test_uniform_attention_weighs_nothing() -> None:
    """Queries of zero read every earlier key alike. Each key counts alike then, but for how many keys its readers have
    to choose from; in a long request that levels out, and centers and moments are nearly those of plus per head."""
    moments = moments_of(drawn((1200,), seed=6, queries=0.0))
    (q, k) = next(heads(drawn((1200,), seed=6, queries=0.0)))
    counted = key_weights(q, k, 1.0)[:, 64:900]
    torch.testing.assert_close(counted[0], counted[1])
    assert float(counted.max() / counted.min()) < 3
    for share in SHARES[1:]:
        for found, plain in zip(moments.keys(share), moments.keys(0.0), strict=True):
            assert float((found - plain).norm() / plain.norm()) < 0.08


def crowd(seed: int, n: int = 400) -> DumpChunk:
    """Head 0 reads an eighth of its keys only, small ones unlike the rest; head 1 reads all of its keys."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(n, 2, D, generator=generator)
    few = torch.rand(n, generator=generator) < 1 / 8
    k[:, 0] *= torch.cat([torch.full((D // 2,), 4.0), torch.full((D // 2,), 0.2)])
    k[few, 0] = torch.randn(int(few.sum()), D, generator=generator)
    k[few, 0, 0], k[~few, 0, 0] = 12.0, -12.0
    q = torch.randn(n, 2, D, generator=generator)
    q[:, 0, 0] = 6.0
    q[:, 1] *= 0.3
    return DumpChunk(q, k, torch.randn(n, 2, D, generator=generator), (n,))


def loss(layer: focus.FocusLayer, chunk: DumpChunk) -> torch.Tensor:
    """KL of attention by head."""
    (q, k) = next(heads(chunk))
    into, back = (torch.stack([getattr(x, name) for x in layer.keys]).float() for name in ("transform", "dual"))
    middle = layer.center.float()[:, None]
    read = coded((k - middle) @ into, 64, CLIP_RATIO, KEY_GAIN) @ back.mT + middle
    return attention_kl(q, k, read, D**-0.5)


def test_heads_choose_on_what_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is the share with the least loss on the held-out requests, head by head, and it pays elsewhere."""
    moments = moments_of(*(crowd(seed) for seed in range(4)))
    held = list(requests(crowd(9)))
    chosen = fit_focus_layer(moments, held, READER)
    alone = {}
    for share in SHARES:
        monkeypatch.setattr(focus, "SHARES", (share,))
        alone[share] = fit_focus_layer(moments, held, READER)
    losses = torch.stack([loss(alone[share], crowd(9)) for share in SHARES])
    assert chosen.shares == tuple(SHARES[i] for i in losses.argmin(0).tolist())
    assert chosen.shares[0] > 0
    for head, share in enumerate(chosen.shares):
        assert torch.equal(chosen.keys[head].transform, alone[share].keys[head].transform)
        assert torch.equal(chosen.center[head], alone[share].center[head])
    assert float(loss(chosen, crowd(99))[0]) < 0.7 * float(loss(alone[0.0], crowd(99))[0])


def test_a_head_without_attention_is_that_of_plus() -> None:
    """Requests so short that every key is in a window give no weights: nothing is divided by zero."""
    moments = moments_of(drawn((1, 1, 1, 1, 1, 1)))
    assert float(moments.mass[0].sum()) == 0
    for share in SHARES:
        assert torch.equal(moments.keys(share)[0], moments.keys(0.0)[0])


def test_the_fit_of_a_dump(make_dump: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    """Command, files, what they state, and that every way of cutting the dump gives the same fit."""
    root = make_dump(tmp_path / "dump", requests=[[5], [90, 120], [130], [64, 80]])
    out = tmp_path / "out"
    done = runner.invoke(app, ["fit", str(root), "--out", str(out), "--bits", "k2v2", "--model", str(model)])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == [K_NAME, V_NAME]
    keys, values = read_rotation_file(out / K_NAME), read_rotation_file(out / V_NAME)
    assert tuple(keys.rotations.shape) == (2, KV_HEADS, D, D)
    assert keys.centers is not None
    assert tuple(keys.centers.shape) == (2, KV_HEADS, D)
    assert keys.recipe == values.recipe == "focus"
    assert (keys.gains, keys.clip_ratios) == ((KEY_GAIN,) * 2, (CLIP_RATIO,) * 2)
    plus = fit_plus(root, OutputWeights(model)).value
    assert torch.equal(values.rotations, plus.rotations)
    assert values.gains == (VALUE_GAIN,) * 2
    facts = keys.metadata.calibration
    assert (facts["tokens"], facts["held_out_tokens"]) == (484, 80)
    assert sum(facts["heads_by_share"].values()) == 2 * KV_HEADS
    other = fit_focus(make_dump(tmp_path / "one", requests=[[5], [90, 120, 130, 64, 80]]), OutputWeights(model)).key
    again = fit_focus(root, OutputWeights(model)).key
    assert torch.equal(again.rotations, keys.rotations)
    assert other.rotations.shape == keys.rotations.shape
    assert torch.equal(load_rotation(out / K_NAME, num_layers=2, head_dim=D, side="k").rotations, keys.rotations)


def test_the_center_is_taken_off_behind_the_transform(
    make_dump: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    """k T - center is (k - c) T, and the dual of the queries brings q . (k - c) back."""
    root = make_dump(tmp_path / "dump", requests=[[90, 120], [130, 70]])
    keys = fit_focus(DumpReader(root), OutputWeights(model)).key
    assert keys.duals is not None
    assert keys.centers is not None
    c = torch.einsum("lhd,lhed->lhe", keys.centers, keys.duals)
    k, q = torch.randn(2, KV_HEADS, 7, D), torch.randn(2, KV_HEADS, 7, D)
    stored = k @ keys.rotations - keys.centers[:, :, None]
    torch.testing.assert_close(
        ((q @ keys.duals) * stored).sum(-1), (q * (k - c[:, :, None])).sum(-1), rtol=1e-3, atol=1e-2
    )


def test_inspect_shows_it(make_dump: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    root = make_dump(tmp_path / "dump", requests=[[90, 120], [130, 70]])
    fit_focus(root, OutputWeights(model)).save(tmp_path / "out", (".safetensors",))
    shown = runner.invoke(app, ["inspect", str(tmp_path / "out" / K_NAME)]).output
    for words in ("focus", "rotations per layer", "one per kv head", "heads_by_share", "held_out_tokens"):
        assert words in shown
    as_json = runner.invoke(app, ["inspect", str(tmp_path / "out" / K_NAME), "--json"]).output
    assert '"rotations_per_layer": 2' in as_json


def test_what_does_not_suffice_is_refused(make_dump: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    one = make_dump(tmp_path / "one", requests=[[5], [90]])
    with pytest.raises(DumpError, match="holds one request; the recipe focus needs two or more"):
        fit_focus(one, OutputWeights(model))
    odd = make_dump(tmp_path / "odd", head_dim=40, requests=[[5], [90, 20], [90]])
    with pytest.raises(DumpError, match="head_dim is 40; a Hadamard rotation needs a power of two"):
        fit_focus(odd, OutputWeights(model))


def test_the_scale_of_the_manifest_is_used(make_dump: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    """Another factor on the logits is another attention, and other weights."""
    root = make_dump(tmp_path / "dump", requests=[[200], [300, 200]])
    usual = fit_focus(root, OutputWeights(model)).key.rotations
    for scale, same in ((D**-0.5, True), (1.0, False)):
        DumpManifest(num_layers=2, q_heads=4, kv_heads=2, head_dim=D, sm_scale=scale).write(root)
        assert torch.equal(fit_focus(root, OutputWeights(model)).key.rotations, usual) == same
