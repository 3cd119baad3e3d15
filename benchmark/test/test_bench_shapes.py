"""Shapes of the serving benchmarks: what SGLang makes of their configs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark" / "serving"))
import shapes
from rotations import rotations_of
from shapes import SHAPES, config_of, write_model
from subjects import MODES, subject

from oscar_rotation import defaults
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_tools.calibration.errors import HarnessError
from support.server_answers import INT2, answering, server_info

SERVING = sorted(Path(shapes.__file__).parent.glob("*.py"))
KV_HEADS = {
    "qwen3-4b": (36, 8, 128), "qwen3-8b": (36, 8, 128), "qwen3-32b": (64, 8, 128), "gpt-oss-20b": (24, 8, 64),
    "qwen3-next-80b-a3b": (48, 2, 256), "qwen3.6-35b-a3b": (40, 2, 256), "qwen3.6-27b": (64, 4, 256),
    "glm-4.7": (92, 8, 128), "minimax-m2.7": (62, 8, 128),
}  # fmt: skip
"""Layers, kv heads, head_dim."""


@pytest.mark.parametrize("shape", SHAPES)
def test_sglang_reads_every_shape(shape: str, tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    what = subject(None, shape, tmp_path)
    config = ModelConfig(str(what.folder))
    assert (config.num_hidden_layers, config.get_num_kv_heads(1), config.head_dim) == KV_HEADS[shape]
    assert ("--skip-tokenizer-init" in what.flags) == (not config.is_multimodal)
    assert config.context_len >= 131072


def test_caches_that_are_fitted() -> None:
    """What a user gets who sets nothing, and others by their bits."""
    fits = {name: mode.fit for name, mode in MODES.items() if mode.fit}
    assert fits.pop("int2") == defaults.BITS
    assert all(name == bits for name, bits in fits.items())


def test_matrices_are_of_the_layers_that_attend_to_everything(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 4}
    kinds = ["linear_attention", "full_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"layer_types": kinds}))
    for path in rotations_of(tmp_path, defaults.BITS).values():
        assert read_rotation_file(path).layer_ids == (1, 3)


def test_results_say_what_servers_say() -> None:
    """Not what they were started with: another kind of cache is no result."""
    with answering(server_info(INT2 | {"bits_at_128k": 3.3})) as url:
        server = SimpleNamespace(url=url)
        assert MODES["int2"].facts(server)["bits"] == 3.3
        with pytest.raises(HarnessError, match="a stock cache: the server says that its cache is INT2, recipe plus"):
            MODES["fa3"].facts(server)


@pytest.mark.parametrize("script", SERVING, ids=lambda path: path.stem)
def test_whoever_starts_a_server_asks_it(script: Path) -> None:
    text = script.read_text()
    assert ("serve(" not in text) or ".facts(server)" in text


@pytest.mark.parametrize(
    ("shape", "layers"),
    [("qwen3-8b", 36), ("qwen3-8b:9", 9), ("qwen3-next-80b-a3b", 12), ("qwen3.6-35b-a3b:20", 5), ("gpt-oss-20b", 12)],
)
def test_layers_that_attend_to_everything(shape: str, layers: int) -> None:
    assert shapes.attending_layers(shape, windows=False) == layers
    assert shapes.attending_layers(shape, windows=True) == (24 if shape == "gpt-oss-20b" else layers)


def test_fewer_layers_keep_whole_periods() -> None:
    layers = config_of("qwen3-next-80b-a3b:12")["layer_types"]
    assert layers == (["linear_attention"] * 3 + ["full_attention"]) * 3
    assert config_of("qwen3-8b:7")["num_hidden_layers"] == 7
    for wrong in ("qwen3-next-80b-a3b:10", "qwen3-8b:37", "qwen3-8b:0", "qwen2"):
        with pytest.raises(ValueError, match=r"layers|no shape"):
            config_of(wrong)


def test_a_model_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 12}))
    what = subject(tmp_path, "qwen3-8b", tmp_path / "unused")
    assert (what.name, what.vocabulary) == (tmp_path.name, 12)
    assert "dummy" not in what.flags


@pytest.mark.parametrize(("shape", "images"), [("qwen3-4b:1", False), ("qwen3.6-27b:4", True)])
def test_a_tokenizer_is_written_once(shape: str, images: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    monkeypatch.setattr(shapes, "write_tokenizer", lambda folder, config: written.append(folder))
    monkeypatch.setattr(shapes, "write_processor", lambda folder: None)
    write_model(tmp_path, shape)
    assert len(written) == images
    written.clear()
    write_model(tmp_path, shape, tokenizer=True)
    assert len(written) == 1
