"""The laboratory on a model of linear and full attention layers: only the latter have a cache to read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation")]

from accuracy.attention import CacheView, prefill_then_decode, sliding_window  # noqa: E402
from accuracy.calibration import calibrate  # noqa: E402
from accuracy.layer_kinds import cached_layers  # noqa: E402
from accuracy.models import check_head  # noqa: E402
from accuracy.session import Session  # noqa: E402
from reference_model.export import load_tokenizer  # noqa: E402
from reference_model.hybrid import SHAPE, HybridModel  # noqa: E402

FULL = [layer for layer, kind in enumerate(SHAPE["layer_types"]) if kind == "full_attention"]
LENGTH, PREFILL, CHUNK, VOCABULARY = 96, 80, 32, 512
TOLD = LENGTH - CHUNK
"""Tokens that a session tells about: those that find something in the cache."""


@pytest.fixture(scope="module")
def trained() -> HybridModel:
    torch.manual_seed(3)
    return HybridModel(VOCABULARY, 256).eval()


@pytest.fixture(scope="module")
def model(trained: HybridModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As it is loaded from its folder, in float32; the training's weights were rounded to BF16 when it was saved."""
    folder = tmp_path_factory.mktemp("hybrid")
    trained.save(folder, load_tokenizer(ROOT / "models" / "reference"))
    config = json.loads((folder / "config.json").read_text())
    # What servers ask of it.
    assert (config["dtype"], config["full_attention_interval"]) == ("bfloat16", FULL[0] + 1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def test_a_folder_is_the_model_that_was_trained(trained: HybridModel, model: Any, ids: torch.Tensor) -> None:
    weights = {name: tensor.bfloat16().float() for name, tensor in trained.model.state_dict().items()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(ids).logits, trained(ids), atol=0.05, rtol=0.05)
    assert trained.model.dtype == torch.float32


@torch.no_grad()
def test_an_exact_cache_changes_nothing(model: Any, ids: torch.Tensor) -> None:
    session = Session(model, ids, prefill_then_decode(LENGTH, PREFILL, CHUNK))
    told, exact = session.run(CacheView(), hidden=True), model(ids, output_hidden_states=True)
    torch.testing.assert_close(told.logits, exact.logits[:, -TOLD:], atol=1e-4, rtol=1e-4)
    for x, y in zip(told.hidden, exact.hidden_states, strict=True):
        torch.testing.assert_close(x, y[:, -TOLD:], atol=1e-4, rtol=1e-4)
    assert [len(layer.q[0, 0]) for layer, _ in session.activations()] == [TOLD] * len(FULL)
    assert len(calibrate(model, ids).layers) == len(FULL)


@torch.no_grad()
def test_full_attention_layers_are_read_by_their_order(model: Any, ids: torch.Tensor) -> None:
    """A quantizer is asked for layers 0, 1, ... of those with a cache, and what it answers is what is read."""
    asked: list[int] = []

    def coarse(layer: int, x: torch.Tensor) -> torch.Tensor:
        asked.append(layer)
        return torch.zeros_like(x) if layer == 1 else x

    schedule = prefill_then_decode(LENGTH, PREFILL, CHUNK)
    exact = model(ids).logits
    window = sliding_window(schedule, 24)
    view = CacheView(coarse, coarse, 16, window, window)
    read, exact = Session(model, ids, schedule).run(view).logits, exact[:, -TOLD:]
    assert cached_layers(model) == FULL
    assert set(asked) == set(range(len(FULL)))
    first = int((window > 16).nonzero()[0]) - CHUNK
    assert first > 0
    torch.testing.assert_close(read[:, :first], exact[:, :first], atol=1e-4, rtol=1e-4)
    assert (read - exact)[:, -1].abs().max() > 1e-3


def test_a_model_that_changes_its_logits_is_refused(model: Any) -> None:
    check_head(model.config, "hybrid")
    with pytest.raises(SystemExit, match="error: gemma has final_logit_softcapping"):
        check_head(Gemma2Config(), "gemma")
