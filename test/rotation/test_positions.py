"""Moments at every position of a context: against requests that were really moved, and what it is for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from oscar_rotation.cli import app
from oscar_rotation.dump import DumpError, DumpManifest
from oscar_rotation.fit.rotary import rotary_positions
from oscar_rotation.math.balanced import balance, shrunk
from oscar_rotation.math.fitted_rows import coded
from oscar_rotation.math.positions import Positions
from oscar_rotation.math.rotary_center import turned
from oscar_rotation.report.inspect import describe

runner = CliRunner()

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
    """At every offset of the context, each as often as requests of all lengths reach it."""
    k, longest = keys(20), 300
    last = 4096 - longest
    offsets = torch.arange(last)
    weight = (last - offsets - 0.5).double()
    weight /= weight.sum()
    mean, moment = k.double().mean(1), k.double().mT @ k.double() / k.shape[1]
    means, moments = torch.zeros_like(mean), torch.zeros_like(moment)
    for offset, share in zip(offsets.tolist(), weight, strict=True):
        there = moved(k, offset)
        means += share * there.mean(1)
        moments += share * there.mT @ there / k.shape[1]
    torch.testing.assert_close(POSITIONS.vector(mean, longest), means, rtol=0, atol=1e-3)
    torch.testing.assert_close(POSITIONS.moment(moment, longest), moments, rtol=0, atol=5e-3)


def test_held_out_requests_are_spread_over_the_context() -> None:
    offsets = POSITIONS.offsets(300, 64)
    assert int(offsets[0]) == 0
    assert 3000 < int(offsets[-1]) < 4096 - 300


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


K = 1024


def residuals(context: int, span: tuple[int, int]) -> torch.Tensor:
    """Energy of keys of one span of positions about a center that was fitted for ``context``, by pair of the slow
    half; 1 is that without a center. Theta and head as in models of 262,144 positions."""
    pairs = 64
    frequencies = 5e6 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    mean = torch.full((2 * pairs,), 0.5**0.5, dtype=torch.float64)
    center = Positions(frequencies, context).vector(mean, K)
    angles = torch.linspace(*span, 512, dtype=torch.float64)[:, None] * frequencies
    turned_keys = torch.cat([angles.cos() - angles.sin(), angles.cos() + angles.sin()], 1) * 0.5**0.5
    return (turned_keys - center).square().unflatten(1, (2, pairs)).sum(1).mean(0)[pairs // 2 :]


def test_a_center_for_the_models_own_context_helps_in_every_span_of_it() -> None:
    """One for the first eighth of the context is worth less than none in the last half."""
    spans = ((0, 32 * K), (32 * K, 64 * K), (64 * K, 128 * K), (128 * K, 256 * K))
    own = [float(residuals(256 * K, span).mean()) for span in spans]
    assert max(own) < 0.7
    assert float(residuals(32 * K, spans[-1]).mean()) > 1


def test_fast_pairs_have_no_center() -> None:
    """Samples of a long context would take what they happen to meet for a center."""
    frequencies = 1e6 ** (-torch.arange(64, dtype=torch.float64) / 64)
    for context in (8 * K, 32 * K, 1024 * K):
        center = Positions(frequencies, context).vector(torch.ones(128), K)
        energy = center.view(2, 64).square().sum(0)
        assert float(energy[frequencies * (context - K) > 100].max()) < 2 * 0.02**2


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
    assert found.context == 1 << 20
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
    inner = {"model_type": "qwen3", "max_position_embeddings": 8192, "rope_theta": 5e6}
    intern = rotary_positions(config(tmp_path, model_type="internvl_chat", llm_config=inner), 128, None)
    plain = rotary_positions(config(tmp_path, rope_theta=5e6), 128, None)
    assert nested
    assert flat
    assert intern
    assert plain
    assert torch.equal(intern.frequencies, plain.frequencies)
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
    assert found.context == 131072
    plain = 150000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    pairs = torch.arange(32, dtype=torch.float64)
    low, high = (32 * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000.0) for turns in (32.0, 1.0))
    share = ((pairs - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(found.frequencies, plain * (1 - share) + plain / 32 * share, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["gemma3_text", "laguna", "mellum", "olmo3"])
def test_kinds_of_layers_with_embeddings_of_their_own(kind: str, tmp_path: Path) -> None:
    """Layers with windows have no rows: the other ones count, as transformers has them; flags change them in place."""
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kinds["full_attention"] = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    made = AutoConfig.for_model(kind, head_dim=64, rope_parameters=deepcopy(kinds))
    family = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    wanted = getattr(module, f"{family.capitalize()}RotaryEmbedding")(made).full_attention_inv_freq
    newer = config(tmp_path, model_type=kind, rope_parameters=kinds)
    found = rotary_positions(newer, 64, 32768)
    assert found
    torch.testing.assert_close(found.frequencies.float(), wanted)
    found = rotary_positions(newer, 64, None, {"rope_parameters": {"full_attention": {"factor": 2.0}}})
    assert found
    torch.testing.assert_close(found.frequencies.float(), 4 * wanted)
    assert found.context == 8192  # as SGLang counts: such factors stretch none


def test_gemma_as_it_was_published(tmp_path: Path) -> None:
    facts = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    found = rotary_positions(config(tmp_path, model_type="gemma3_text", **facts), 64, 100)
    assert found
    torch.testing.assert_close(found.frequencies, 1e6 ** (-torch.arange(32, dtype=torch.float64) / 32) / 8)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "stated", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}]
)
def test_overrides_are_those_of_the_server(tmp_path: Path, name: str, stated: dict[str, object]) -> None:
    """By the new name of the field or the old one, over a configuration that has either."""
    model = config(tmp_path, **stated)
    overrides = {name: YARN, "max_position_embeddings": 32768}
    plain, found = rotary_positions(model, 128, None), rotary_positions(model, 128, None, overrides)
    assert plain
    assert found
    assert (plain.context, found.context) == (8192, 32768)
    torch.testing.assert_close(found.frequencies[[0, -1]], plain.frequencies[[0, -1]] / torch.tensor([1, 4]))
    assert found.rope == {"rotary_dim": 128, "rope_theta": 1e6, **YARN}


def test_a_factor_that_stretches_the_context_is_counted_as_servers_do(tmp_path: Path) -> None:
    stretched = {"rope_type": "yarn", "factor": 4.0}
    found = rotary_positions(config(tmp_path, rope_theta=1e6), 128, None, {"rope_scaling": stretched})
    assert found
    assert found.context == 32768


def test_unknown_embeddings(tmp_path: Path) -> None:
    assert rotary_positions(tmp_path, 64, None) is None
    assert rotary_positions(config(tmp_path, model_type="other"), 64, None) is None
    dynamic = config(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert rotary_positions(dynamic, 64, None) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DumpError, match=r"config\.json: its rotary embedding"):
        rotary_positions(tmp_path, 64, None)


def test_a_fit_reaches_as_far_as_the_server_of_its_dump(
    tmp_path: Path, model: Path, make_dump: Callable[..., Path]
) -> None:
    """The dump states the overrides of its server; files state the context and the embedding they were fitted for."""
    config(model, model_type="llama", rope_theta=1e6)
    overrides = {"rope_scaling": YARN, "max_position_embeddings": 32768}
    dump = make_dump(tmp_path / "dump")
    sizes = {"num_layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32}
    DumpManifest(weights=str(model), model_overrides=overrides, **sizes).write(dump)
    stated = {}
    for name, flags in (("dump", []), ("none", ["--json-model-override-args", "{}"]), ("given", ["--context", "512"])):
        result = runner.invoke(app, ["fit", str(dump), "--out", str(tmp_path / name), *flags])
        assert result.exit_code == 0, result.output
        stated[name] = describe(next((tmp_path / name).glob("k_*")))
        assert f", for {stated[name]['calibration']['context']:,} positions" in result.output
        assert ("the dump's server ran with --json-model-override-args" in result.output) == (name == "none")
    assert stated["dump"]["positions"] == "32,768 positions (yarn, rope_theta 1e+06, factor 4)"
    assert stated["none"]["positions"] == "8,192 positions (not scaled, rope_theta 1e+06)"
    assert stated["given"]["positions"] == "512 positions (yarn, rope_theta 1e+06, factor 4)"


@pytest.mark.parametrize(("text", "fault"), [("{", "is not JSON"), ("[1]", "is not a JSON object")])
def test_overrides_that_are_none(tmp_path: Path, text: str, fault: str) -> None:
    result = runner.invoke(app, ["fit", str(tmp_path), "--out", str(tmp_path), "--json-model-override-args", text])
    assert result.exit_code == 2
    assert fault in result.output
