"""Chunks that threads read ahead come in order, whole, and broken ones are named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_rotation.dump import DumpError, DumpReader
from oscar_rotation.dump.stream import stream_chunks
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.math import attention
from oscar_rotation.math.covariance import CovarianceAccumulator
from oscar_rotation.math.finite import all_finite
from oscar_rotation.recipes.focus import fit_focus
from oscar_rotation.recipes.paper import fit
from oscar_rotation.recipes.plus import fit_plus

MakeDump = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize("ahead", [1, 3, 20])
def test_chunks_come_in_order(tmp_path: Path, make_dump: MakeDump, ahead: int) -> None:
    reader = DumpReader(make_dump(tmp_path))
    places = [(layer, chunk) for layer in (1, 0, 1) for chunk in reader.chunks]
    streamed = list(stream_chunks(reader, places, CPU, ahead))
    assert len(streamed) == len(places)
    for chunk, place in zip(streamed, places, strict=True):
        expected = reader.load(*place)
        assert chunk.seq_lens == expected.seq_lens
        for name in "qkv":
            assert torch.equal(getattr(chunk, name), getattr(expected, name))


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_broken_chunk_is_named_after_the_ones_before_it(tmp_path: Path, make_dump: MakeDump, ahead: int) -> None:
    reader = DumpReader(make_dump(tmp_path))
    poisoned, cut = tmp_path / "layer_0/k/2.pt", tmp_path / "layer_0/v/3.pt"
    tensor = torch.load(poisoned, weights_only=True)
    tensor[3, 0, 7] = float("inf")
    torch.save(tensor, poisoned)
    cut.write_bytes(cut.read_bytes()[:1000])
    for path, fault, chunks in ((poisoned, "NaN or infinite", [0, 1, 2, 3]), (cut, "truncated", [1, 3, 0])):
        streamed = stream_chunks(reader, [(0, chunk) for chunk in chunks], CPU, ahead)
        for _ in range(chunks.index(int(path.stem))):
            next(streamed)
        with pytest.raises(DumpError, match=fault) as refusal:
            next(streamed)
        assert str(path) in str(refusal.value)


def test_a_gpu_fits_what_a_cpu_fits(tmp_path: Path, make_dump: MakeDump, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_dump(tmp_path)
    on_cpu = fit(root, device="cpu")
    if not torch.cuda.is_available():
        # The same ways on a CPU: chunks read ahead, all heads in one batch, attention in blocks.
        monkeypatch.setattr("oscar_rotation.fit.layer.stream_chunks", partial(stream_chunks, ahead=2))
        monkeypatch.setattr(CovarianceAccumulator, "_heads", lambda self: [slice(0, self.kv_heads)])
        monkeypatch.setattr(attention, "_fused", attention._blocked)
    on_gpu = fit(root)
    for a, b in ((on_cpu.key, on_gpu.key), (on_cpu.value, on_gpu.value)):
        assert (a.rotations - b.rotations).abs().max() < 1e-3
        assert a.eigenvalues is not None
        assert b.eigenvalues is not None
        assert torch.allclose(a.eigenvalues, b.eigenvalues, rtol=1e-4)


@pytest.mark.parametrize("recipe", [fit_plus, fit_focus])
def test_a_gpu_fits_what_a_cpu_fits_by_recipes_that_read_the_model(
    tmp_path: Path, make_dump: MakeDump, model: Path, monkeypatch: pytest.MonkeyPatch, recipe: Callable[..., Any]
) -> None:
    root = make_dump(tmp_path / "dump")
    on_cpu = recipe(root, OutputWeights(model), device="cpu")
    if not torch.cuda.is_available():
        monkeypatch.setattr(f"{recipe.__module__}.stream_chunks", partial(stream_chunks, ahead=2))
    on_gpu = recipe(root, OutputWeights(model))
    for a, b in ((on_cpu.key, on_gpu.key), (on_cpu.value, on_gpu.value)):
        assert (a.rotations - b.rotations).abs().max() < 1e-3
        assert a.duals is not None
        assert b.duals is not None
        assert (a.duals - b.duals).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_element_that_is_no_number_is_found(dtype: torch.dtype, bad: float) -> None:
    sound = torch.linspace(-3, 3, 2 * 5 * 64).to(dtype).view(2, 5, 64)
    sound[0, 0, 0], sound[0, 0, 1] = torch.finfo(dtype).max, torch.finfo(dtype).min
    assert all_finite(sound, sound[:1])
    for place in ((0, 0, 0), (1, 2, 33), (1, 4, 63)):
        poisoned = sound.clone()
        poisoned[place] = bad
        assert not all_finite(poisoned)
        assert not all_finite(sound, poisoned)
