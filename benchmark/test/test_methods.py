"""Each method reproduces a number of its paper, or one that can be derived by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.attention import prefill_then_decode  # noqa: E402
from accuracy.calibration import Calibration, LayerActivations  # noqa: E402
from accuracy.methods import all_methods  # noqa: E402
from accuracy.methods.base import RowMethod  # noqa: E402
from accuracy.methods.error_feedback import feed_back  # noqa: E402
from accuracy.methods.kitty import boosted  # noqa: E402
from accuracy.methods.kivi import blocks_exact_from  # noqa: E402
from accuracy.methods.oscar import lloyd_max_rows  # noqa: E402
from accuracy.methods.rotatekv import RotateKV, turned  # noqa: E402
from accuracy.quantizers import lloyd_max, lloyd_max_round, uniform  # noqa: E402
from accuracy.server import transforms_set  # noqa: E402
from oscar_kernels.codec import clip, decode_rows, dequantize, encode_rows, quantize  # noqa: E402
from oscar_kernels.layout import RowLayout  # noqa: E402
from oscar_rotation.files.rotation_set import check_rotation_set  # noqa: E402
from oscar_rotation.math.covariance import QueryCovariance  # noqa: E402
from oscar_rotation.report.layer_report import importance  # noqa: E402

D, HEADS = 128, 2


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Two layers whose queries and keys are anisotropic, in bases of their own."""
    generator = torch.Generator().manual_seed(1)

    def activations(heads: int) -> torch.Tensor:
        basis = torch.linalg.qr(torch.randn(D, D, generator=generator))[0]
        x = torch.randn(900, heads, D, generator=generator) * torch.logspace(-1, 1, D)
        return (x + 0.5) @ basis

    layers = [LayerActivations(activations(4), activations(HEADS), activations(HEADS)) for _ in range(2)]
    readers = [torch.eye(D).expand(HEADS, -1, -1) * (1 + n) for n in range(2)]
    return Calibration(layers, [300, 600], readers, rotary)


def rotary(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of a rotary embedding with base 10000."""
    angles = torch.arange(n)[:, None] * 10000 ** (-torch.arange(0, D, 2) / D)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


class Fitted(dict):
    """Methods by name, fitted when they are asked for."""

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        self.calibration, self.methods = calibration, all_methods()

    def __missing__(self, name: str):
        self[name] = self.methods[name]
        self[name].fit(self.calibration)
        return self[name]


@pytest.fixture(scope="module")
def fitted(calibration: Calibration) -> dict:
    return Fitted(calibration)


def vectors(tokens: int = 300, seed: int = 2) -> torch.Tensor:
    return torch.randn(1, HEADS, tokens, D, generator=torch.Generator().manual_seed(seed))


def noise(method, x: torch.Tensor) -> tuple[float, float]:
    """Relative squared error of keys and values behind 64 tokens, blocks that are not full left out."""
    whole = (x.shape[2] - 64) // 128 * 128
    span = slice(64, 32 + whole)
    errors = []
    for coded in (method.keys(0, x), method.values(0, x)):
        errors.append(float((coded - x)[:, :, span].square().sum() / x[:, :, span].square().sum()))
    return errors[0], errors[1]


# OSCAR tables 1 (at 32K) and 2 (at 128K); OScaR has 32-token groups and a norm per token; vLLM's slot of 104 bytes.
@pytest.mark.parametrize(
    ("name", "context", "published"),
    [
        ("BF16", 131072, 16.0),
        ("KIVI-2", 32768, 2.25),
        ("KIVI-2*", 32768, 2.26),
        ("Kitty", 32768, 2.39),
        ("OSCAR g128", 32768, 2.38),
        ("OSCAR g128", 131072, 2.28),
        ("plus g128", 131072, 2.28),
        ("RotateKV g128", 1 << 24, 2.25),
        ("QuaRot-INT2 g128 bare", 131072, 2.25),
        ("naive INT2 g128", 131072, 2.25),
        ("Saw-INT4", 131072, 4.25),
        ("TurboQuant K3V3", 131072, 104 * 8 / 256),
        ("TurboQuant K4V4", 131072, 136 * 8 / 256),
        ("OScaR g32", 10**9, 3 + 16 / 128 / 2),
    ],
)
def test_published_bits_per_element(name: str, context: int, published: float) -> None:
    assert all_methods()[name].bits_per_element(D, context) == pytest.approx(published, abs=0.0051)


def test_registry_is_complete() -> None:
    """Every row that the report promises is there; that each of them runs is tested for every geometry."""
    promised = (
        "naive INT3 g128", "QuaRot-INT2 g64", "TurboQuant-QJL K3V3", "OScaR g32 w/o rotation", "OSCAR g32",
        "OSCAR g128, per kv head", "KVarN K4V2", "KVarN K2V2", "Block-GTQ K2V2", "FP8", "NVFP4",
        "plus g128, 16 points per pair",
    )  # fmt: skip
    known = all_methods()
    for name in promised:
        assert name in known


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_lloyd_max_reproduces_max_1960(bits: int, distortion: float) -> None:
    """Squared errors of the best quantizers of a normal variable; 2 bits have levels at 0.4528 and 1.510."""
    levels, edges = lloyd_max(bits)
    x = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    weight = torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5 * (x[1] - x[0])
    error = float(((x - lloyd_max_round(x, bits).double()).square() * weight).sum())
    assert error == pytest.approx(distortion, rel=2e-3)
    if bits == 2:
        torch.testing.assert_close(levels[2:], torch.tensor([0.4528, 1.5104]).double(), atol=1e-4, rtol=0)
        assert float(edges[2]) == pytest.approx(0.9816, abs=1e-4)


@pytest.mark.parametrize(("bits", "distortion"), [(3, 0.03454), (4, 0.009497)])
def test_turboquant_distortion(bits: int, distortion: float, fitted: dict) -> None:
    """Behind a random rotation every vector has about the distortion of a normal one, outliers too (theorem 1)."""
    x = vectors(2000)
    x[..., 5] += 30
    values = noise(fitted[f"TurboQuant-QJL K{bits}V{bits}"], x)[1]
    # A coordinate of a random direction in 128 dimensions has slightly thinner tails than a normal variable.
    assert values == pytest.approx(distortion, rel=0.06)
    keys = fitted[f"TurboQuant K{bits}V{bits}"].keys(0, x)
    torch.testing.assert_close(keys.norm(dim=-1), x.norm(dim=-1), rtol=2**-8, atol=0)


def test_turboquant_residual_is_unbiased(calibration: Calibration) -> None:
    """Averaged over sketches, the coded key has the key's inner product with any query (QJL, lemma 3.2)."""
    method = all_methods()["TurboQuant-QJL K3V3"]
    k, q = vectors(1)[:, :1], vectors(1, seed=9)[:, :1]
    method.fit(calibration)
    exact, means = float((k * q).sum()), []
    for seed in range(400):
        method.sketch = torch.randn(D, D, generator=torch.Generator().manual_seed(seed))
        means.append(float((method.keys(0, k) * q).sum()))
    spread = torch.tensor(means)
    assert abs(float(spread.mean()) - exact) < 4 * float(spread.std()) / 20 + 0.02 * abs(exact)


def test_naive_error_is_a_twelfth_of_a_step_squared() -> None:
    """Uniform noise of a fine quantizer; and no element is off by more than half a step and the scale's rounding."""
    x = torch.rand(4000, 64, generator=torch.Generator().manual_seed(3))
    coded = uniform(x, 4, -1, 64)
    step = (x.amax(-1) - x.amin(-1)) / 15
    assert float((coded - x).square().mean()) == pytest.approx(float(step.square().mean()) / 12, rel=0.05)
    assert bool(((coded - x).abs() <= 0.55 * step[:, None]).all())


def test_quarot_spreads_and_saw_spreads_within_blocks(fitted: dict) -> None:
    """One large channel becomes two levels per row, which 2 bits hold; Saw's blocks of 64 keep it to their own half."""
    x = torch.zeros(1, HEADS, 3, D)
    x[..., 7] = 32.0
    method = fitted["QuaRot-INT2 g128"]
    torch.testing.assert_close(method.key.into(0, x).abs(), torch.full_like(x, 32 / D**0.5))
    torch.testing.assert_close(method.keys(0, x), x, atol=0.15, rtol=0)
    rotated = fitted["Saw-INT4"].rotation.into(0, x)
    torch.testing.assert_close(rotated[..., :64].abs(), torch.full((1, HEADS, 3, 64), 4.0))
    assert not bool(rotated[..., 64:].any())


def test_kivi_ignores_the_scale_of_a_key_channel(fitted: dict) -> None:
    """Per-channel codes: a power of two in a channel passes through; per-token codes of values feel it."""
    x = vectors()
    factor = torch.ones(D)
    factor[[3, 67]] = 32.0
    for name in ("KIVI-2", "Kitty"):
        method = fitted[name]
        assert noise(method, x * factor)[1] > 2 * noise(method, x)[1]
        if name == "KIVI-2":
            assert torch.equal(method.keys(0, x * factor), method.keys(0, x) * factor)


def test_kivi_blocks_and_residual(fitted: dict) -> None:
    """Tokens of a block that is not full are exact, for keys by block and for values the newest 128."""
    schedule = prefill_then_decode(400, 300)
    keys, values = fitted["KIVI-2"].exact_from(schedule)
    assert keys[350:353].tolist() == [256, 256, 256]
    assert keys[383:385].tolist() == [384, 384]
    assert values[350] == 350 + 1 - 128
    assert int(keys[299]) == int(values[299]) == 0
    assert int(blocks_exact_from(schedule, 32, 128)[350]) == 288


def test_kitty_boosts_the_widest_eighth(fitted: dict) -> None:
    tiles = vectors(128)
    tiles[..., :16] *= 20
    coded = boosted(tiles, 0.125)
    torch.testing.assert_close(coded[..., :16], uniform(tiles, 4, -2, 128)[..., :16])
    torch.testing.assert_close(coded[..., 16:], uniform(tiles, 2, -2, 128)[..., 16:])
    assert noise(fitted["Kitty"], vectors())[0] < noise(fitted["KIVI-2*"], vectors())[0]


def test_oscar_of_occam_worked_example() -> None:
    """A channel of three tokens near 8 and a sink near 0: step 2.75; without the sink 0.133, at most 0.067 off."""
    channel = torch.tensor([0.05, 8.1, 7.9, 8.3])[:, None]
    step = 2.75
    assert bool(((uniform(channel, 2, 0, 4) - channel).abs() <= step / 2).all())
    levels = uniform(torch.linspace(0.05, 8.3, 1000)[:, None], 2, 0, 1000).unique()
    torch.testing.assert_close(levels.diff(), torch.full((3,), step), rtol=2**-8, atol=0)
    assert float((uniform(channel[1:], 2, 0, 3) - channel[1:]).abs().max()) <= 0.067
    assert float((uniform(channel, 2, 0, 4) - channel)[1:].abs().max()) > 0.067


def test_omni_token_scaling_ignores_a_tokens_norm(fitted: dict) -> None:
    """Tokens of very different length cost nothing behind the scaling and much without it."""
    x = vectors()
    lengths = torch.ones(300, 1)
    lengths[::32] = 1 / 16
    scaled, plain = fitted["OScaR g32"], fitted["OScaR g32 w/o scaling"]
    torch.testing.assert_close(scaled.keys(0, x * lengths), scaled.keys(0, x) * lengths, rtol=0.02, atol=0.02)
    short = x * lengths
    errors = [(m.keys(0, short) - short)[:, :, 64::32].square().sum() for m in (scaled, plain)]
    assert errors[1] > 20 * errors[0]


def test_rotatekv_groups_like_channels_before_rope(calibration: Calibration) -> None:
    """Lossless, it gives keys back; sorting by the channels' means before RoPE makes a large mean harmless."""
    method = RotateKV()
    method.fit(calibration)
    x = vectors(40)
    flat = method.rotated(x)
    torch.testing.assert_close(flat.square().sum(), x.square().sum(), rtol=1e-4, atol=0)
    assert method.keys(0, x).shape == x.shape
    mean = 6 * torch.randn(1, HEADS, 1, D, generator=torch.Generator().manual_seed(5))
    keys = turned(0.1 * vectors(300) + mean, *rotary(300))
    own = Calibration([LayerActivations(keys[0].transpose(0, 1), keys[0].transpose(0, 1), keys[0].transpose(0, 1))],
                      [300], [torch.eye(D).expand(HEADS, -1, -1)], rotary)  # fmt: skip
    errors = {}
    for name in ("sorted", "as they come"):
        method = RotateKV()
        method.fit(own)
        if name != "sorted":
            method.order = [torch.arange(HEADS * D)]
        errors[name] = float((method.keys(0, keys) - keys).square().mean())
    assert errors["sorted"] < 0.75 * errors["as they come"]


def test_oscar_equalizes_importance(calibration: Calibration, fitted: dict) -> None:
    """Lemma 1: the diagonal of R^T C_Q R is constant behind U H, and only there (the importance column of table 10)."""
    metric = calibration.covariance(0, QueryCovariance).shared()[None]

    def peak(name: str) -> float:
        return importance(fitted[name].key.forward[:1], metric)

    assert peak("OSCAR g128") == pytest.approx(1.0, abs=1e-4)
    assert 1.05 < peak("OSCAR g128, w/o U") < peak("OSCAR g128, w/o H")
    assert peak("QuaRot-INT2 g128") > 1.05


def test_oscar_rows_are_the_servers(fitted: dict) -> None:
    """Bit by bit what the row format of the server gives back, whatever the group."""
    for name in ("OSCAR g128", "OSCAR g64", "OSCAR g32", "plus g128"):
        method = fitted[name]
        assert isinstance(method, RowMethod)
        y = method.key.into(0, vectors(40))
        rows = encode_rows(y[0].transpose(0, 1), RowLayout(HEADS, D, method.group), method.k_clip, method.k_gain)
        stored = decode_rows(rows, RowLayout(HEADS, D, method.group)).transpose(0, 1)
        assert torch.equal(method.coded(y, method.k_clip, method.k_gain)[0], stored)


def test_lloyd_max_rows_reach_the_bound_of_four_levels() -> None:
    x = vectors(2000)
    error = float((lloyd_max_rows(x, 128) - x).square().mean())
    assert error == pytest.approx(0.1175, rel=0.03)


def test_plus_is_what_the_server_loads(fitted: dict) -> None:
    """Files of the laboratory pass the server's checks and undo themselves; plus has duals, OSCAR has none."""
    for name, recipe in (("plus g128", "plus"), ("OSCAR g128", "paper")):
        method = fitted[name]
        for side, transforms, gain in (("k", method.key, method.k_gain), ("v", method.value, method.v_gain)):
            content = transforms_set(transforms, side, gain)
            check_rotation_set(content, name)
            assert content.recipe == recipe
            x = vectors(20)
            torch.testing.assert_close(transforms.out(0, transforms.into(0, x)), x, atol=1e-3, rtol=1e-3)
    centers = transforms_set(fitted["plus g128"].key, "k", 0.0).centers
    assert centers is not None
    center = fitted["plus g128"].key.center
    torch.testing.assert_close(centers, center @ fitted["plus g128"].key.forward, atol=1e-4, rtol=1e-4)


def test_plus_does_not_see_outliers_of_coordinates(calibration: Calibration) -> None:
    """Keys times A, queries times A^-1: the same codes, so the same error seen through the queries."""
    factor = torch.ones(D)
    factor[[3, 67]] = 32.0
    moved = Calibration(
        [LayerActivations(x.q / factor, x.k * factor, x.v) for x in calibration.layers],
        calibration.seq_lens,
        calibration.readers,
        rotary,
    )
    queries = calibration.layers[0].q[:200].flatten(0, 1)
    keys = calibration.layers[0].k[100:400].transpose(0, 1)[None]
    errors = {}
    for name in ("plus g128", "OSCAR g128"):
        for label, data, scale in (("plain", calibration, torch.ones(D)), ("moved", moved, factor)):
            method = all_methods()[name]
            method.fit(data)
            lost = (method.keys(0, keys * scale) - keys * scale) / scale
            errors[name, label] = float((lost @ queries.T).square().mean())
    assert errors["plus g128", "moved"] == pytest.approx(errors["plus g128", "plain"], rel=0.05)
    assert errors["plus g128", "plain"] < errors["OSCAR g128", "plain"]
    assert errors["OSCAR g128", "moved"] > 3 * errors["OSCAR g128", "plain"]


def test_error_feedback_lowers_what_queries_see(calibration: Calibration, fitted: dict) -> None:
    """Without a metric it is plain rounding, bit for bit; with one, plain error may grow and the logits' shrinks."""
    y = vectors(50)
    codes, scale, zero = quantize(clip(y, 0.96), D)
    wide = [x.float().repeat_interleave(D, -1) for x in (scale, zero)]
    plain = dequantize(codes, scale, zero)
    fed = feed_back(y, *wide, torch.eye(D))
    torch.testing.assert_close(fed, plain, atol=1e-5, rtol=1e-5)
    queries = calibration.layers[0].q[:200].flatten(0, 1)
    keys = calibration.layers[0].k[100:400].transpose(0, 1)[None]
    errors = [
        float(((fitted[name].keys(0, keys) - keys) @ queries.T).square().mean())
        for name in ("plus g128, error feedback (not served)", "plus g128")
    ]
    assert errors[0] < 0.95 * errors[1]
