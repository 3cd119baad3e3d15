"""Buried tasks and recall: where questions stand, when an answer is right, and what the page says of both."""

from __future__ import annotations

import gzip
import json
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.prove.asking import SLACK, AskingError, Client, Reply
from oscar_tools.evaluation.prove.burying import FIRST, LAST, bury
from oscar_tools.evaluation.prove.functions import functions, modules, similarity
from oscar_tools.evaluation.prove.measures import Material
from oscar_tools.evaluation.prove.measures.recall import EACH, Recall, choose
from oscar_tools.evaluation.prove.measures.tasks import Tasks, spread
from oscar_tools.evaluation.prove.questions import MathQuestion, last_number, read_questions
from oscar_tools.evaluation.prove.rates import counts, cut_share, cut_warning, rate
from oscar_tools.evaluation.prove.sizes import SIZES
from oscar_tools.evaluation.prove.texts import Texts
from support.reference import MODEL


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(AutoTokenizer.from_pretrained(MODEL))


def write_sums(path: Path, count: int) -> Path:
    """Questions of GSM8K's form."""
    rows = [{"question": f"Ann has {i} apples and buys {i + 3} more. How many?", "answer": f"Add.\n#### {2 * i + 3}"}
            for i in range(count)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


class Stub:
    """Answers in place of a server."""

    def __init__(self, text: str, finish: str = "stop") -> None:
        self.text, self.finish = text, finish

    def behind_cache(self, prefix: list[int], ids: list[int], tokens: int, sampling: Any) -> Reply:
        assert ids[: len(prefix)] == prefix
        return Reply(self.text, [], self.finish, len(ids), len(prefix), {})


LONGEST = 400
"""Tokens of a question."""


@given(
    sizes=st.lists(st.integers(1, LONGEST), max_size=80, min_size=1),
    before=st.integers(0, 100),
    budget=st.integers(FIRST + LAST + 3 * LONGEST, 4000),
    data=st.data(),
)
def test_what_is_asked_stands_once_inside_of_the_history(
    sizes: list[int], before: int, budget: int, data: st.DataObject
) -> None:
    asked = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1)))
    try:
        groups = bury(sizes, asked, before, budget)
    except ValueError:
        # One in front of the asked one, and as many behind it as reach LAST, are refused only where they are not there.
        assert sum(sizes) < FIRST + LAST + 4 * LONGEST
        return
    assert [i for group in groups for i in group.asked] == asked
    for group in groups:
        assert len(set(group.order)) == len(group.order)
        for i in group.asked:
            at = group.order.index(i)
            assert before + sum(sizes[j] for j in group.order[:at]) >= FIRST
            assert sum(sizes[j] for j in group.order[at + 1 :]) >= LAST
        assert sum(sizes[j] for j in group.order) <= budget


def test_many_questions_take_few_prompts() -> None:
    groups = bury([80] * 1000, spread(1000, 300), 40, 3400)
    assert len(groups) <= 10
    assert all(len(group.order) > 38 for group in groups)


def test_prompts_of_a_file(tmp_path: Path, texts: Texts) -> None:
    file = read_questions(write_sums(tmp_path / "sums.jsonl", 200))
    measure = Tasks(Material(texts, SIZES["full"], (1024,), 8192, (file,), 50))
    measure.prepare()
    assert len(measure.units()) == 50
    assert len({tuple(asked.prefix) for asked in measure.asked.values()}) <= 2
    decode = texts.tokenizer.decode
    for unit, asked in measure.asked.items():
        question = file.questions[unit.split("/")[1]].text()
        whole = decode(asked.ids)
        assert whole.count(question) == 1
        assert question in decode(asked.ids[asked.begin : asked.end])
        assert asked.begin >= FIRST
        # What a server may compute again behind the prefix is not asked for.
        assert asked.end <= len(asked.prefix) - SLACK
        number = decode(asked.ids[asked.begin : asked.end]).split(":")[0].removeprefix("Problem ")
        assert f"Solve problem {number}." in decode(asked.ids[len(asked.prefix) :])
        assert len(asked.ids) <= measure.longest() < 3800
        assert len(asked.ids) + asked.question.limit <= measure.reach()
    few = Tasks(Material(texts, SIZES["full"], (1024,), 8192, (read_questions(write_sums(tmp_path / "few.jsonl", 5)),)))
    with pytest.raises(DataError, match=r"^few: 5 questions of \d+ tokens cannot bury one"):
        few.prepare()


def test_an_answer_that_is_cut_off_is_wrong_and_counted(tmp_path: Path, texts: Texts) -> None:
    file = read_questions(write_sums(tmp_path / "sums.jsonl", 60))
    measure = Tasks(Material(texts, SIZES["full"], (1024,), 8192, (file,), 4))
    unit = measure.units()[0]
    line = int(unit.split("/")[1]) - 1
    good, cut, bad = (
        measure.ask(Stub(text, finish), unit, None, None)  # type: ignore[arg-type]
        for text, finish in ((f"#### {2 * line + 3}", "stop"), (f"#### {2 * line + 3}", "length"), ("no", "stop"))
    )
    assert [answer["right"] for answer in (good, cut, bad)] == [True, False, False]
    found = measure.figures({unit: cut}, {unit: good})
    assert found["counts"] == {"asked": 4, "answered": 0, "cut_off": 1}
    assert found["files"]["sums"]["right"]["mean"] == 0
    assert found["files"]["sums"]["difference"]["difference"] == -1


def test_other_questions_have_other_answers(tmp_path: Path, texts: Texts) -> None:
    found = []
    for count in (60, 61, 60):
        file = read_questions(write_sums(tmp_path / "sums.jsonl", count))
        found.append(Tasks(Material(texts, SIZES["full"], (1024,), 8192, (file,), 4)).settings())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ('{"text": "a"}', r"line 1: neither of HumanEval's form \(prompt, entry_point, test\) nor of GSM8K's"),
        ("[1]", "line 1: neither of"),
        ("not json", "line 1 is no JSON"),
        ('{"question": "q", "answer": "3"}', "line 1: the answer has no number behind ####"),
        ("\n\n", "holds no questions"),
        (
            '{"question": "q", "answer": "#### 3"}\n{"prompt": "p", "entry_point": "e", "test": "t"}',
            "holds questions of two forms; give a file for each",
        ),
    ],
)
def test_files_of_another_form_are_one_line(tmp_path: Path, rows: str, fault: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(rows)
    with pytest.raises(DataError, match=fault) as error:
        read_questions(path)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "a.jsonl.gz"
    broken.write_bytes(b"plain")
    for path, fault in (
        (broken, "cannot be read"),
        (tmp_path / "b.jsonl", "no such file"),
        (tmp_path, "expected .jsonl"),
    ):
        with pytest.raises(DataError, match=fault):
            read_questions(path)


def test_compressed_files_and_questions_that_stand_twice(tmp_path: Path) -> None:
    plain = read_questions(write_sums(tmp_path / "sums.jsonl", 3))
    data = (tmp_path / "sums.jsonl").read_bytes()
    (tmp_path / "again.jsonl.gz").write_bytes(gzip.compress(data + b"\n" + data))
    again = read_questions(tmp_path / "again.jsonl.gz")
    assert again.questions == plain.questions
    assert again.name == "again"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so 5\n#### 1,234", "1234"),
        ("#### $18.50 per hour, 3 hours", "18.5"),
        ("It is 3 + 4 = 7.", "7"),
        ("\\boxed{12}", "12"),
        ("#### -4", "-4"),
        ("#### \nthe answer is 9", "9"),
        ("#### Step 1: 5 apples\n#### Step 2\n5 + 4 = 9", "9"),
        ("#### **$12**", "12"),
        ("none", None),
    ],
)
def test_the_number_of_an_answer(answer: str, number: str | None) -> None:
    assert last_number(answer) == (None if number is None else Decimal(number))
    assert MathQuestion("q", Decimal("1234")).right(answer) is (number == "1234")


MODULE = '''import os


class A:
    @property
    def long(self):
        """Doc."""
        a = 1
        b = 2
        return a + b

    def twice(self):
        a = 1
        b = 2
        c = 3
        return a + b + c


def twice():
    a = 1
    b = 2
    c = 3
    return a + b + c


def short():
    return 1


async def waits(x):
    a = 1
    b = 2
    c = 3
    return "\u00e4" + a + b + c
'''


def test_functions_have_names_of_their_own() -> None:
    found = functions(MODULE)
    assert [function.name for function in found] == ["long", "waits"]
    code = [MODULE[function.begin : function.end] for function in found]
    assert code[0].startswith("    def long(self):")
    assert code[0].endswith("return a + b\n")
    assert code[1].startswith("async def waits(x):")
    assert functions("def broken(") == []


def test_an_answer_is_alike_without_its_frame() -> None:
    code = MODULE[functions(MODULE)[0].begin : functions(MODULE)[0].end]
    bare = "\n".join(line[4:] + "  " for line in code.splitlines())
    for answer in (code, f"```python\n{bare}\n```", f"Sure.\n```\n@property\n{bare}```\nThat is it."):
        assert similarity(answer, "long", code) == 1
    assert similarity(code.replace("b = 2", "b = 3"), "long", code) > 0.95
    assert similarity("```python\ndef long(self):\n    return 3\n```", "long", code) < 0.6


def test_modules_fill_a_length() -> None:
    found = list(modules([MODULE, MODULE.replace("long", "other").replace("waits", "naps")] * 5, 700, len))
    assert found
    for text, known in found:
        assert 400 < len(text) <= 700
        assert text.endswith("\n")
        assert all(function.end <= len(text) for function in known)


def test_functions_to_recall_lie_in_the_history(texts: Texts) -> None:
    measure = Recall(Material(texts, SIZES["reduced"], (1024,), 8192, recall_lengths=(1536,)))
    measure.prepare()
    assert measure.units() == [f"1536/{i}" for i in range(6)]
    assert measure.settings() == Recall(measure.material).settings()
    decode, prefixes = texts.tokenizer.decode, [tuple(asked.prefix) for asked in measure.asked.values()]
    assert max(map(prefixes.count, prefixes)) <= EACH
    for asked in measure.asked.values():
        assert len(asked.prefix) <= 1536
        assert len(asked.ids) + asked.limit <= measure.reach() <= 8192
        whole = decode(asked.prefix)
        begin = whole.index(asked.code)
        assert len(texts.encode(whole[:begin])) >= 64
        assert len(texts.encode(whole[begin + len(asked.code) :])) >= SLACK
        assert asked.code.strip() not in decode(asked.ids[len(asked.prefix) :])
        assert f"`{asked.name}`" in decode(asked.ids[len(asked.prefix) :])
    asked = measure.asked["1536/0"]
    answers = [
        measure.ask(Stub(f"```python\n{asked.code}```", finish), "1536/0", None, None)  # type: ignore[arg-type]
        for finish in ("stop", "length")
    ]
    assert [(answer["right"], answer["similarity"]) for answer in answers] == [(True, 1.0), (False, 1.0)]


def test_few_modules_are_asked_for_more_functions() -> None:
    """As of 64,000 tokens: a machine has sources for a dozen, each with hundreds of functions."""

    def of(*sizes: int) -> list[Any]:
        return [iter([(module, number) for number in range(size)]) for module, size in enumerate(sizes)]

    many = choose(iter(of(50, 50, 50)), 2 * EACH)
    assert many == [(module, number) for module in (0, 1) for number in range(EACH)], "no third module is read"
    few = choose(of(50, EACH - 1, 50), 40)
    assert len(few) == len(set(few)) == 40
    assert few == sorted(few), "those of a module follow each other"
    assert {module for module, _ in few} == {0, 1, 2}
    assert len(choose(of(7, 9), 40)) == 16
    assert choose([], 40) == []


def test_a_prefix_is_cached_once_and_again_where_it_was_pushed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    held: set[int] = set()
    evicts = False

    def generate(self: Client, ids: list[int], tokens: int, *_: Any, **__: Any) -> Reply:
        asked.append(tokens)
        cached = len(ids) if ids[0] in held and not evicts else 0
        if tokens == 1:
            time.sleep(0.05)
            held.add(ids[0])
        return Reply("", [], "stop", len(ids), cached, {})

    monkeypatch.setattr(Client, "generate", generate)
    client = Client("http://x")
    threads = [
        threading.Thread(target=client.behind_cache, args=([key] * 1000, [key] * 1001, 5))
        for key in (1, 2)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (asked.count(1), asked.count(5)) == (2, 16)
    held.clear()
    assert client.behind_cache([1] * 1000, [1] * 1001, 5).cached == 1001
    assert asked.count(1) == 3
    evicts = True
    with pytest.raises(AskingError, match="only 0 of 1000 tokens"):
        client.behind_cache([1] * 1000, [1] * 1001, 5)


def test_rates_are_paired() -> None:
    base = {str(i): True for i in range(20)}
    own = {str(i): i >= 8 for i in range(20)}
    found = rate(own, base, own)
    assert found["questions"] == 20
    assert found["p_value"] == pytest.approx(2 * 0.5**8)
    assert found["difference"]["difference"] == pytest.approx(-0.4)
    assert found["difference"]["low"] < -0.4 < found["difference"]["high"]
    assert rate(own, {}, own)["difference"] is None
    assert "difference" not in rate(own, None, own)


def test_more_than_one_percent_cut_off_is_said() -> None:
    ended, empty, cut = (
        {"finish": finish, "text": text} for finish, text in (("stop", "a"), ("stop", " "), ("length", "a"))
    )
    assert counts(200, [ended] * 197 + [empty] + [cut] * 2) == {"asked": 200, "answered": 197, "cut_off": 2}
    assert cut_warning(counts(200, [ended] * 198 + [cut] * 2)) is None
    assert cut_warning(counts(10, [cut] * 10)) == "10 of 10 answers were cut off at their limit of tokens"
    assert cut_share(counts(0, [])) == 0
