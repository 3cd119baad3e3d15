"""Settings from environment variables: defaults, values, and every way of getting one wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_kernels.cache import Windows
from oscar_kernels.layout import RowLayout
from sglang_oscar.errors import Int2Error
from sglang_oscar.features.recording.dump_hook import DumpSettings
from sglang_oscar.settings import Settings

DEFAULTS = {
    "SGLANG_OSCAR_ROTATIONS": None,
    "SGLANG_OSCAR_CALIBRATE": True,
    "SGLANG_OSCAR_CALIBRATE_SECONDS": 3600.0,
    "SGLANG_OSCAR_CACHE": None,
    "SGLANG_OSCAR_K_ROTATION_PATH": None,
    "SGLANG_OSCAR_V_ROTATION_PATH": None,
    "SGLANG_OSCAR_RECIPE": None,
    "SGLANG_OSCAR_K_BITS": None,
    "SGLANG_OSCAR_V_BITS": None,
    "SGLANG_OSCAR_K_CODING": None,
    "SGLANG_OSCAR_V_CODING": None,
    "SGLANG_OSCAR_K_CLIP_RATIO": None,
    "SGLANG_OSCAR_V_CLIP_RATIO": None,
    "SGLANG_OSCAR_ALLOW_OTHER_MODEL": False,
    "SGLANG_OSCAR_ALLOW_NEWER": False,
    "SGLANG_OSCAR_ALLOW_UNTRIED": False,
    "SGLANG_OSCAR_KEY_ERRORS": False,
    "SGLANG_OSCAR_RECOMPUTE_RECENT": True,
    "SGLANG_OSCAR_KEPT_WINDOWS": 0,
    "SGLANG_OSCAR_DECODE_BACKEND": "auto",
    "SGLANG_OSCAR_EXTEND_BACKEND": "auto",
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": True,
    "SGLANG_MIXED_KV_PREFIX_TOKENS": 64,
    "SGLANG_MIXED_KV_RECENT_TOKENS": 256,
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": 8,
    "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
    "SGLANG_MIXED_KV_SCALE_DTYPE": "bfloat16",
}
OTHERS = {
    "SGLANG_OSCAR_ROTATIONS": ("folder", "folder"),
    "SGLANG_OSCAR_CALIBRATE": ("0", False),
    "SGLANG_OSCAR_CALIBRATE_SECONDS": ("60", 60.0),
    "SGLANG_OSCAR_CACHE": ("/cache", "/cache"),
    "SGLANG_OSCAR_K_ROTATION_PATH": ("k.pt", "k.pt"),
    "SGLANG_OSCAR_V_ROTATION_PATH": ("hadamard", "hadamard"),
    "SGLANG_OSCAR_K_BITS": ("3", 3),
    "SGLANG_OSCAR_V_BITS": ("16", 16),
    "SGLANG_OSCAR_K_CODING": ("codebook", "codebook"),
    "SGLANG_OSCAR_V_CODING": ("symmetric", "symmetric"),
    "SGLANG_OSCAR_K_CLIP_RATIO": ("0.5", 0.5),
    "SGLANG_OSCAR_V_CLIP_RATIO": ("1", 1.0),
    "SGLANG_OSCAR_RECIPE": ("plus", "plus"),
    "SGLANG_OSCAR_ALLOW_OTHER_MODEL": ("1", True),
    "SGLANG_OSCAR_ALLOW_NEWER": ("1", True),
    "SGLANG_OSCAR_ALLOW_UNTRIED": ("1", True),
    "SGLANG_OSCAR_KEY_ERRORS": ("1", True),
    "SGLANG_OSCAR_RECOMPUTE_RECENT": ("false", False),
    "SGLANG_OSCAR_KEPT_WINDOWS": ("64", 64),
    "SGLANG_OSCAR_DECODE_BACKEND": ("cuda", "cuda"),
    "SGLANG_OSCAR_EXTEND_BACKEND": ("triton", "triton"),
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": ("0", False),
    "SGLANG_MIXED_KV_PREFIX_TOKENS": ("16", 16),
    "SGLANG_MIXED_KV_RECENT_TOKENS": ("0", 0),
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": ("64", 64),
    "SGLANG_MIXED_KV_HP_DTYPE": ("float16", "float16"),
    "SGLANG_MIXED_KV_SCALE_DTYPE": ("float32", "float32"),
}
WRONG = {
    "SGLANG_OSCAR_ROTATIONS": [""],
    "SGLANG_OSCAR_CALIBRATE": ["maybe"],
    "SGLANG_OSCAR_CALIBRATE_SECONDS": ["0", "-1", "nan", "inf", "soon"],
    "SGLANG_OSCAR_CACHE": [""],
    "SGLANG_OSCAR_K_ROTATION_PATH": [""],
    "SGLANG_OSCAR_V_ROTATION_PATH": [""],
    "SGLANG_OSCAR_K_BITS": ["1", "5", "15", "2.5", "-3", "", "k3v2"],
    "SGLANG_OSCAR_V_BITS": ["0", "8", "two", "nan"],
    "SGLANG_OSCAR_K_CODING": ["symmetric", "Codebook", ""],
    "SGLANG_OSCAR_V_CODING": ["codebook", "2", ""],
    "SGLANG_OSCAR_K_CLIP_RATIO": ["0", "-0.5", "1.0001", "nan", "inf", "", "most"],
    "SGLANG_OSCAR_V_CLIP_RATIO": ["0", "-0.5", "1.0001", "nan", "-inf", "", "most"],
    "SGLANG_OSCAR_RECIPE": ["best", "Plus", ""],
    "SGLANG_OSCAR_ALLOW_OTHER_MODEL": ["2", ""],
    "SGLANG_OSCAR_ALLOW_NEWER": ["2", ""],
    "SGLANG_OSCAR_ALLOW_UNTRIED": ["2", ""],
    "SGLANG_OSCAR_KEY_ERRORS": ["2"],
    "SGLANG_OSCAR_RECOMPUTE_RECENT": ["2", ""],
    "SGLANG_OSCAR_KEPT_WINDOWS": ["-1", "65537", "all", ""],
    "SGLANG_OSCAR_DECODE_BACKEND": ["flashinfer", "CUDA", ""],
    "SGLANG_OSCAR_EXTEND_BACKEND": ["fa2", "Triton", ""],
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": ["2", ""],
    "SGLANG_MIXED_KV_PREFIX_TOKENS": ["-1", "4097", "64.5", "many"],
    "SGLANG_MIXED_KV_RECENT_TOKENS": ["-1", "8193", "1e3x", ""],
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": ["0", "65", "eight"],
    "SGLANG_MIXED_KV_HP_DTYPE": ["float32", "bf16", ""],
    "SGLANG_MIXED_KV_SCALE_DTYPE": ["int8", "float64", ""],
}


def by_variable(settings: Settings) -> dict[str, object]:
    """Values under the names of their variables."""
    return {str(field.alias): getattr(settings, name) for name, field in Settings.model_fields.items()}


def test_defaults() -> None:
    assert by_variable(Settings.from_env({"PATH": "/bin"})) == DEFAULTS


@pytest.mark.parametrize("name", DEFAULTS)
def test_each_variable_sets_its_own_field(name: str) -> None:
    text, value = OTHERS[name]
    assert by_variable(Settings.from_env({name: text})) == DEFAULTS | {name: value}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_wrong_values_name_variable_and_value(name: str, text: str) -> None:
    with pytest.raises(Int2Error) as caught:
        Settings.from_env({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r}: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    "name", ["SGLANG_OSCAR_K_ROTATION", "SGLANG_MIXED_KV_SINK_TOKENS", "SGLANG_ENABLE_MIXED_KV_WINDOW", "SGLANG_OSCAR_"]
)
def test_unknown_names_are_refused(name: str) -> None:
    """A mistyped variable must not leave a default in force unnoticed."""
    with pytest.raises(Int2Error, match=f"^{name} is not a setting; known are .*SGLANG_OSCAR_K_ROTATION_PATH"):
        Settings.from_env({name: "1"})


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_clip_ratio_is_accepted_in_its_range_only(ratio: float) -> None:
    env = {"SGLANG_OSCAR_K_CLIP_RATIO": repr(ratio)}
    if 0 < ratio <= 1:
        assert Settings.from_env(env).k_clip_ratio == ratio
    else:
        with pytest.raises(Int2Error):
            Settings.from_env(env)


def test_windows() -> None:
    assert Settings.from_env({}).windows == Windows(sink=64, recent=256, ring=256)
    off = Settings.from_env({"SGLANG_ENABLE_MIXED_KV_WINDOWS": "0", "SGLANG_MIXED_KV_RECENT_TOKENS": "99"})
    assert off.windows == Windows(sink=0, recent=0, ring=0)


def test_dtypes() -> None:
    settings = Settings.from_env({"SGLANG_MIXED_KV_SCALE_DTYPE": "float32", "SGLANG_MIXED_KV_HP_DTYPE": "float16"})
    assert settings.scale_torch_dtype == torch.float32
    assert settings.window_torch_dtype == torch.float16


def test_every_value_is_listed_once() -> None:
    lines = Settings.from_env({"SGLANG_MIXED_KV_RECENT_TOKENS": "128", "SGLANG_OSCAR_V_CLIP_RATIO": "0.9"}).lines()
    assert sorted(line.partition("=")[0] for line in lines) == sorted(DEFAULTS)
    assert "SGLANG_MIXED_KV_RECENT_TOKENS=128" in lines
    assert "SGLANG_OSCAR_V_CLIP_RATIO=0.9" in lines
    assert "SGLANG_OSCAR_K_CLIP_RATIO=(from the rotation file, else 0.96)" in lines


def test_a_variable_without_effect_is_taken() -> None:
    """The published release's command line has it."""
    assert Settings.from_env({"SGLANG_OSCAR_ABSORB_V_ROTATION": "1"}) == Settings.from_env({})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.from_env({}).sink_tokens = 1  # type: ignore[misc]


def test_dump_settings() -> None:
    assert DumpSettings.from_env({}).enabled is False
    given_ = DumpSettings.from_env({"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": "5", "DUMP_KVCACHE_DIR": "/d"})
    assert (given_.enabled, given_.tokens, str(given_.folder)) == (True, 5, "/d")


@pytest.mark.parametrize(("name", "text"), [("DUMP_KVCACHE", "so"), ("DUMP_KVCACHE_TOKENS", "0")])
def test_wrong_dump_settings(name: str, text: str) -> None:
    with pytest.raises(Int2Error, match=f"^{name}='{text}': "):
        DumpSettings.from_env({name: text})


PLUS_ROWS = RowLayout(3, 64, 64)


@pytest.fixture
def plus_files(tmp_path):
    """Rotation files of the recipe plus for a model of 2 layers, 3 kv heads and head_dim 64."""
    from oscar_rotation.files.rotation_file import save_rotation_file
    from oscar_rotation.files.rotation_set import RotationSet
    from oscar_rotation.load import recipe_rotation

    base = recipe_rotation("hadamard", num_layers=2, head_dim=64, side="k").rotations
    key = RotationSet(2 * base, duals=base / 2, centers=torch.arange(2 * 3 * 64).float().view(2, 3, 64))
    value = RotationSet(4 * base, duals=base / 4)
    for side, content in (("k", key), ("v", value)):
        save_rotation_file(tmp_path / f"{side}.safetensors", content)
    return {f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH": str(tmp_path / f"{side}.safetensors") for side in "kv"}


def test_recipe_and_files_must_agree(plus_files):
    """Files say which recipe they are of, both the same; where the variable says one, files of another are refused."""
    from sglang_oscar.formats.rotations import load, load_formats

    load_formats(Settings.from_env(plus_files), PLUS_ROWS, range(2))
    built_in = dict.fromkeys(plus_files, "hadamard")
    load_formats(Settings.from_env(built_in), PLUS_ROWS, range(2))
    assert load(Settings.from_env(plus_files), PLUS_ROWS, range(2)).recipe == "plus"
    assert load(Settings.from_env(built_in), PLUS_ROWS, range(2)).recipe == "hadamard"
    mixed = built_in | {"SGLANG_OSCAR_V_ROTATION_PATH": "identity"}
    assert load(Settings.from_env(mixed), PLUS_ROWS, range(2)).recipe == "hadamard+identity"
    with pytest.raises(Int2Error, match=r"is of the recipe plus, SGLANG_OSCAR_RECIPE asks for paper; .* or unset"):
        load_formats(Settings.from_env(plus_files | {"SGLANG_OSCAR_RECIPE": "paper"}), PLUS_ROWS, range(2))
    with pytest.raises(Int2Error, match="hadamard is of the recipe paper, SGLANG_OSCAR_RECIPE asks for plus"):
        load_formats(Settings.from_env(built_in | {"SGLANG_OSCAR_RECIPE": "plus"}), PLUS_ROWS, range(2))
    for side in plus_files:
        with pytest.raises(Int2Error, match=r"is of the recipe .*, SGLANG_OSCAR_V.* give two files of one fit"):
            load_formats(Settings.from_env(plus_files | {side: "identity"}), PLUS_ROWS, range(2))
    plus = Settings.from_env(plus_files | {"SGLANG_OSCAR_RECIPE": "plus"})
    loaded = load_formats(plus, PLUS_ROWS, range(2))
    for layer in loaded.values():
        key, value = layer.key.transform, layer.value.transform
        assert key.center.shape == (3, 64)
        assert torch.equal(key.reading * 4, key.matrix)
        assert torch.equal(value.reading * 16, value.matrix)
    mixed = plus_files | {"SGLANG_OSCAR_RECIPE": "plus", "SGLANG_OSCAR_V_ROTATION_PATH": "hadamard"}
    with pytest.raises(Int2Error, match="V_ROTATION_PATH: hadamard is of the recipe paper"):
        load_formats(Settings.from_env(mixed), PLUS_ROWS, range(2))
    with pytest.raises(Int2Error, match="SGLANG_OSCAR_RECIPE='best'"):
        Settings.from_env({"SGLANG_OSCAR_RECIPE": "best"})
    swapped = plus_files | {"SGLANG_OSCAR_RECIPE": "plus"}
    swapped["SGLANG_OSCAR_V_ROTATION_PATH"] = plus_files["SGLANG_OSCAR_K_ROTATION_PATH"]
    with pytest.raises(Int2Error, match="centers values, which is not served"):
        load_formats(Settings.from_env(swapped), PLUS_ROWS, range(2))


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        ("", r"^SGLANG_OSCAR_V_ROTATION_PATH: {file}: "),
        ("SGLANG_OSCAR_K_ROTATION_PATH and SGLANG_OSCAR_V_ROTATION_PATH", r"^SGLANG_OSCAR_V_ROTATION_PATH: {file}: "),
        ("SGLANG_OSCAR_ROTATIONS", r"^rotations from SGLANG_OSCAR_ROTATIONS: {file}: "),
        ("the checkpoint", r"^rotations from the checkpoint: {file}: "),
        ("the cache", r"^rotations from the cache: {file}: .*; remove {folder}, and the next start calibrates again$"),
    ],
)
def test_a_broken_file_is_named_with_where_it_is_from(plus_files, tmp_path, origin, said):
    from sglang_oscar.formats.rotations import load_formats

    keys = plus_files["SGLANG_OSCAR_K_ROTATION_PATH"]
    broken = tmp_path / "kept" / "v_rotation.safetensors"
    broken.parent.mkdir()
    broken.write_bytes(b"half")
    with pytest.raises(Int2Error, match=said.format(file=broken, folder=broken.parent)):
        load_formats(Settings.from_env({}).with_rotations(keys, str(broken), origin), PLUS_ROWS, range(2))


def test_centers_of_another_model(plus_files):
    from sglang_oscar.formats.rotations import load_formats

    plus = Settings.from_env(plus_files | {"SGLANG_OSCAR_RECIPE": "plus"})
    with pytest.raises(Int2Error, match="centers of 3 kv heads, the model has 2"):
        load_formats(plus, RowLayout(2, 64, 64), range(2))


def test_a_rank_keeps_the_centers_of_its_heads(plus_files):
    """Tensor parallelism slices centers as it slices kv heads; matrices are the same on all ranks."""
    from sglang_oscar.formats.rotations import load_formats
    from sglang_oscar.memory.build import cached_layers

    plus = Settings.from_env(plus_files | {"SGLANG_OSCAR_RECIPE": "plus"})
    loaded = load_formats(plus, PLUS_ROWS, range(2))
    own = {layer_id: layer.of_heads(slice(1, 2)) for layer_id, layer in loaded.items()}
    for layer_id, layer in cached_layers(own, {key: [None] for key in own}, "cpu").items():
        key, value = layer.format.key.transform, layer.format.value.transform
        whole = loaded[layer_id].key.transform
        assert layer.format.kv_heads == 1
        assert torch.equal(key.center, whole.center[1:2])
        assert key.center.is_contiguous()
        assert torch.equal(key.reading, whole.dual)
        assert torch.equal(value.back, loaded[layer_id].value.transform.dual.T)


@pytest.mark.parametrize(
    ("total", "ranks", "kept", "firsts"),
    [(8, 1, 8, [0]), (8, 4, 2, [0, 2, 4, 6]), (2, 4, 1, [0, 0, 1, 1]), (4, 4, 1, [0, 1, 2, 3])],
)
def test_heads_of_a_rank(monkeypatch, total, ranks, kept, firsts):
    """Slices of kv heads follow SGLang's: neighbouring ranks share a head where there are fewer heads than ranks."""
    from types import SimpleNamespace

    from sglang.srt import runtime_context

    from sglang_oscar.formats.geometry import own_heads

    model = SimpleNamespace(get_total_num_kv_heads=lambda: total, get_num_kv_heads=lambda size: max(1, total // size))
    for rank, first in enumerate(firsts):
        parallel = SimpleNamespace(attn_tp_rank=rank, attn_tp_size=ranks)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda parallel=parallel: parallel)
        assert own_heads(model) == slice(first, first + kept)
