"""Which weights storage has pages of: the same for all processes that read the same files, and for no others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from transformers import Qwen3Config

from sglang_oscar.errors import Int2Error
from sglang_oscar.features.tiers.salt import model_facts
from sglang_oscar.features.tiers.weights import note_before_loading
from sglang_oscar.formats import drafts, origin
from sglang_oscar.formats.model_identity import configuration
from sglang_oscar.formats.origin import cached_snapshot, sample_digest
from sglang_oscar.names import WEIGHTS_SEEN
from sglang_oscar.settings import Settings

MODEL = SimpleNamespace(dtype="bfloat16", hf_text_config=Qwen3Config(num_hidden_layers=2), is_multimodal=False)

SETTINGS = Settings.from_env({})


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "_loaded", {})
    monkeypatch.setattr(origin, "_update", "")


def arguments(path: str, **changes: Any) -> SimpleNamespace:
    given = {"model_path": path, "revision": None, "quantization": None, "download_dir": None, "kv_cache_dtype": "int2"}
    given |= {"load_format": "auto", "speculative_algorithm": None}
    return SimpleNamespace(**given | changes)


def checkpoint(folder: Path, content: bytes = b"weights", changed: int = 10**18) -> Path:
    """A folder with a file of weights, all of one time of change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    os.utime(folder / "model.safetensors", ns=(changed, changed))
    (folder / "README.md").touch()
    return folder


def tensors(sizes: dict[str, int], **changed: int) -> bytes:
    """A safetensors file of zeros; ``changed`` are tensors with a byte that is none, and where."""
    rows = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    for name, place in changed.items():
        rows[name][place] = 1
    return save(rows)


def facts(path: str) -> dict[str, Any]:
    """Of a server that starts now."""
    origin._loaded.clear()
    return model_facts(arguments(path), MODEL)


def test_one_relative_path_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for run in ("run1", "run2"):
        checkpoint(tmp_path / run / "model", run.encode())
        monkeypatch.chdir(tmp_path / run)
        seen.append(facts("model"))
    assert seen[0] != seen[1]


def test_weights_that_are_overwritten_in_place(tmp_path: Path) -> None:
    """By what they hold; what holds no weights is of no matter."""
    path = str(checkpoint(tmp_path / "model"))
    first = facts(path)
    (tmp_path / "model" / "README.md").write_text("of the model")
    assert facts(path) == first
    checkpoint(tmp_path / "model", b"WEIGHTS")
    assert facts(path) != first


def test_copies_share_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are, whenever they were made, by whatever name a server calls them, and one from a hub, too."""
    first = facts(str(checkpoint(tmp_path / "model")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    checkpoint(tmp_path / "cache" / "models--o--m" / "snapshots" / "main", changed=10**17)
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    for copy in (str(checkpoint(tmp_path / "b" / "other", changed=10**17)), "model", "link", "./model/", "o/m"):
        assert facts(copy) == first, copy


def test_the_path_of_a_configuration_is_none_of_it(tmp_path: Path) -> None:
    """transformers writes down where it has read one."""
    config = Qwen3Config(num_hidden_layers=2, name_or_path="elsewhere")
    assert config.to_dict()["_name_or_path"] == "elsewhere"
    assert configuration(config) == configuration(MODEL.hf_text_config)


def test_a_draft_model_is_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of copies; another of other weights, algorithms, dtypes or configurations; the model's own without a
    path."""
    path, none = str(checkpoint(tmp_path / "model")), {"speculative_draft_load_format": None}
    none |= {"speculative_draft_model_quantization": None, "speculative_draft_model_revision": None}

    def drafting(place: str | None, algorithm: str = "EAGLE", dtype: str = "bfloat16", layers: int = 1) -> Any:
        origin._loaded.clear()
        config = SimpleNamespace(dtype=dtype, hf_config=Qwen3Config(num_hidden_layers=layers))
        monkeypatch.setattr(drafts, "config_of", lambda args: config)
        given = {"speculative_algorithm": algorithm, "speculative_draft_model_path": place}
        return model_facts(arguments(path, **given | none), MODEL)

    place = str(checkpoint(tmp_path / "drafts", b"drafts"))
    first = drafting(place)
    assert {name: of for name, of in first.items() if name != "drafts"} == facts(path)
    assert drafting(str(checkpoint(tmp_path / "copy", b"drafts", changed=10**17))) == first
    others = [drafting(place, "EAGLE3"), drafting(place, dtype="float16"), drafting(place, layers=2)]
    others += [drafting(str(checkpoint(tmp_path / "other", b"others"))), drafting(None), facts(path)]
    assert len({json.dumps(of, sort_keys=True) for of in (first, *others)}) == 7
    checkpoint(tmp_path / "drafts", b"DRAFTS", changed=10**18 + 1)
    args = arguments(path, speculative_algorithm="EAGLE", speculative_draft_model_path=place, **none)
    origin._loaded.clear()
    launched(args)
    checkpoint(tmp_path / "drafts", b"drafts", changed=10**18 + 2)
    with pytest.raises(Int2Error, match=r"model\.safetensors has changed since"):
        model_facts(args, MODEL)


def test_formats_that_are_not_loaded_count_for_nothing(tmp_path: Path) -> None:
    """The same weights in another format, or shards that no index names."""
    folder = checkpoint(tmp_path / "model")
    first = facts(str(folder))
    (folder / "model.bin").write_bytes(b"the same")
    assert facts(str(folder)) == first
    (folder / "consolidated.safetensors").write_bytes(b"the same")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert facts(str(folder)) == first


def test_weights_that_are_not_read(tmp_path: Path) -> None:
    """Random ones in the place of a checkpoint's (``--load-format dummy``)."""
    args = arguments(str(checkpoint(tmp_path / "model")))
    dummy = arguments(args.model_path, load_format="dummy")
    assert model_facts(args, MODEL) != model_facts(dummy, MODEL)


def test_a_file_of_weights(tmp_path: Path) -> None:
    seen = []
    for name in ("m.gguf", "copy.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"GGUF\3" + (b"12" if name != "other.gguf" else b"13"))
        seen.append(facts(str(tmp_path / name)))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_every_tensor_counts(suffix: str, tmp_path: Path) -> None:
    """A large one from end to end, and a small one wherever it changes, of a format that tells where tensors are."""
    sizes = {"large": 5_000_000, "norm": 8192, "last": 3_000_000}
    path = tmp_path / f"model{suffix}"

    def digest(**changed: int) -> str:
        path.write_bytes(tensors(sizes, **changed))
        return sample_digest(path)

    first = digest()
    assert digest() == first
    places: list[dict[str, int]] = [{"large": 0}, {"norm": sizes["norm"] - 1}]  # as they lie there
    if suffix == ".safetensors":
        places += [{"large": sizes["large"] - 1}, {"last": 0}, {"norm": 0}, {"norm": 5000}, {"last": 2_999_999}]
    seen = [first, *(digest(**place) for place in places)]
    assert len(set(seen)) == len(seen)
    every = 1 + (1 << 20)
    for begin in range(0, sizes["large"] - every, 500_000):
        content = bytearray(tensors(sizes))
        content[2000 + begin : 2000 + begin + every] = bytes([1]) * every
        path.write_bytes(content)
        assert sample_digest(path) != first, begin


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', None])
def test_a_file_that_says_nothing_of_tensors(header: bytes | None, tmp_path: Path) -> None:
    """Or more than it has: sampled from end to end."""
    path = tmp_path / "model.safetensors"
    begin = (10**12).to_bytes(8, "little") if header is None else len(header).to_bytes(8, "little") + header
    seen = set()
    for last in (b"1", b"2"):
        path.write_bytes(begin + bytes(100_000) + last)
        seen.add(sample_digest(path))
    assert len(seen) == 2


def test_weights_that_are_nowhere_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts("s3://a/b")["weights"] == {"address": "s3://a/b", "revision": None}


def test_a_hub_id_is_the_commit_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of downloads or in the hub's own; a branch is what it points at; unknown where there is neither."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert cached_snapshot("o/m") is None
    for cache, commit in (("cache", "1" * 40), ("downloads", "2" * 40)):
        folder = tmp_path / cache / "models--o--m"
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(commit)
    found = [
        cached_snapshot("o/m"),
        cached_snapshot("o/m", "main", str(tmp_path / "downloads")),
        cached_snapshot("o/m", "1" * 40, str(tmp_path / "downloads")),
    ]
    assert [folder and folder.name for folder in found] == ["1" * 40, "2" * 40, "1" * 40]
    assert cached_snapshot("o/m", "other") is None


def test_what_was_loaded_counts(tmp_path: Path) -> None:
    """Not what lies there when storage is attached; and files that change while they are read are not taken for it."""
    args = arguments(str(checkpoint(tmp_path / "model")))
    launched(args)
    checkpoint(tmp_path / "model", b"others!", changed=10**18 + 1)
    origin.note_loaded(args)
    with pytest.raises(Int2Error, match="safetensors has changed since it was loaded"):
        model_facts(args, MODEL)


def test_downloads_are_noted_once_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub may say something else of a branch later."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    args, folder = arguments("o/m"), tmp_path / "models--o--m"
    launched(args)
    assert WEIGHTS_SEEN not in vars(args)
    checkpoint(folder / "snapshots" / "1", b"first")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")
    origin.note_loaded(args)
    before = model_facts(args, MODEL)
    checkpoint(folder / "snapshots" / "2", b"second")
    (folder / "refs" / "main").write_text("2")
    assert model_facts(args, MODEL) == before


def launched(args: SimpleNamespace) -> None:
    """What the launching process notes; nothing of it stays in the process."""
    assert note_before_loading(args, SETTINGS, MODEL, None) is SETTINGS
    assert not origin._loaded


def test_weights_that_are_gone_since_they_were_loaded(tmp_path: Path) -> None:
    args = arguments(str(checkpoint(tmp_path / "model")))
    launched(args)
    os.remove(tmp_path / "model" / "model.safetensors")
    with pytest.raises(Int2Error, match="start the server anew"):
        model_facts(args, MODEL)
