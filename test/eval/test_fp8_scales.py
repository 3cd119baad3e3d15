"""A model with scales of an FP8 cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_rotation.dump.writer import DumpWriter
from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.fp8_scales import LARGEST, ROOM, SCALES, scaled_model


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """One layer: keys up to 300 in absolute value, values up to 7."""
    writer = DumpWriter(tmp_path / "dump", total_kv_heads=2)
    k, v = (torch.linspace(-top, 1, 80 * 2 * 64).view(80, 2, 64).bfloat16() for top in (300, 7))
    writer.write(0, 1, k, k, v, [80])
    return tmp_path / "dump"


def model(folder: Path, kind: str, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | config))
    save_file({"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("kind", "place"), [("qwen2", "self_attn.attn"), ("llama", "self_attn")])
def test_scales_lie_where_the_loader_of_the_model_looks(tmp_path: Path, dump: Path, kind: str, place: str) -> None:
    own = model(tmp_path / "model", kind)
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": "x"}}))
    before = (own / "model.safetensors.index.json").read_text()
    made = scaled_model(own, lambda: dump, tmp_path / "made")
    scales = load_file(made / SCALES)
    assert {name: float(x) * LARGEST / ROOM for name, x in scales.items()} == pytest.approx(
        {f"model.layers.0.{place}.k_scale": 300, f"model.layers.0.{place}.v_scale": 7}
    )
    assert set(json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]) > set(scales)
    assert json.loads((made / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    assert load_file(made / "model.safetensors").keys() == {"model.norm.weight"}
    assert (own / "model.safetensors.index.json").read_text() == before
    assert "quantization_config" not in json.loads((own / "config.json").read_text())


def test_models_that_take_no_scales_are_told(tmp_path: Path) -> None:
    def no_dump() -> Path:
        raise AssertionError

    for name, kind, config, fault in (
        ("a", "qwen3", {}, r"not known how SGLang takes them for qwen3 \(qwen2, llama, mistral are\)"),
        ("b", "llama", {"quantization_config": {}}, None),
        ("c", "llama", {"quantization_config": {"quant_method": "awq"}}, "is quantized"),
    ):
        folder = model(tmp_path / name, kind, **config)
        if fault is None:
            (folder / "model.safetensors").unlink()
        with pytest.raises(DataError, match=fault or "are no safetensors"):
            scaled_model(folder, no_dump, tmp_path / "made")
