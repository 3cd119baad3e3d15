"""Codebooks that a fit gives keys: what they save, that they are the same again, and which widths have them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.dump import DumpReader
from oscar_rotation.files.by_head import flat
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit import book_gains, books
from oscar_rotation.fit.bits import measure
from oscar_rotation.fit.held_out import held_out_requests, plan_held_out
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.side_codes import SideCodes, reading
from oscar_rotation.math.attention_weights import attention_kl
from oscar_rotation.recipes.plus import KEY_ROWS, fit_plus

KV_HEADS, GROUP, D = 2, 2, 32
ROUNDS = 4
"""Of Lloyd's algorithm; twenty are for accuracy."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Output projections of two layers."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(2)]
    save_file(
        {x: torch.randn(48, KV_HEADS * GROUP * D, generator=generator) for x in names}, folder / "model.safetensors"
    )
    return folder


def fitted(root: Path, weights: Path, out: Path, *options: str) -> tuple[RotationSet, RotationSet]:
    command = ["fit", str(root), "--out", str(out), "--model", str(weights), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    key, value = sorted(out.iterdir())
    return read_rotation_file(key), read_rotation_file(value)


CODINGS = ("--key-coding", "codebook", "--value-coding", "symmetric")


@pytest.mark.parametrize("recipe", ["plus", "focus"])
def test_books_save_of_what_affine_codes_lose(
    recipe: str, make_dump: Callable[..., Path], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of requests that neither transforms nor points have seen; and a second fit gives the same file."""
    monkeypatch.setattr(books, "ROUNDS", ROUNDS)
    root = make_dump(tmp_path / "dump", requests=[[5], [900, 800], [900], [300, 500]])
    first, again = (
        fitted(root, weights, tmp_path / name, "--recipe", recipe, "--bits", "2.5", *CODINGS) for name in ("a", "b")
    )
    assert first[0].codebooks is not None
    assert again[0].codebooks is not None
    assert torch.equal(first[0].codebooks.points, again[0].codebooks.points)
    assert torch.equal(first[0].codebooks.factors, again[0].codebooks.factors)
    key = first[0]
    dump = DumpReader(root)
    held = plan_held_out(dump, dump.fit_chunks(), "this")
    for layer in range(2):
        assert key.codebooks.of_layer(layer).shared
        forms = {
            "books": SideCodes(KEY_ROWS, "codebook", key.codebooks, key.gains or ()),
            "affine": SideCodes(KEY_ROWS),
        }
        found = {
            name: sum(
                attention_kl(r.q, r.k, reading(key, layer, codes, D)(r.k, 2), D**-0.5)
                for r in held_out_requests(dump, layer, held, torch.device("cpu"))
            )
            for name, codes in forms.items()
        }
        assert (found["books"] < 0.9 * found["affine"]).all(), found


def spent(*sides: RotationSet) -> float:
    """Mean bits in groups of 32; of keys by kv head."""
    found = []
    for side, layer in product(sides, range(2)):
        each = [run for run in side.runs(layer) for _ in range(KV_HEADS)[run.heads]]
        found.append(sum(run.bits + (1 if run.coding == "affine" else 0.5) for run in each) / KV_HEADS)
    return sum(found) / len(found)


def test_widths_say_which_keys_have_books(
    make_dump: Callable[..., Path], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "ROUNDS", 1)
    root = make_dump(tmp_path / "dump", requests=[[5], [300, 280], [130, 200]])
    key, value = fitted(root, weights, tmp_path / "two", "--bits", "k2v3", *CODINGS)
    assert (key.codings, value.codings, value.bits) == (("codebook",) * 2, ("symmetric",) * 2, (3, 3))
    # Only affine codes are clipped.
    assert (set(key.clip_ratios or ()), set(value.clip_ratios or ())) == ({1.0}, {1.0})
    # Of 2.5 bits (2 and 16 / 32) to 4.75 (4 and 32 / 32, 4 and 16 / 32).
    key, value = fitted(root, weights, tmp_path / "mean", "--bits", "3.5", "--group-size", "32", *CODINGS)
    for layer in range(2):
        assert all(run.coding == ("codebook" if run.bits == 2 else "affine") for run in key.runs(layer))
    assert value.codings == ("symmetric", "symmetric")
    assert key.metadata.calibration["mean_bits"] == spent(key, value) <= 3.5


def test_a_mean_is_spent_among_all_codings(
    make_dump: Callable[..., Path], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files state by layer what was chosen."""
    monkeypatch.setattr(books, "ROUNDS", ROUNDS)
    root = make_dump(tmp_path / "dump", requests=[[5], [900, 800], [900], [300, 500]])
    auto = ("--key-coding", "auto", "--value-coding", "auto", "--bits", "2.8", "--group-size", "32")
    key, value = fitted(root, weights, tmp_path / "auto", *auto)
    assert key.metadata.calibration["mean_bits"] == spent(key, value) <= 2.8
    # Two bits of affine codes are 3 a side: only what has no zero point fits this mean.
    assert set(flat(key.codings or ())) == {"codebook"}
    assert "symmetric" in {value.coding(n) for n in range(2)}
    key, value = fitted(root, weights, tmp_path / "keys", "--key-coding", "auto", "--bits", "5", "--group-size", "32")
    assert (key.bits, value.bits, key.codings, value.codings) == ((4, 4), (4, 4), None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--key-coding", "codebook"], "codebook is of keys of 2 bits, not 3; add --bits k2v2, or a mean"),
        (["--bits", "k2v16", "--value-coding", "symmetric"], "symmetric is of values that have codes, not of 16 bits"),
        (["--value-coding", "codebook"], "'codebook' is not one of affine, symmetric, auto"),
        (["--bits", "k2v2", "--key-coding", "auto"], "auto chooses what a mean is spent on; add a mean such as"),
        (["--recipe", "paper", "--key-coding", "codebook"], "--recipe plus or focus takes it"),
        (["--bits", "2.2", "--group-size", "32", *CODINGS], "from 2.5 to 16 with groups of 32, got 2.2"),
    ],
)
def test_codings_that_cannot_be_are_refused(
    options: list[str], message: str, make_dump: Callable[..., Path], weights: Path, tmp_path: Path
) -> None:
    root = make_dump(tmp_path / "dump", requests=[[90, 120], [130, 70]])
    done = CliRunner().invoke(
        app, ["fit", str(root), "--out", str(tmp_path / "out"), "--model", str(weights), *options]
    )
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_keys_are_taken_evenly(monkeypatch: pytest.MonkeyPatch, make_dump: Callable[..., Path], tmp_path: Path) -> None:
    """As many as memory is meant for, of all requests, with the weights that they have among all."""
    root = make_dump(tmp_path / "dump", layers=1, requests=[[5], [70, 33], [64]])
    dump = DumpReader(root)
    held = held_out_requests(dump, 0, dict.fromkeys(dump.fit_chunks(), 0), torch.device("cpu"))
    keys, weights = books.weighted_keys(held, D**-0.5)
    some, of_some = books.weighted_keys(iter(held), D**-0.5, step=5)
    assert torch.equal(some, keys[:, ::5])
    assert torch.equal(of_some, weights[:, ::5])
    assert not weights[:, :8].any()


def test_every_layer_has_the_gain_that_loses_least(
    make_dump: Callable[..., Path], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the output's error on held-out requests; each layer by itself, and with one gain alone that one."""
    monkeypatch.setattr(books, "ROUNDS", 1)
    dump = DumpReader(make_dump(tmp_path / "dump", requests=[[5], [300, 280], [330, 200]]))
    output, cpu = OutputWeights(weights), torch.device("cpu")
    fitted = fit_plus(dump, output).key
    held = plan_held_out(dump, dump.fit_chunks(), "this")
    points = books.fit_books(dump, fitted, None, cpu, held)
    found = book_gains.fit_gains(dump, fitted, points, output, held, None, cpu)
    for layer in range(2):
        reader, (request, *_) = output.reader(layer, KV_HEADS, D), held_out_requests(dump, layer, held, cpu)
        losses = []
        for gain in book_gains.GAINS:
            codes = SideCodes(KEY_ROWS, "codebook", points, (gain, gain))
            read = reading(fitted, layer, codes, D)(request.k, 2)
            losses.append(float(measure(request, [read], [], D**-0.5, reader)[0][0].sum()))
        assert found[layer] == book_gains.GAINS[losses.index(min(losses))]
    monkeypatch.setattr(book_gains, "GAINS", (0.7,))
    assert book_gains.fit_gains(dump, fitted, points, output, held, None, cpu) == (0.7, 0.7)
