"""A refit without a server: from prompts that are read to matrices in place, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.managers.io_struct import CheckWeightsReqInput

from oscar_kernels.cache import Windows
from oscar_kernels.format import fingerprint
from oscar_kernels.layout import RowLayout
from oscar_rotation.dump import DumpManifest, DumpWriter
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.recipes import FITTED, FitRequest
from sglang_oscar.attention.call import Call
from sglang_oscar.features.refitting import actions
from sglang_oscar.features.refitting.samples import Samples
from sglang_oscar.formats import origin
from sglang_oscar.formats.rotations import Loaded, load
from sglang_oscar.memory.layer import CachedLayer
from sglang_oscar.settings import Settings
from support.small_cache import small_cache

HEADS, D, LAYERS, TOKENS = 2, 64, 2, 200
LAYOUT = RowLayout(HEADS, D, D, torch.bfloat16)


def prompt(layer: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(10 * seed + layer)
    q, k, v = (torch.randn(TOKENS, heads, D, generator=random) for heads in (2 * HEADS, HEADS, HEADS))
    return q, k, v


def loaded(settings: Settings) -> Loaded:
    return load(settings, LAYOUT, range(LAYERS))


@pytest.fixture
def server(group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a refit finds in a server on rotations that were fitted to other prompts."""
    writer = DumpWriter(tmp_path / "dump", total_kv_heads=HEADS)
    for layer in range(LAYERS):
        writer.write(layer, 1, *prompt(layer, 99), [TOKENS])
    sizes = {"num_layers": LAYERS, "q_heads": 2 * HEADS, "kv_heads": HEADS, "head_dim": D}
    DumpManifest.model_validate(sizes).write(tmp_path / "dump")
    (tmp_path / "files").mkdir()
    FITTED["paper"].run(FitRequest(tmp_path / "dump", device="cpu")).save(tmp_path / "files", (".safetensors",))
    settings = Settings.from_env({}).with_rotations(*map(str, rotation_files(tmp_path / "files")))
    requests = SimpleNamespace()
    cache: Any = small_cache(Windows(0, 0, 0), requests=requests)
    formats = loaded(settings).formats
    cache.layers = {layer: CachedLayer(cast(Any, None), of) for layer, of in formats.items()}
    cache.sampler, cache.recipe, cache.settings = Samples(), "paper", settings
    cache.fingerprint = fingerprint(formats)
    args = SimpleNamespace(
        disaggregation_mode="null", nnodes=1, dp_size=1, pp_size=1, model_path="model", revision=None,
        download_dir=None, json_model_override_args="{}",
    )  # fmt: skip
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: HEADS,
        num_attention_heads=2 * HEADS,
        head_dim=D,
        v_head_dim=D,
        num_hidden_layers=LAYERS,
    )
    found: Any = SimpleNamespace(cache=cache, flushes=0, noted=None)
    for name, stand_in in {
        "model_rotations": lambda args, settings, model: loaded(settings),
        "own_heads": lambda model: slice(0, HEADS),
        "model_identity": lambda path, model: SimpleNamespace(model_id="", model_hash=""),
        "attention_digest": lambda *asked: "",
        "facts": lambda cache: {},
        "_note": lambda chosen: vars(found).update(noted=chosen),
        "worker": SimpleNamespace(of_this_process=lambda: Settings.from_env({}).with_rotations(**found.noted)),
        "releases": SimpleNamespace(resolved=lambda args: args, model_config=lambda args: model),
    }.items():
        monkeypatch.setattr(actions, name, stand_in)
    runner = SimpleNamespace(req_to_token_pool=requests, server_args=args, model=None)
    found.tp_worker, found.tp_cpu_group = SimpleNamespace(model_runner=runner), group

    def flush() -> bool:
        found.flushes += 1
        return True

    found.flush_cache = flush
    return found


def ask(server: Any, action: str) -> Any:
    return actions.around_check_weights(pytest.fail, server, CheckWeightsReqInput(action=action))


def read(server: Any, *seeds: int) -> None:
    """Let it read prompts."""
    for seed in seeds:
        batch = SimpleNamespace(rids=["a"], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[TOKENS])
        assert server.cache.sampler.begin(batch)
        for layer in range(LAYERS):
            server.cache.sampler.add(Call(*prompt(layer, seed), torch.zeros(TOKENS), layer, D**-0.5))


def test_from_prompts_to_matrices(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tensors that graphs hold; what is served is what the files of the refit say, and may be fitted again."""
    monkeypatch.setattr(origin, "_update", "")
    cache, places = server.cache, [of.format.key.transform.matrix for of in server.cache.layers.values()]
    before = cache.fingerprint
    for number, out in enumerate((None, tmp_path / "out")):
        assert ask(server, "oscar_sample").success
        folder = cache.sampler.folder.path
        read(server, 2 * number, 2 * number + 1)
        reply = ask(server, "oscar_refit" if out is None else f"oscar_refit:{out}")
        assert reply.success, reply.message
        assert cache.fingerprint[:12] in reply.message
        assert cache.fingerprint != before
        served = loaded(cache.settings)
        assert fingerprint(served.formats) == cache.fingerprint
        assert cache.key_errors == served.key_errors
        assert fingerprint({layer: of.format for layer, of in cache.layers.items()}) == cache.fingerprint
        assert [of.format.key.transform.matrix for of in cache.layers.values()] == places
        assert server.flushes == number + 1
        assert origin.update()
        assert not folder.exists()
        assert "nothing was sampled" in ask(server, "oscar_refit").message
        before = cache.fingerprint
    assert server.noted["keys"].startswith(str(tmp_path / "out"))


def test_files_of_another_fit_are_not_mixed_with(server: Any, tmp_path: Path) -> None:
    """Nor is anything changed by a refit that is refused at its end."""
    cache, before = server.cache, server.cache.fingerprint
    assert ask(server, "oscar_sample:300").success
    read(server, 1, 2)
    assert "of another fit" in ask(server, f"oscar_refit:{tmp_path / 'files'}").message
    assert (cache.fingerprint, server.noted) == (before, None)
    assert fingerprint({layer: of.format for layer, of in cache.layers.items()}) == before
    assert ask(server, "oscar_refit").success
