"""The laboratory on a model like gpt-oss: windows are read in 16 bits, and sinks take their part of the attention."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.attention import CacheView, prefill_then_decode, sliding_window  # noqa: E402
from accuracy.calibration import calibrate  # noqa: E402
from accuracy.layer_kinds import cached_layers  # noqa: E402
from accuracy.measures.layers import Layers  # noqa: E402
from accuracy.methods.focus import ServedFocus  # noqa: E402
from accuracy.session import Session  # noqa: E402
from reference_model.export import load_tokenizer  # noqa: E402
from reference_model.gpt_oss import GptOssModel  # noqa: E402

START = ROOT / "models" / "reference"
FULL = [1, 3]
LENGTH, PREFILL, CHUNK = 224, 200, 160
TOLD = LENGTH - CHUNK
"""Tokens that a session tells about; the window of 128 hides the first of the text from them."""


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, 4096, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def started(ids: torch.Tensor) -> GptOssModel:
    torch.manual_seed(3)
    model = GptOssModel(START, 1024, ids).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # strong enough that leaving them out shows
            torch.nn.init.normal_(parameter, mean=3.0)
        parameter.data.copy_(parameter.bfloat16())  # so that a router chooses the same from its folder
    return model


@pytest.fixture(scope="module")
def model(started: GptOssModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As it is loaded from its folder, in float32."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    started.save(folder, load_tokenizer(START))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@contextmanager
def patched_sinks(attention: list[Any], logit: float) -> Iterator[None]:
    """Other sink logits for a while."""
    before = [module.sinks.data.clone() for module in attention]
    for module in attention:
        module.sinks.data.fill_(logit)
    yield
    for module, sinks in zip(attention, before, strict=True):
        module.sinks.data.copy_(sinks)


@torch.no_grad()
def test_a_folder_is_the_model_that_was_trained(started: GptOssModel, model: Any, ids: torch.Tensor) -> None:
    torch.testing.assert_close(model(ids).logits, started(ids), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_outliers_are_taken_out_of_the_folder(
    started: GptOssModel, model: Any, ids: torch.Tensor, tmp_path: Path
) -> None:
    """Those of the shipped model, by a change of coordinates that attention does not see."""
    started.save(tmp_path, load_tokenizer(START), outliers=True)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    assert torch.equal(kept(ids).logits, model(ids).logits)
    largest = []
    for one in (kept, model):
        keys = calibrate(one, ids).layers[0].k.square().mean((0, 1))
        largest.append(float(keys.max() / keys.mean()))
    assert largest[0] > 4 * largest[1]


@torch.no_grad()
def test_an_exact_cache_changes_nothing(model: Any, ids: torch.Tensor) -> None:
    """transformers' own attention has windows and sinks, too."""
    session = Session(model, ids, prefill_then_decode(LENGTH, PREFILL, CHUNK))
    told, exact = session.run(CacheView(), hidden=True), model(ids, output_hidden_states=True)
    for x, y in zip((told.logits, *told.hidden), (exact.logits, *exact.hidden_states), strict=True):
        torch.testing.assert_close(x, y[:, -TOLD:], atol=1e-3, rtol=1e-3)
    assert [len(layer.q[0, 0]) for layer, _ in session.activations()] == [TOLD] * len(FULL)


@torch.no_grad()
def test_coded_keys_meet_the_sinks(model: Any, ids: torch.Tensor) -> None:
    """A constant that all coded keys are moved by is a constant on their logits: nothing without sinks, and here it
    takes attention from them or gives it. Layers with windows are not asked for."""
    asked: set[int] = set()
    moved = torch.randn(64, generator=torch.Generator().manual_seed(5))

    def shifted(layer: int, x: torch.Tensor) -> torch.Tensor:
        asked.add(layer)
        return x + moved

    schedule = prefill_then_decode(LENGTH, PREFILL)  # so that those that are told about read all keys coded
    nothing = sliding_window(schedule, 0)
    view = CacheView(shifted, None, 0, nothing, nothing)

    def change() -> torch.Tensor:
        session = Session(model, ids, schedule)
        return (session.run(view).logits - session.run(CacheView()).logits).abs().max()

    with_sinks = change()
    assert asked == set(range(len(FULL)))
    assert cached_layers(model) == FULL
    attention = [model.model.layers[layer].self_attn for layer in FULL]
    with patched_sinks(attention, -1e4):
        assert 20 * change() < with_sinks


@torch.no_grad()
def test_fits_and_measures_count_the_sinks(model: Any, ids: torch.Tensor) -> None:
    calibration = calibrate(model, ids)
    assert [x.shape for x in calibration.sinks if x is not None] == [(8,), (8,)]
    cos, sin = calibration.rotary(LENGTH)
    assert cos.shape == sin.shape == (LENGTH, 64)
    method = ServedFocus(sink=16, recent=32)
    method.fit(calibration)
    layers = Layers(Session(model, ids, prefill_then_decode(LENGTH, PREFILL)))
    told = layers.measure(method)["attention_kl"]
    with patched_sinks([module for _, module in layers.activations], 100.0):  # nothing is left for tokens
        nothing = layers.measure(method)["attention_kl"]
    assert all(abs(x) < 1e-4 < y for x, y in zip(nothing, told, strict=True))
