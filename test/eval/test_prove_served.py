"""``oscar prove`` on the shipped model behind real servers: dump, fit, three caches, every measure, a page.

Naive INT2 is the planted fault: a measure that does not tell it from the fitted cache measures nothing.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from oscar_tools.cli import app
from oscar_tools.evaluation.prove import questions, sizes
from oscar_tools.evaluation.prove.measures import tasks
from oscar_tools.evaluation.prove.sizes import Size
from support.reference import MODEL

pytestmark = pytest.mark.server

TURNS = 8
"""As few as a session may have."""
TINY = Size("reduced", 1024, 3, 64, 2, 2, 1, TURNS, 1, 2, 8192, 2, cold=3)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``prove.json`` of one run, and ``page``."""
    out = tmp_path_factory.mktemp("prove")
    sums = out / "sums.jsonl"
    rows = [{"question": f"Ann has {i} apples and buys {i} more. " * 4, "answer": f"#### {2 * i}"} for i in range(60)]
    sums.write_text("\n".join(map(json.dumps, rows)))
    command = ["prove", str(MODEL), "--size", "reduced", "--out", str(out), "--cache", "int2", "--cache", "naive",
               "--servers", "2"]  # fmt: skip
    command += ["--tasks", str(sums), "--task-count", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.SIZES, "reduced", TINY)
        # The model solves nothing: what it is asked behind, and its answers, need not be long.
        patch.setattr(tasks, "TOKENS", 1024)
        patch.setattr(questions, "MathQuestion", partial(questions.MathQuestion, limit=64))
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((out / "prove.json").read_text())
    return found | {"page": (out / "prove.md").read_text(), "out": out}


@pytest.fixture(scope="module")
def figures(results: dict[str, Any]) -> dict[str, Any]:
    """Cache -> figures."""
    return {row["name"]: row["figures"] for row in results["caches"]}


def test_kl_tells_a_good_cache_from_a_bad_one(figures: dict[str, Any]) -> None:
    tail = {name: figures[name]["tail-kl"]["all"] for name in ("bf16", "int2", "naive")}
    floor, good, bad = (tail[name]["kl"]["mean"]["mean"] for name in tail)
    assert floor < 0.3 * good
    assert good < 0.1
    assert bad > 10 * good
    assert tail["bf16"]["agreement"]["mean"] > tail["int2"]["agreement"]["mean"] > tail["naive"]["agreement"]["mean"]
    assert abs(tail["int2"]["excess"]["difference"]) < 0.1 < tail["naive"]["excess"]["difference"]
    assert all(x["covered"] > 0.8 for x in tail.values())


def test_a_prompt_that_is_cached_is_another_for_few_bits_only(figures: dict[str, Any]) -> None:
    kl = {name: figures[name]["effects"]["all"]["kl"]["mean"] for name in ("bf16", "int2", "naive")}
    assert kl["bf16"] < 0.3 * kl["int2"] < 0.3 * kl["naive"]
    cold = {name: figures[name]["effects"]["all"]["cold_kl"]["mean"] for name in ("int2", "naive")}
    assert cold["naive"] < 0.3 * kl["naive"]  # One chunk: nothing is read in two bits.


def test_facts_are_found_but_for_the_bad_cache(figures: dict[str, Any]) -> None:
    right = {name: figures[name]["retrieval"]["all"]["right"]["mean"] for name in figures}
    assert right["bf16"] >= 0.8
    assert right["int2"] >= right["bf16"] - 0.3
    assert right["naive"] < 0.3


def test_sessions_reuse_their_beginning(figures: dict[str, Any]) -> None:
    for name, row in figures.items():
        turns = row["session"]["by_turn"]
        assert len(turns) == TURNS
        last = turns[-1]
        # An int2 server computes the last 256 tokens anew; pages are of 64 tokens or more.
        assert last["cached"] >= last["known"] - (512 if name != "bf16" else 1), name


def test_questions_and_functions_are_asked_behind_the_cache(results: dict[str, Any], figures: dict[str, Any]) -> None:
    """The model solves none of them; every answer is scored, counted and behind a prefix that was cached."""
    for name, row in figures.items():
        for measure in ("tasks", "recall"):
            counts = row[measure]["counts"]
            assert counts["asked"] == 2, name
            kept = next((results["out"] / "cells" / name).glob(f"{measure}-*.jsonl")).read_text().splitlines()[1:]
            answers = [json.loads(line)["answer"] for line in kept]
            assert len(answers) == 2
            assert counts["cut_off"] == sum(answer["finish"] == "length" for answer in answers)
            assert all(answer["cached"] > 256 for answer in answers)
    assert "| recall, 1024 | buried sums |" in results["page"]


def test_the_page_says_what_was_left_out(results: dict[str, Any]) -> None:
    page, out = results["page"], results["out"]
    assert "JSON by schema under long context left out" in page
    assert page.index("## Verdict") < page.index("## Tail KL")
    for link in ("plots/tail-kl.png", "plots/retrieval.png", "plots/session.png"):
        assert f"({link})" in page
        assert (out / link).exists()
    assert list(out.glob("calibration-*/fits/*/k_rotation_*.safetensors"))
    assert ", fitted for 8,192 positions" in page.split("## Servers")[1]
