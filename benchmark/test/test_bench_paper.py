"""The paper's experiments: loads by name, and rows of steps that are decoded, do not fit, or have no trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

import bench_paper
import paper_rows
from paper_loads import COLD, HIT, OFF, STEPS, Load, chosen
from paper_rows import layers_of, step_row
from room import Room
from step_profile import KINDS, RECORDED, NeverAtOnceError

from oscar_tools.local_server import LocalServer

LOAD = Load(4, 100, 160, HIT)
TRACE = {
    "steps": 24.0,
    "us_per_step": {"attention": 3000.0, "matrix products": 5000.0, "other": 700.0},
    "idle_us_per_step": 300.0,
    "longest": [],
}


class Served:
    """A server of which only the log is read."""

    def __init__(self) -> None:
        self.log, self.lines, self.sent = Path("log"), ["begin\n"], list[tuple[int, bool]]()

    def text(self) -> str:
        return "".join(self.lines)

    def decode(self, running: int, ms: float, lines: int = 6) -> None:
        line = f"Decode batch, #running-req: {running}, gen throughput (token/s): {1e3 * running / ms}, #queue-req: 0\n"
        self.lines += [line] * lines


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server that decodes four requests together, 10 ms a step, and 99 ms while it is recorded."""
    server = Served()

    def generate(_: object, model: Path, load: Load, answer: int, flush: bool, warm_up: bool = True) -> dict[str, Any]:
        server.sent.append((answer, flush))
        if answer > 1:
            server.decode(load.requests, 10.0)
        return {}

    def profile(_: object, ask: Any, layers: int, running: int) -> dict[str, Any]:
        server.decode(running, 99.0)
        server.lines.append(f"{RECORDED}. Traces are saved\n")
        ask()
        return TRACE

    monkeypatch.setattr(paper_rows, "generate", generate)
    monkeypatch.setattr(paper_rows, "profile_steps", profile)
    return server


def measured(server: Served, room: Room, layers: int = 2) -> dict[str, Any]:
    return step_row(cast(LocalServer, server), Path(), LOAD, room, layers)


def test_loads_by_name() -> None:
    steps = chosen(STEPS, 1)
    assert [load.requests for _, load in steps] == [1, 8, 16, 32, 64, 128]
    assert {(load.prompt, load.cache) for _, load in steps} == {(8192, HIT)}
    both = chosen("table8:1+32,table9,figure4:1+32", 1)
    assert [name for name, _ in both] == [STEPS, STEPS, "table9", *["figure4"] * 4]
    assert all(load.answer == 160 and load.prompt == 64 for _, load in chosen(STEPS, 999))
    assert {load.answer for _, load in chosen("figure6", 999)} == {16}
    with pytest.raises(ValueError, match="no table10; there are table8, table9, figure4"):
        chosen("table10", 1)
    with pytest.raises(ValueError, match="table8 has no load of 7 requests"):
        chosen(f"{STEPS}:7", 1)


def test_one_server_for_loads_with_a_prefix_cache() -> None:
    loads = chosen("table8:1,figure6:1", 1)
    without, with_cache = bench_paper.servers(loads)
    assert without == (["--disable-radix-cache"], [("figure6", Load(1, 100_000, 1024, OFF))])
    assert [load.cache for _, load in with_cache[1]] == [HIT, COLD, HIT]
    assert with_cache[0] == []


def test_a_row_of_a_step(served: Served) -> None:
    """Prompts are computed by one token on an empty cache; parts and idle add up; the log counts after recording."""
    row = measured(served, Room(2000, 16))
    assert served.sent == [(1, True), (160, False)]
    assert (row["requests"], row["prompt"], row["cache"], row["fits"], row["running"]) == (4, 100, HIT, True, 4)
    assert row["ms"] == {"store": 0.0, "attention": 3.0, "matrix products": 5.0, "other": 0.7, "idle": 0.3,
                         "total": 9.0}  # fmt: skip
    assert set(row["ms"]) == {*KINDS, "other", "idle", "total"}
    assert (row["ms_per_step"], row["steps"]) == (10.0, 24.0)


@pytest.mark.parametrize("room", [Room(1039, 16), Room(1100, 16, page=64), Room(2000, 3)])
def test_what_does_not_fit_is_not_measured(served: Served, room: Room) -> None:
    """Four times 260 tokens, 320 in pages of 64; or fewer requests at once."""
    row = measured(served, room)
    assert row["fits"] is False
    assert not served.sent
    assert not {"ms", "ms_per_step"} & set(row)
    assert (row["room"], row["room_requests"]) == room[:2]
    assert row["needed"] == (1280 if room.page == 64 else 1040)


def test_requests_that_never_run_together_do_not_fit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> dict[str, Any]:
        raise NeverAtOnceError(3)

    monkeypatch.setattr(paper_rows, "profile_steps", never)
    row = measured(served, Room(2000, 16))
    assert (row["fits"], row["running"], "ms" in row) == (False, 3, False)


def test_a_batch_that_falls_apart_is_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(*_: object) -> dict[str, Any]:
        served.lines.append(f"{RECORDED}\n")
        served.decode(3, 10.0)
        return TRACE

    monkeypatch.setattr(paper_rows, "profile_steps", profile)
    with pytest.raises(RuntimeError, match="3 of 4 requests were left after the steps"):
        measured(served, Room(2000, 16))


def test_without_a_gpu_there_are_no_kinds(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper_rows, "profile_steps", None)
    row = measured(served, Room(2000, 16), layers=0)
    assert (row["fits"], row["ms_per_step"]) == (True, 10.0)
    assert not {"ms", "steps"} & set(row)


def test_layers_of_one_kind(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3}
    for facts in (config, {"text_config": config}, config | {"layer_types": ["full_attention"] * 3}):
        (tmp_path / "config.json").write_text(json.dumps(facts))
        assert layers_of(tmp_path) == 3
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": ["linear_attention", "full_attention"]}))
    with pytest.raises(ValueError, match="layers of linear_attention cannot be told apart"):
        layers_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"experiments": "table1"}, "no table1"),
        ({"experiments": STEPS, "modes": "int1"}, "no int1"),
        ({"experiments": STEPS, "shape": "gpt-oss-20b"}, "layers of sliding_attention"),
        ({"experiments": "table9", "shape": "qwen2"}, "no shape qwen2"),
    ],
)
def test_wrong_arguments_start_nothing(arguments: dict[str, str], why: str, tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        bench_paper.main(**arguments, out=tmp_path / "results" / "out.json")
    assert not (tmp_path / "results").exists()


def test_tables_have_a_column_for_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"experiment": STEPS, "requests": 4, "ms": {"attention": 3.25}, "longest": [{"kernel": "x" * 99}]}
    bench_paper.show({"int2": [row], "bf16": [{"experiment": STEPS, "requests": 4}]})
    shown = capsys.readouterr().out
    assert "3.25" in shown
    assert "xxx" not in shown
