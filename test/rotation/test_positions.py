"""Moments at every position of a context: against requests that were really moved, and what it is for."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from oscar_rotation.dump import DumpError
from oscar_rotation.fit.rotary import MOST_POSITIONS, rotary_positions
from oscar_rotation.math.balanced import balance, shrunk
from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.math.positions import OFFSETS, Positions
from oscar_rotation.math.rotary_center import turned

D, PAIRS = 32, 12
POSITIONS = Positions(1000.0 ** (-torch.arange(PAIRS, dtype=torch.float64) / PAIRS), 4096)


def moved(x: torch.Tensor, offset: int) -> torch.Tensor:
    cos, sin = POSITIONS.tables(torch.tensor([offset]))
    return turned(x.double(), cos[0], sin[0])


def keys(n: int = 300) -> torch.Tensor:
    """Off center, pairs of different strength; the last channels do not turn."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, n, D, generator=generator) * torch.linspace(2, 0.3, D) + torch.linspace(-3, 2, D)


def test_moments_are_those_of_moved_requests() -> None:
    k, longest = keys(), 300
    offsets = POSITIONS.offsets(longest)
    assert len(offsets) == OFFSETS
    assert int(offsets[0]) == 0
    assert int(offsets[-1]) < 4096 - longest
    everywhere = torch.cat([moved(k, int(offset)) for offset in offsets], 1)
    mean, moment = k.double().mean(1), k.double().mT @ k.double() / k.shape[1]
    torch.testing.assert_close(POSITIONS.vector(mean, longest), everywhere.mean(1))
    expected = everywhere.mT @ everywhere / everywhere.shape[1]
    torch.testing.assert_close(POSITIONS.moment(moment, longest), expected)


def test_what_does_not_turn_stays() -> None:
    mean = torch.ones(D)
    after = POSITIONS.vector(mean, 300)
    assert torch.equal(after[2 * PAIRS :], mean[2 * PAIRS :].double())
    assert float(after[0].abs()) < 0.2  # a radian a token


def test_a_context_as_long_as_the_requests_changes_nothing() -> None:
    here = Positions(POSITIONS.frequencies, 300)
    moment = torch.eye(D).double() + 1
    torch.testing.assert_close(here.moment(moment, 300), moment)


def test_logits_keep_their_values_when_a_request_is_moved() -> None:
    k = keys()
    torch.testing.assert_close(moved(k, 1234) @ moved(k, 1234).mT, k.double() @ k.double().mT)


def test_keys_far_away_are_read_better() -> None:
    """A fit to the beginning loses keys of slow pairs that have turned; one to every position does not."""
    k, longest = keys(), 300
    far = moved(k, 3500).float()
    errors = {}
    for name, of in (("beginning", None), ("everywhere", POSITIONS)):
        center, moment = k.double().mean(1), k.double().mT @ k.double() / k.shape[1]
        if of:
            center, moment = of.vector(center, longest), of.moment(moment, longest)
        stored = shrunk(moment - center[:, :, None] * center[:, None])
        found = balance(stored.mean(0), torch.eye(D).double())
        into, back = found.transform.float(), found.dual.mT.float()
        middle = center.float()[:, None]
        errors[name] = float((coded((far - middle) @ into, D, 0.88, 1.0) @ back + middle - far).square().mean())
    assert errors["everywhere"] < 0.9 * errors["beginning"]


def config(folder: Path, **facts: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 8192} | facts))
    return folder


def test_configurations(tmp_path: Path) -> None:
    found = rotary_positions(config(tmp_path, rope_theta=1e5), 64, None)
    assert found
    assert found.context == 8192
    torch.testing.assert_close(found.frequencies, 1e5 ** (-torch.arange(32, dtype=torch.float64) / 32))
    found = rotary_positions(config(tmp_path, max_position_embeddings=1 << 20), 64, None)
    assert found
    assert found.context == MOST_POSITIONS
    found = rotary_positions(config(tmp_path, partial_rotary_factor=0.5, rope_parameters={"rope_theta": 1e6}), 128, 100)
    assert found
    assert (found.context, len(found.frequencies)) == (100, 32)
    found = rotary_positions(config(tmp_path, model_type="minimax_m2", rotary_dim=64), 128, None)
    assert found
    assert len(found.frequencies) == 32


def test_models_that_read_images(tmp_path: Path) -> None:
    """Text has three equal coordinates, so it turns as in a model with one."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    text = {"model_type": "qwen3_vl_text", "max_position_embeddings": 8192, "rope_parameters": rope}
    nested = rotary_positions(config(tmp_path, model_type="qwen3_vl", text_config=text), 128, None)
    old = {"rope_theta": 5e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    flat = rotary_positions(config(tmp_path, model_type="qwen2_5_vl", **old), 128, None)
    plain = rotary_positions(config(tmp_path, rope_theta=5e6), 128, None)
    assert nested
    assert flat
    assert plain
    assert torch.equal(nested.frequencies, plain.frequencies)
    assert torch.equal(flat.frequencies, plain.frequencies)


def test_scaled_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    found = rotary_positions(config(tmp_path, rope_scaling=scaling, rope_theta=500000.0, hidden_size=256,
                                    num_attention_heads=4), 64, 1000)  # fmt: skip
    assert found
    plain = 500000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(found.frequencies[0], plain[0], check_dtype=False)
    torch.testing.assert_close(found.frequencies[-1], plain[-1] / 8, check_dtype=False)


def test_embedding_of_gpt_oss(tmp_path: Path) -> None:
    """YaRN whose bounds are not rounded: fast pairs turn as without it, slow ones slower by the factor."""
    scaling = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
               "original_max_position_embeddings": 4096}  # fmt: skip
    found = rotary_positions(config(tmp_path, model_type="gpt_oss", rope_scaling=scaling, rope_theta=150000.0,
                                    max_position_embeddings=131072), 64, None)  # fmt: skip
    assert found
    assert found.context == 32768
    plain = 150000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    pairs = torch.arange(32, dtype=torch.float64)
    low, high = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000.0) for turns in (32.0, 1.0))
    share = ((pairs - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(found.frequencies, plain * (1 - share) + plain / 32 * share, rtol=1e-5, atol=0)


def test_unknown_embeddings(tmp_path: Path) -> None:
    assert rotary_positions(tmp_path, 64, None) is None
    assert rotary_positions(config(tmp_path, model_type="other"), 64, None) is None
    dynamic = config(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert rotary_positions(dynamic, 64, None) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DumpError, match=r"config\.json: its rotary embedding"):
        rotary_positions(tmp_path, 64, None)
