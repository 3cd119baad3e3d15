"""The benchmark of a served model: what it starts servers with, what it counts, and the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy import rollouts, served_model  # noqa: E402
from accuracy.corpus import Corpus  # noqa: E402
from oscar_rotation.errors import RotationFileError  # noqa: E402


def arguments(*more: str) -> Any:
    args = served_model.parse_args(["--model", "m", "--prefix", "600", "--needle", "700", *more])
    args.work = Path("work")
    return args


def test_servers_differ_in_their_cache_alone(tmp_path: Path) -> None:
    args = arguments("--int2-args=--page-size 64", "--group", "32")
    assert "--kv-cache-dtype" not in served_model.flags(args, "bf16")
    flags = served_model.flags(args, "plus")
    assert flags[-6:] == ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "32", "--page-size", "64"]
    assert served_model.flags(args, "plus") == served_model.flags(args, "naive") == served_model.flags(args, "focus")
    assert served_model.variables(args, "bf16") == {}
    assert served_model.variables(args, "naive")["SGLANG_OSCAR_K_ROTATION_PATH"] == "identity"
    args.work = tmp_path
    (tmp_path / "focus").mkdir()
    for name in ("k_rotation_focused_u_h_br", "v_rotation_balanced_u_h_br"):
        (tmp_path / "focus" / f"{name}.safetensors").touch()
    found = served_model.variables(args, "focus")
    assert found["SGLANG_OSCAR_K_ROTATION_PATH"].endswith("focus/k_rotation_focused_u_h_br.safetensors")
    assert found["SGLANG_OSCAR_RECIPE"] == "focus"
    asked = rollouts.parse_args(["--model", "m", "--prompts", "p", "--int2", f"default={tmp_path / 'focus'}"])
    assert found.items() - rollouts.server_of(asked, "default")[1].items() == {("SGLANG_OSCAR_RECIPE", "focus")}
    (tmp_path / "focus" / "k_rotation_balanced_u_h_br.safetensors").touch()
    with pytest.raises(RotationFileError, match="2 different k_rotation"):
        served_model.variables(args, "focus")


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens behind the first one that follows the prefix; a prefix that is not cached is an error."""
    cached = 1000

    def generate(server: Any, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        scores: list[Any] = [[None]] + [[-float(i)] for i in range(1, len(ids) - 600)] if extra else []
        return {"meta_info": {"cached_tokens": cached, "input_token_logprobs": scores}}

    monkeypatch.setattr(served_model, "generate", generate)
    server: Any = SimpleNamespace(url="")
    assert served_model.nats(server, [list(range(604))], 600, "plus") == [pytest.approx((1 + 2 + 3) / 3)]
    cached = 10
    with pytest.raises(RuntimeError, match="plus: 10 of 700 tokens came from the cache"):
        served_model.nats(server, [list(range(704))], 700, "plus")


def test_texts_begin_as_the_tokenizer_begins_them(
    begun_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calibration text, documents and questions, in front of a stock server and of one whose cache is quantized; of
    their length is nothing lost or gained."""
    tokenizer, front = begun_tokenizer
    asked: list[list[int]] = []

    def generate(server: Any, ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
        asked.append(ids)
        scores = [[-1.0]] * (len(ids) - 600)
        return {"meta_info": {"cached_tokens": 600, "input_token_logprobs": scores}, "output_ids": []}

    @contextmanager
    def serve(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(flush=lambda: None)

    monkeypatch.setattr(served_model, "generate", generate)
    monkeypatch.setattr(served_model, "serve", serve)
    monkeypatch.setattr(served_model.subprocess, "run", lambda *_, **__: None)
    args = arguments("--documents", "4", "--questions", "2", "--calibration", "source", "--calibration-tokens", "2048")
    args.cache, args.work = ["plus"], tmp_path
    corpus = Corpus(tokenizer)
    served_model.calibrate(args, corpus)
    assert [len(ids) for ids in asked] == [1024, 1024]
    served_model.measure(args, "bf16", corpus)
    assert len(asked) == 2 + 2 * 4 + 2 * 2
    assert {len(ids) for ids in asked[2:10]} == {600, 600 + served_model.READ}
    assert {ids[0] for ids in asked} == {front}


def test_table() -> None:
    rows = {
        "bf16": {"nats": {"600": [1.0, 2.0, 3.0]}, "right": {"700": [True, True]}},
        "plus": {"nats": {"600": [1.1, 2.1, 3.1]}, "right": {"700": [True, False]}},
    }
    first, second = served_model.table({"rows": rows}).splitlines()
    assert first.startswith("bf16 | 600: +0.0000")
    assert "600: +0.1000 (0.1000 to 0.1000)" in second
    assert "needle 700: 0.50" in second
    del rows["bf16"]
    assert "600: 2.1000 nats" in served_model.table({"rows": rows})
