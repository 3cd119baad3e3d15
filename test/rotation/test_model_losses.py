"""Bits by what the whole model loses: attention, the measurement, plans made of it, and the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from oscar_kernels.layout import BITS
from oscar_rotation.cli import app
from oscar_rotation.errors import DumpError
from oscar_rotation.files.by_head import flat
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.fit import bits, texts
from oscar_rotation.fit import model_losses as measuring
from oscar_rotation.fit.bits import by_model
from oscar_rotation.fit.model_losses import model_losses, stored_attention
from oscar_rotation.fit.result import FitResult
from oscar_rotation.fit.side_codes import SideCodes
from oscar_rotation.fit.texts import LENGTH, SEQUENCES, read_documents, sequences
from oscar_rotation.math.hadamard import sylvester_hadamard
from oscar_rotation.math.positions import Positions
from oscar_rotation.recipes.plus import KEY_ROWS, VALUE_ROWS

MODEL = Path(__file__).resolve().parents[2] / "models" / "reference"
LAYERS, KV_HEADS, D = 4, 2, 128
runner = CliRunner()


@pytest.fixture(scope="module")
def model() -> Any:
    """The shipped model in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of the standard library and a chat about it."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    chat = [{"role": "user", "content": source[:200]}, {"role": "assistant", "content": source[200:900]}]
    path.write_text("\n".join(json.dumps(x) for x in ({"text": source}, {"messages": chat})) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def ids(text: Path) -> torch.Tensor:
    """Two short sequences of it."""
    return sequences(read_documents(text), MODEL)[:2, :480]


def exactly(x: torch.Tensor) -> torch.Tensor:
    """A cache that loses nothing."""
    return x


def roughly(x: torch.Tensor) -> torch.Tensor:
    """A cache that keeps little of a number."""
    return (x / 3).round() * 3


def lost(x: torch.Tensor) -> torch.Tensor:
    """A cache that keeps nothing."""
    return torch.zeros_like(x)


def test_attention_of_stored_tokens_in_float64() -> None:
    """The sink and the recent window are read exactly, what lies between as stored."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, n, 32, generator=generator) for heads, n in ((4, 5), (2, 400), (2, 400)))
    for read_k, read_v in ((roughly, None), (None, roughly), (None, None)):
        found = stored_attention(q, k, v, 0.3, read_k, read_v)
        for batch in range(2):
            for head in range(4):
                for row in range(5):
                    at = 395 + row
                    tokens = torch.arange(at + 1)
                    between = ((tokens >= 64) & (tokens <= at - 256))[:, None]
                    keys, values = (
                        torch.where(between, (x if read is None else read(x))[batch, head // 2, : at + 1],
                                    x[batch, head // 2, : at + 1]).double()
                        for x, read in ((k, read_k), (v, read_v))
                    )  # fmt: skip
                    p = (keys @ q[batch, head, row].double() * 0.3).softmax(0)
                    assert torch.allclose(found[batch, head, row].double(), p @ values, atol=1e-5)


def test_one_side_of_one_layer_at_a_time(model: Any, ids: torch.Tensor) -> None:
    """What is exact costs nothing; what is not costs where it is, and only there."""
    before, steps = model.config._attn_implementation, []
    for layer, side in ((3, 0), (1, 1)):
        reads = [[exactly, exactly] for _ in range(LAYERS)]
        reads[layer][side] = lost
        found = model_losses(model, ids, [tuple(x) for x in reads], 64, None, lambda *at: steps.append(at))
        assert float(found[layer, side]) > 1e-5
        found[layer, side] = 0
        assert float(found.max()) < 1e-7
    assert steps[-1] == (2 * LAYERS, 2 * LAYERS)
    assert model.config._attn_implementation == before


def test_every_side_is_stored_once(model: Any, ids: torch.Tensor) -> None:
    """While one layer is stored no other reads through it."""
    calls: list[tuple[int, int]] = []

    def counted(layer: int, side: int) -> measuring.Read:
        def read(x: torch.Tensor) -> torch.Tensor:
            calls.append((layer, side))
            return x

        return read

    model_losses(model, ids, [(counted(layer, 0), counted(layer, 1)) for layer in range(LAYERS)], 64)
    assert calls == [(layer, side) for layer in range(LAYERS) for side in (0, 1)]


def test_positions_do_not_matter_to_what_does_not_turn(model: Any, ids: torch.Tensor) -> None:
    """Sequences are moved along the context: values cost what they cost at its beginning."""
    config = model.config.get_text_config()
    pairs = torch.arange(D // 2).double()
    positions = Positions(float(config.rope_parameters["rope_theta"]) ** (-2 * pairs / D), 4096)
    reads = [(exactly, roughly)] * LAYERS
    here, there = (model_losses(model, ids, reads, 64, at)[:, 1] for at in (None, positions))
    assert torch.allclose(here, there, rtol=0.02)


def files(layers: int = LAYERS) -> FitResult:
    """Hadamard, as files of two bits hold it."""
    matrices = sylvester_hadamard(D).float().expand(layers, -1, -1).contiguous()
    side = RotationSet(
        matrices, None, (0.88,) * layers, RotationMetadata(recipe="plus"), matrices, None, (1.0,) * layers
    )
    return FitResult(replace(side, centers=torch.zeros(layers, KV_HEADS, D)), side)


def test_wider_codes_save_what_they_save_of_the_output(model: Any, ids: torch.Tensor) -> None:
    """At two bits the loss is the model's. Rows are clipped so hard that every side loses more than float32 does."""
    rows = dict.fromkeys(BITS, (0.2, 0.0))
    by_head = torch.rand(
        LAYERS, 2, len(BITS), KV_HEADS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    dump = by_head.sum(-1)
    own = by_model(by_head, files(), (SideCodes(rows), SideCodes(rows)), model, ids[:, :460], None, 64)
    found = own.sum(-1)
    assert torch.allclose(own / found[..., None], by_head / dump[..., None])
    assert torch.allclose(found / found[..., :1], dump / dump[..., :1])
    assert float(found[..., 0].min()) > 0
    # The same, the codec spelled out.
    from oscar_rotation.math.fitted_rows import coded

    h = sylvester_hadamard(D).float()
    reads = [tuple((lambda x, row=row: coded(x @ h, 64, *row) @ h.mT) for row in (rows[2], rows[2]))] * LAYERS
    again = model_losses(model, ids[:, :460], reads, 128)  # type: ignore[arg-type]
    assert torch.allclose(found[..., 0], again, rtol=1e-3)


def test_another_model_is_refused(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(DumpError, match="the dump has 3 layers, the model that --text measures with has 4"):
        by_model(torch.ones(3, 2, 3, 1), files(3), (SideCodes(KEY_ROWS), SideCodes(VALUE_ROWS)), model, ids, None, 64)


def test_attention_that_is_more_than_this_one_is_refused(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sliding window, for instance: reading past it would measure another model."""
    monkeypatch.setattr(model.model.layers[1].self_attn, "sliding_window", 256)
    with pytest.raises(DumpError, match="its attention has sliding_window, which --text does not know"):
        by_model(
            torch.ones(LAYERS, 2, 3, 1), files(), (SideCodes(KEY_ROWS), SideCodes(VALUE_ROWS)), model, ids, None, 64
        )
    assert measuring._stored is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "holds no text"),
        ('{"text": "a"}\n{"txt": "b"}\n', ":2: a line needs 'text' or 'messages'"),
        ('{"messages": [{"role": "user"}]}\n', ":1: a line needs"),
        ('"a"\n', ":1: a line needs"),
        ("a\n", "is no JSON Lines of text"),
    ],
    ids=["empty", "other", "message", "string", "plain"],
)
def test_text_that_is_none(tmp_path: Path, content: str, fault: str) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DumpError, match=fault):
        read_documents(path)


def test_sequences_are_spread_over_the_text(text: Path) -> None:
    """As many as are measured, and no fewer tokens than one of them needs."""
    found = sequences(read_documents(text), MODEL)
    assert found.shape == (SEQUENCES, LENGTH)
    assert len({tuple(row[:32].tolist()) for row in found}) == SEQUENCES
    with pytest.raises(DumpError, match=f"--text needs {LENGTH} or more"):
        sequences(("too short",), MODEL)
    with pytest.raises(DumpError, match="--text needs the model's tokenizer"):
        sequences(("a",), text.parent)


def test_the_command(
    make_dump: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is the model's, keeps its budget, and the files state what it was made of."""
    monkeypatch.setattr(texts, "SEQUENCES", 2)
    size = {"layers": LAYERS, "q_heads": 4, "kv_heads": KV_HEADS, "head_dim": D}
    dump = make_dump(tmp_path / "dump", requests=[[90, 120], [130, 200]], **size)
    plans = []
    for name, more in (("attention", []), ("model", ["--text", str(text)])):
        command = ["fit", str(dump), "--out", str(tmp_path / name), "--model", str(MODEL), "--bits", "2.75"]
        found = runner.invoke(app, [*command, "--context", "0", "--device", "cpu", *more])
        assert found.exit_code == 0, found.output
        sides = [read_rotation_file(path) for path in sorted((tmp_path / name).glob("*.safetensors"))]
        assert all(("bits_text_tokens" in side.metadata.calibration) == bool(more) for side in sides)
        plans.append([side.bits or (2,) * LAYERS for side in sides])
        means = [sum(flat([width])) / len(flat([width])) for side in plans[-1] for width in side]
        assert sum(means) <= 2 * LAYERS * 2.5
    assert plans[0] != plans[1]


@pytest.mark.parametrize("room", [True, False])
def test_too_little_room(
    make_dump: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """For float32 alone it is said, for the model at all it is refused."""

    def load(folder: Path, device: torch.device, overrides: Any) -> Any:
        if not room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)

    monkeypatch.setattr(bits, "load_model", load)
    monkeypatch.setattr(texts, "SEQUENCES", 1)
    size = {"layers": LAYERS, "q_heads": 4, "kv_heads": KV_HEADS, "head_dim": D}
    dump = make_dump(tmp_path / "dump", requests=[[90, 120], [130, 200]], **size)
    command = ["fit", str(dump), "--out", str(tmp_path / "out"), "--model", str(MODEL), "--bits", "2.75"]
    found = runner.invoke(app, [*command, "--text", str(text), "--context", "0", "--device", "cpu"])
    assert found.exit_code == (0 if room else 1)
    said = "measured in torch.bfloat16" if room else "--text needs room for the model on cpu"
    assert said in found.output + found.stderr


@pytest.mark.parametrize("goal", [[], ["--bits", "k3v2"]], ids=["none", "widths"])
def test_text_without_a_mean(goal: list[str], text: Path, tmp_path: Path) -> None:
    found = runner.invoke(app, ["fit", str(tmp_path), "--out", str(tmp_path), "--text", str(text), *goal])
    assert found.exit_code == 2
    assert "has no meaning without a mean of --bits" in found.output


def test_text_and_the_published_recipe(text: Path, tmp_path: Path) -> None:
    command = ["fit", str(tmp_path), "--out", str(tmp_path), "--recipe", "paper", "--text", str(text)]
    found = runner.invoke(app, command)
    assert found.exit_code == 2
    assert "has no meaning for --recipe paper" in found.output
