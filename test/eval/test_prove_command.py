"""``oscar prove`` as a user runs it, its servers replaced by a stand-in: options, resumption, failures, the page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.model_table import model_settings
from oscar_tools.evaluation.prove import run
from oscar_tools.evaluation.prove.asking import Reply
from oscar_tools.evaluation.prove.measures import Material
from oscar_tools.evaluation.prove.measures.json_schema import JsonSchema
from oscar_tools.evaluation.prove.sizes import SIZES
from oscar_tools.evaluation.prove.store import Store, alone_in
from oscar_tools.evaluation.prove.texts import Texts
from support.prove_runs import ROTATIONS, Servers, figures, prove
from support.reference import MODEL
from support.server_answers import INT2, server_info


def test_a_whole_run(tmp_path: Path, servers: Servers) -> None:
    done = prove(tmp_path)
    assert done.exit_code == 0, done.output
    assert servers.started == ["bf16", "fp8", "int2"]
    found = figures(tmp_path)
    kl = [found[name]["tail-kl"]["all"]["kl"]["mean"]["mean"] for name in ("bf16", "fp8", "int2")]
    assert kl[0] == 0
    assert 0 < kl[1] < kl[2]
    agreement = [found[name]["tail-kl"]["all"]["agreement"]["mean"] for name in ("bf16", "fp8", "int2")]
    assert agreement[0] == 1 > agreement[1] > agreement[2]
    assert "excess" in found["int2"]["tail-kl"]["1024"]
    assert set(found["int2"]["retrieval"]["tasks"]) == {"needle", "multi-key"}
    assert found["int2"]["session"]["cut_off"]["mean"] == 1
    assert found["int2"]["session"]["by_turn"][-1]["cached"] > 0
    assert found["fp8"]["json"]["all"]["valid"]["mean"] == 1
    page = (tmp_path / "prove.md").read_text()
    for part in ("## Verdict", "| BF16 | 16.00 |", "| FP8 (e4m3) | 8.00 |", "## Growing session", "plots/tail-kl.png"):
        assert part in page
    assert (tmp_path / "plots" / "retrieval.png").stat().st_size > 1000


def test_the_page_says_what_servers_say(tmp_path: Path, servers: Servers) -> None:
    """Bits of an int2 server and the type of a stock one are known to nobody else; a run that goes on keeps them."""
    own = INT2 | {"bits_at_128k": 3.45, "group_sizes": [32], "recent": 77}
    servers.options = {"int2": {"info": server_info(own)}, "bf16": {"info": server_info(dtype="float16")}}
    asked = ("--cache", "int2", "--measure", "tail-kl", *ROTATIONS)
    assert prove(tmp_path, *asked).exit_code == 0
    for _ in range(2):
        page = (tmp_path / "prove.md").read_text()
        assert "| FP16 | 16.00 |" in page
        assert re.search(r"\| INT2[^|]*\| 3\.45 \|", page)
        assert "groups of 32, 64 sink and 77 recent tokens, fingerprint abababababab" in page
        rows = json.loads((tmp_path / "prove.json").read_text())["caches"]
        assert rows[1]["server"]["int2"] == own
        servers.options = {}
        assert prove(tmp_path, *asked).exit_code == 0
    assert servers.started == ["bf16", "int2"]


def test_a_server_of_another_cache_is_left_out(tmp_path: Path, servers: Servers) -> None:
    servers.options = {"int2": {"info": server_info()}}
    done = prove(tmp_path, "--measure", "tail-kl", "--cache", "int2", *ROTATIONS)
    assert done.exit_code == 1
    assert "the server says that its cache is BF16; see --server-args" in done.output
    assert figures(tmp_path)["int2"] == {}


def test_questions_of_a_user(tmp_path: Path, servers: Servers) -> None:
    """Of both forms, with a function to recall. Answers of the stand-in are cut off, which the page says."""
    sums, code = tmp_path / "sums.jsonl", tmp_path / "code.jsonl"
    sums.write_text(
        "\n".join(json.dumps({"question": f"What is {i} + 1? " * 9, "answer": "#### 3"}) for i in range(60))
    )
    heads = [f'def f{i}(x):\n    """{"Add one. " * 30}"""\n' for i in range(30)]
    tests = "def check(candidate):\n    assert candidate(1) == 2\n"
    rows = [{"prompt": head, "entry_point": f"f{i}", "test": tests} for i, head in enumerate(heads)]
    code.write_text("\n".join(map(json.dumps, rows)))
    asked = ["--measure", "tasks", "--measure", "recall", "--tasks", str(sums), "--tasks", str(code)]
    refused = prove(tmp_path / "out", *asked)
    assert refused.exit_code == 1
    assert "code: scoring these questions runs code that the model writes, on this machine; allow it" in refused.stderr
    assert not servers.started
    done = prove(tmp_path / "out", *asked, "--task-count", "2", "--run-code", "--cache", "bf16")
    assert done.exit_code == 0, done.output
    found = figures(tmp_path / "out")["bf16"]
    assert found["tasks"]["counts"] == {"asked": 4, "answered": 0, "cut_off": 4}
    assert set(found["tasks"]["files"]) == {"sums", "code"}
    assert found["recall"]["counts"] == {"asked": 2, "answered": 0, "cut_off": 2}
    page = (tmp_path / "out" / "prove.md").read_text()
    for part in ("| recall, 1024 | buried sums | buried code |", "## Buried tasks", "100.0%"):
        assert part in page
    for said in (page, done.output):
        assert "BF16, Buried tasks: 4 of 4 answers were cut off at their limit of tokens" in said


def test_a_second_run_asks_nothing_and_a_third_only_what_is_new(tmp_path: Path, servers: Servers) -> None:
    assert prove(tmp_path, "--measure", "retrieval").exit_code == 0
    first = figures(tmp_path)
    servers.started.clear()
    again = prove(tmp_path, "--measure", "retrieval")
    assert again.exit_code == 0
    assert servers.started == []
    assert "all 4 answers are there" in again.output
    assert figures(tmp_path) == first
    assert prove(tmp_path, "--measure", "retrieval", "--lengths", "1024,1536").exit_code == 0
    assert servers.started == ["bf16", "fp8", "int2"]
    servers.started.clear()
    assert prove(tmp_path, "--measure", "retrieval", "--fresh").exit_code == 0
    assert len(servers.started) == 3


def test_a_server_that_dies_costs_only_what_it_did_not_answer(tmp_path: Path, servers: Servers) -> None:
    servers.options["int2"] = {"dies_after": 3}
    done = prove(tmp_path, "--measure", "retrieval")
    assert done.exit_code == 1
    assert "the server ended: RuntimeError: out of tape" in done.output
    assert "the server ended" in (tmp_path / "prove.md").read_text()
    del servers.options["int2"]
    servers.started.clear()
    done = prove(tmp_path, "--measure", "retrieval")
    assert done.exit_code == 0
    assert servers.started == ["int2"]
    assert figures(tmp_path)["int2"]["retrieval"]["all"]["questions"] == 4


def test_chunks_of_several_sizes_are_rows_of_one_measure(tmp_path: Path, servers: Servers) -> None:
    chosen = ["--cache", "int2", *ROTATIONS, "--measure", "effects", "--measure", "retrieval"]
    done = prove(tmp_path, *chosen, "--chunk-sizes", "512,2048")
    assert done.exit_code == 0, done.output
    more = [f"{name}-chunk-{tokens}" for name in ("bf16", "int2") for tokens in (512, 2048)]
    assert servers.started == ["bf16", "int2", *more]
    assert servers.args["int2-chunk-512"] == (*servers.args["int2"], "--chunked-prefill-size", "512")
    found = figures(tmp_path)
    assert set(found["int2"]) == {"effects", "retrieval"}
    assert set(found["int2-chunk-512"]) == {"effects"}
    assert found["bf16-chunk-512"]["effects"]["all"]["cold_kl"]["mean"] == 0
    assert found["int2-chunk-512"]["effects"]["all"]["cold_kl"]["mean"] > 0
    page = (tmp_path / "prove.md").read_text()
    assert "chunks of 512" not in page.split("\n## ")[1]
    assert (
        page.count("| BF16, chunks of 2,048 |")
        == page.split("Texts read cold")[1].count("| BF16, chunks of 2,048 |")
        > 0
    )


def test_two_runs_in_one_folder(tmp_path: Path, servers: Servers) -> None:
    with alone_in(tmp_path):
        done = prove(tmp_path, "--measure", "retrieval")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "another `oscar prove` writes to it" in done.stderr
    assert not servers.started
    assert prove(tmp_path, "--measure", "retrieval").exit_code == 0


def test_without_bf16_there_is_nothing_to_compare(tmp_path: Path, servers: Servers) -> None:
    servers.refuse = {"bf16"}
    done = prove(tmp_path, "--measure", "retrieval")
    assert done.exit_code == 1
    assert "error: BF16: left out, the server ended with status 1: ValueError: no such cache here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_machine_cannot_do_is_told(tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 that does not start, no grammar, no matplotlib: the rest is there and the page says what is not."""
    servers.refuse = {"fp8"}
    servers.options = {"bf16": {"grammar": False}, "int2": {"grammar": False}}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = prove(tmp_path, "--measure", "json", "--measure", "retrieval")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "prove.md").read_text()
    assert "FP8 (e4m3): left out, the server ended with status 1: ValueError: no such cache here" in page
    assert "BF16, INT2, reference_k_rotation: JSON by schema under long context left out" in page
    assert "no plots: they need matplotlib" in page
    assert "json" not in figures(tmp_path)["int2"]


def test_a_prefix_that_is_not_cached_is_no_measurement(tmp_path: Path, servers: Servers) -> None:
    servers.options = {"int2": {"caches": False}}
    done = prove(tmp_path, "--measure", "tail-kl")
    assert done.exit_code == 1
    assert "only 0 of 768 tokens came from the prefix cache" in (tmp_path / "prove.md").read_text()


def test_rotations_of_other_models_cost_no_run(tmp_path: Path, servers: Servers) -> None:
    for side in ("k", "v"):
        facts = RotationMetadata("qqt", side)  # type: ignore[arg-type]
        save_rotation_file(tmp_path / f"{side}_rotation_qqt_r_h.pt", RotationSet(torch.eye(64)[None], metadata=facts))
    done = prove(tmp_path / "out", "--cache", "int2", "--rotations", str(tmp_path))
    assert done.exit_code == 1
    assert "head_dim 64" in done.stderr
    assert not servers.started


def test_a_long_chat_template_leaves_room_for_the_answer() -> None:
    """Some templates bring a system prompt of hundreds of tokens."""
    texts = Texts(AutoTokenizer.from_pretrained(MODEL))
    plain, sent = texts.chat_ids, []

    class Cached:
        def behind_cache(self, prefix: list[int], ids: list[int], tokens: int, sampling: Any) -> Reply:
            sent.append(ids)
            return Reply("{}", [], "stop", len(ids), len(prefix), {})

    for system in (0, 400):
        texts.chat_ids = lambda messages, n=system: [1] * n + plain(messages)  # type: ignore[method-assign]
        measure = JsonSchema(Material(texts, SIZES["reduced"], (2048,), 4096))
        measure.ask(Cached(), "2048/0", None, None)  # type: ignore[arg-type]
        assert 1400 < len(sent[-1]) <= 2048 - 160


def test_a_small_cache_is_asked_less_at_once(tmp_path: Path) -> None:
    proof = run.Proof(model_settings("m"), [], Store(tmp_path), tmp_path, {}, at_once=8)
    assert [proof.in_flight(n, 1000) for n in (None, 10**6, 5000, 500)] == [8, 8, 2, 1]
