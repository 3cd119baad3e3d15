"""The heads that SGLang gives to each tensor-parallel rank, written rank by rank, are the whole model's when read."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_rotation.dump import DumpReader, DumpWriter
from oscar_rotation.errors import DumpError
from sglang_oscar.features.recording import dump_hook
from sglang_oscar.features.recording.dump_hook import Dump, DumpSettings

HIDDEN, HEAD_DIM, Q_HEADS, TOKENS = 16, 8, 8, 5


def rank_heads(
    x: torch.Tensor,
    weights: dict[str, torch.Tensor],
    rank: int,
    size: int,
    patch: pytest.MonkeyPatch,
    gated: bool = False,
) -> list[torch.Tensor]:
    """q, k and v of one rank, computed by SGLang's own layer from the weights of the whole model.

    Where outputs are ``gated``, every query head is followed by its gate, as in Qwen3-Next.
    """
    from sglang.srt.layers import linear

    kv_heads = weights["k"].shape[0] // HEAD_DIM
    place = {"tp_rank": rank, "tp_size": size}
    if "tp_rank" not in inspect.signature(linear.QKVParallelLinear.__init__).parameters:
        # Newer releases ask the process group instead.
        place = {}
        patch.setattr(linear, "_resolve_linear_group", lambda group: None)
        patch.setattr(linear, "get_group_rank_size", lambda group: (rank, size))
    layer = linear.QKVParallelLinear(
        HIDDEN, HEAD_DIM, Q_HEADS * (1 + gated), kv_heads, bias=False, params_dtype=torch.float32, **place
    )
    for name, weight in weights.items():
        layer.weight_loader(layer.weight, weight, name)
    widths = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    q, k, v = (x @ layer.weight.T).unflatten(-1, (-1, HEAD_DIM)).split(widths, 1)
    return [q[:, :: 1 + gated], k, v]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 4), (2, 2), (4, 2), (4, 1), (8, 2), (8, 1)])
def test_ranks_of_sglang_are_gathered(
    tmp_path: Path, size: int, kv_heads: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    heads = {"q": Q_HEADS * (1 + gated), "k": kv_heads, "v": kv_heads}
    weights = {name: torch.randn(count * HEAD_DIM, HIDDEN) for name, count in heads.items()}
    x = torch.randn(TOKENS, HIDDEN)
    for rank in range(size):
        writer = DumpWriter(tmp_path, total_kv_heads=kv_heads, tp_rank=rank, tp_size=size)
        writer.write(0, 1, *rank_heads(x, weights, rank, size, monkeypatch, gated), [TOKENS])
    gathered = DumpReader(tmp_path).load(0, 1)
    for name, weight in weights.items():
        expected = (x @ weight.T).unflatten(-1, (-1, HEAD_DIM))[:, :: 1 + (gated and name == "q")]
        assert torch.allclose(getattr(gathered, name), expected, atol=1e-6)
    assert len(list((tmp_path / "layer_0/k").iterdir())) == min(size, kv_heads)


def test_layers_without_an_int2_cache_are_left_out() -> None:
    """Those with a sliding window are not dumped; the others are numbered one after the other, and complete a chunk."""
    written: list[tuple[int, int]] = []
    made: Any = Dump.__new__(Dump)
    made.numbers, made.selected, made.seq_lens = {1: 0, 3: 1}, torch.arange(2), [2]
    made.chunk, made.tokens, made.budget = 1, 0, 100
    made.covariances, made.projections = None, {}
    made.writer = SimpleNamespace(write=lambda layer, chunk, *rest: written.append((layer, chunk)))
    x = torch.zeros(3, 1, 4)
    for layer_id, tokens in enumerate([0, 0, 0, 2]):
        made.write(layer_id, x, x, x)
        assert made.tokens == tokens
    assert written == [(0, 1), (1, 1)]


def test_a_dump_that_cannot_be_written_ends_the_server_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shapes that do not fit together, as well as a full disk."""
    for error in (DumpError("q and k do not fit together"), OSError(28, "No space left on device")):

        def write(*args: object, error: Exception = error) -> None:
            raise error

        dump = SimpleNamespace(done=False, numbers={}, write=write)
        monkeypatch.setattr(dump_hook, "_dump", dump)
        monkeypatch.setattr(dump_hook, "_settings", DumpSettings.from_env({"DUMP_KVCACHE": "1"}))
        mode = SimpleNamespace(is_extend=lambda: True)
        batch = SimpleNamespace(forward_mode=mode, rids=["1"], extend_seq_lens_cpu=[2])
        layer = SimpleNamespace(layer_id=0, tp_q_head_num=1, tp_k_head_num=1, tp_v_head_num=1, head_dim=4)
        x = torch.zeros(2, 4)
        with pytest.raises(SystemExit):
            dump_hook.before_attention(layer, x, x, x, batch)
        said = capsys.readouterr().err
        assert said.startswith("sglang-oscar: error: cannot write the dump to qkv_dumps: ")
        assert said.count("\n") == 1
