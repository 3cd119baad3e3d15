"""What ``oscar prove`` is made of: divergence, texts, documents with facts, kept answers, intervals, the page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from oscar_rotation.errors import RotationFileError
from oscar_tools.calibration.errors import DataError
from oscar_tools.evaluation.intervals import bootstrap, clustered_bootstrap, wilson
from oscar_tools.evaluation.prove.asking import AskingError, Client, Reply
from oscar_tools.evaluation.prove.caches import given_rotations
from oscar_tools.evaluation.prove.divergence import TopTokens, covered, kl_lower_bound, same_choice
from oscar_tools.evaluation.prove.haystack import FIRST, LAST, OVERRUN, build_haystack, fact, question, recalled
from oscar_tools.evaluation.prove.loops import loops
from oscar_tools.evaluation.prove.measures import Material
from oscar_tools.evaluation.prove.measures.retrieval import Retrieval
from oscar_tools.evaluation.prove.measures.session import EVERY, Session
from oscar_tools.evaluation.prove.measures.tail_kl import RUN, sharing
from oscar_tools.evaluation.prove.page import interval, number, p_value
from oscar_tools.evaluation.prove.sizes import SIZES
from oscar_tools.evaluation.prove.store import Store, fingerprint
from oscar_tools.evaluation.prove.texts import CALIBRATION, MEASUREMENT, Texts, part_of
from oscar_tools.evaluation.significance import mcnemar
from support.reference import MODEL


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(AutoTokenizer.from_pretrained(MODEL))


def told(logprobs: np.ndarray, top: int, text: np.ndarray) -> TopTokens:
    """What a server would tell of whole distributions [tokens, vocabulary]."""
    ids = np.argsort(-logprobs, axis=-1)[:, :top].astype(np.int32)
    rows = np.arange(len(text))
    return TopTokens(ids, logprobs[rows[:, None], ids].astype(np.float32), logprobs[rows, text].astype(np.float32))


def log_softmax(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return found


@given(seed=st.integers(0, 10_000), top=st.integers(1, 30), blur=st.floats(0, 4))
def test_the_bound_never_exceeds_the_divergence(seed: int, top: int, blur: float) -> None:
    rng = np.random.default_rng(seed)
    p = log_softmax(rng.normal(size=(3, 30)) * 3)
    q = log_softmax(p + rng.normal(size=(3, 30)) * blur)
    text = rng.integers(0, 30, 3)
    exact = (np.exp(p) * (p - q)).sum(-1)
    bound = kl_lower_bound(told(p, top, text), told(q, top, text), text)
    assert (bound <= exact + 1e-5).all()
    assert (bound >= 0).all()
    if top == 30:
        assert np.allclose(bound, exact, atol=1e-5)


def test_the_bound_is_tight_where_most_probability_is_told() -> None:
    rng = np.random.default_rng(0)
    p = log_softmax(rng.normal(size=(50, 1000)) * 4)
    q = log_softmax(p + rng.normal(size=p.shape) * 0.5)
    text = rng.integers(0, 1000, 50)
    exact = (np.exp(p) * (p - q)).sum(-1).mean()
    first, second = told(p, 64, text), told(q, 64, text)
    assert kl_lower_bound(first, second, text).mean() == pytest.approx(exact, rel=0.15)
    assert covered(first).mean() > 0.85
    assert same_choice(first, first).all()
    with pytest.raises(ValueError, match="cannot compare"):
        kl_lower_bound(first, second, text[:3])


def test_log_probabilities_that_are_no_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang writes NaN as null. A bound of such would be 0, which is what a perfect cache has."""
    number = {"output_token_logprobs": [], "input_token_logprobs": [[None, 1], [-0.5, 2], [None, 3]],
              "input_top_logprobs": [None, [[-0.5, 2]], [[None, 3]]]}  # fmt: skip
    monkeypatch.setattr(Client, "generate", lambda *_, **__: Reply("", [], "length", 4, 1, number))
    with pytest.raises(AskingError, match=r"^the server's log probabilities are no numbers"):
        Client("http://x").read([5, 1, 2, 3], 1, 1, cached=False)


def test_loops_are_repeated_tails() -> None:
    assert loops([9, *[1, 2, 3, 4, 5] * 3])
    assert loops([7] * 12)
    assert not loops([7] * 11)
    assert not loops([*[1, 2, 3, 4, 5] * 3, 6])
    assert not loops([])


def test_texts_of_both_parts_share_nothing(texts: Texts) -> None:
    for kind, documents in texts.documents(CALIBRATION).items():
        others = texts.documents(MEASUREMENT)[kind]
        assert documents
        assert others
        assert not set(documents) & set(others), kind


def test_windows_have_one_length_and_do_not_overlap(texts: Texts) -> None:
    windows = texts.windows(MEASUREMENT, 12, 700)
    assert {len(ids) for ids in windows} == {700}
    assert len({tuple(ids[100:150]) for ids in windows}) == 12
    assert windows == texts.windows(MEASUREMENT, 12, 700)
    assert texts.fingerprint(MEASUREMENT) != texts.fingerprint(CALIBRATION)


def test_text_of_a_user(tmp_path: Path, texts: Texts) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"text": f"Document {i}. " + "words " * 300} for i in range(40)]
    rows += [{"messages": [{"role": "user", "content": f"hello {i}"}]} for i in range(4)]  # type: ignore[list-item]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = Texts(texts.tokenizer, path)
    parts = [own.documents(part)["mine"] for part in (CALIBRATION, MEASUREMENT)]
    assert sum(map(len, parts)) == 44
    assert not set(parts[0]) & set(parts[1])
    assert all(part_of(text) == MEASUREMENT for text in parts[1])
    with pytest.raises(DataError, match=r"texts of 900 tokens, 5000 are needed"):
        own.windows(MEASUREMENT, 5000, 900)
    assert len(own.windows(MEASUREMENT, 5000, 900, at_least=1)) >= 1
    plain = tmp_path / "book.txt"
    plain.write_text("\n\n".join(f"Chapter {i} " + "text " * 500 for i in range(30)))
    assert Texts(texts.tokenizer, plain).windows(CALIBRATION, 2, 300)
    for name, fault in (("none.txt", "no such file"), ("none.jsonl", "neither one of"), ("a.csv", "expected .jsonl")):
        with pytest.raises(DataError, match=fault):
            Texts(texts.tokenizer, tmp_path / name).documents(CALIBRATION)


@pytest.mark.parametrize("depth", [0, 0.5, 1])
@pytest.mark.parametrize("distractors", [0, 3])
def test_facts_lie_where_they_are_asked_for(texts: Texts, depth: float, distractors: int) -> None:
    lines = texts.lines(MEASUREMENT)
    made = build_haystack(texts.encode, lines, 1024, depth, distractors, "seed")
    assert len(made.ids) == 1024
    assert made == build_haystack(texts.encode, lines, 1024, depth, distractors, "seed")
    text = texts.tokenizer.decode(made.ids)
    assert text.count(fact(made.key, made.number)) == 1
    assert text.count("The magic number for") == 1 + distractors
    assert text.endswith("\n")
    assert FIRST <= made.place <= 1024 - LAST
    assert made.place == pytest.approx(FIRST + depth * (1024 - LAST - FIRST), abs=170)
    with pytest.raises(ValueError, match="do not fit"):
        build_haystack(texts.encode, lines, 500, depth, distractors, "seed")
    assert made.key in question(made.key)


@pytest.mark.parametrize("longest", [40, 500, 5000])
@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_long_lines_hide_facts_where_short_ones_do(longest: int, depth: float) -> None:
    """Paragraphs of prose are one line each. A token is a character here."""
    encode = lambda text: [ord(x) for x in text]  # noqa: E731
    lines = tuple("x" * (longest // 2 + 37 * i % (longest // 2)) + "\n" for i in range(50))
    for seed in range(30):
        made = build_haystack(encode, lines, 3000, depth, 3, str(seed))
        text = "".join(map(chr, made.ids))
        assert len(text) == 3000
        assert text.count("The magic number for") == 4
        hidden = fact(made.key, made.number)
        assert text[made.place :].startswith(hidden)
        assert text[made.place - 1] == "\n"
        assert text.endswith("\n")
        # Four facts are no part of the text that depths count, three of them may lie before.
        facts = 4 * (len(hidden) + 12)
        wanted = FIRST + depth * (3000 - facts - LAST - FIRST)
        assert wanted - 20 <= made.place <= wanted + facts + OVERRUN
        assert len(text) - made.place - len(hidden) >= LAST - OVERRUN


def test_an_answer_begins_with_the_number() -> None:
    assert recalled(" 1234567.", "1234567")
    assert not recalled("234567", "1234567")


def test_seeds_draw_other_questions(texts: Texts) -> None:
    """Those of the first draw stay; facts of the others are new."""
    size = SIZES["reduced"]
    once, thrice = (Retrieval(Material(texts, size, (1024,), 8192, seeds=seeds)) for seeds in (1, 3))
    assert len(thrice.units()) == 3 * len(once.units())
    assert set(once.units()) < set(thrice.units())
    assert len({thrice.document(f"needle/1024/50/{number}").number for number in range(3)}) == 3
    assert once.settings() | {"questions": 3 * size.questions} == thrice.settings()


def test_a_session_fits_into_the_context(texts: Texts) -> None:
    size = SIZES["full"]
    session = Session(Material(texts, size, (1024,), 8192))
    assert FEW < session.turns <= 70
    turns = session.script("0")
    assert len(turns) == session.turns
    assert turns == session.script("0")
    assert turns != session.script("1")
    assert [turn.number is None for turn in turns] == [i % EVERY == EVERY - 1 for i in range(len(turns))]
    stated = "".join(turn.content for turn in turns)
    assert all(turn.number in stated for turn in turns if turn.number)
    used = sum(len(texts.chat_ids([{"role": "user", "content": turn.content}])) for turn in turns)
    assert used < 8192
    short = Session(Material(texts, size, (1024,), 1100))
    assert short.turns < 70
    assert "do not fit" in (short.remark or "")
    assert Session(Material(texts, size, (1024,), 400)).units() == []


FEW = 40


def test_answers_survive_a_run_that_is_killed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = store.cell("int2", "tail-kl", {"top": 64})
    cell.add("a", {"kl": [1.0]})
    cell.add("b", {"kl": [2.0]})
    cell.write_arrays("a", x=np.arange(3))
    with cell.path.open("a") as file:
        file.write('{"unit": "c", "ans')
    again = store.cell("int2", "tail-kl", {"top": 64})
    assert set(again.done) == {"a", "b"}
    again.add("c", {"kl": [3.0]})
    assert store.cell("int2", "tail-kl", {"top": 64}).done["c"] == {"kl": [3.0]}
    assert again.read_arrays("a")["x"].tolist() == [0, 1, 2]
    with pytest.raises(OSError, match="npz"):
        again.read_arrays("b")
    again.leave_out("no grammar")
    assert store.cell("int2", "tail-kl", {"top": 64}).left_out == "no grammar"


def test_other_settings_are_another_cell(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.cell("int2", "tail-kl", {"top": 64, "lengths": (1, 2)}).add("a", {})
    assert not store.cell("int2", "tail-kl", {"top": 65, "lengths": (1, 2)}).done
    assert not store.cell("bf16", "tail-kl", {"top": 64, "lengths": (1, 2)}).done
    assert store.cell("int2", "tail-kl", {"lengths": [1, 2], "top": 64}).done
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    store.clear()
    assert not store.cell("int2", "tail-kl", {"top": 64, "lengths": (1, 2)}).done


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(0)
    clusters = [rng.normal(loc=rng.normal(), size=100) for _ in range(20)]
    whole, alone = clustered_bootstrap(clusters, np.mean), bootstrap(np.concatenate(clusters))
    assert whole.mean == pytest.approx(alone.mean)
    assert whole.high - whole.low > 3 * (alone.high - alone.low)
    with pytest.raises(ValueError, match="needs observations"):
        clustered_bootstrap([], np.mean)
    assert wilson(5, 5).low == pytest.approx(0.566, abs=1e-3)


def test_texts_that_are_scored_on_the_same_tokens_are_one(texts: Texts) -> None:
    """Windows of several lengths come from one stream: every second one of 512 ends where one of 1,024 does."""
    lengths = 512, 1024
    tails = {f"{n}-{i}": ids[-256:] for n in lengths for i, ids in enumerate(texts.windows(MEASUREMENT, 8, n))}
    groups = sharing(list(tails), tails)
    assert sorted(unit for group in groups for unit in group) == sorted(tails)
    assert sum(len(group) == 2 for group in groups) >= 3
    for group in groups:
        for other in groups:
            if other is not group:
                runs = [{tuple(tails[u][i : i + RUN]) for u in g for i in range(257 - RUN)} for g in (group, other)]
                assert not runs[0] & runs[1]
    chain = {"a": list(range(64)), "b": list(range(32, 96)), "c": list(range(64, 128)), "d": list(range(200, 264))}
    assert sharing(["d", "c", "a", "b"], chain) == [["d"], ["c", "a", "b"]]
    assert sharing(["a", "c"], chain) == [["a"], ["c"]]


def test_mcnemar_looks_at_what_changed() -> None:
    first = {str(i): True for i in range(20)}
    assert mcnemar(first, first) == 1
    assert mcnemar(first, {key: int(key) >= 8 for key in first}) == pytest.approx(2 * 0.5**8)
    assert mcnemar(first, {"elsewhere": False}) == 1


def test_rotation_files_come_in_pairs(tmp_path: Path) -> None:
    k, v = tmp_path / "k_rotation_a.pt", tmp_path / "v_rotation_a.pt"
    assert given_rotations(None, None, None) is None
    with pytest.raises(ValueError, match="no such folder"):
        given_rotations(tmp_path / "none", None, None)
    with pytest.raises(RotationFileError, match="holds no k_rotation"):
        given_rotations(tmp_path, None, None)
    k.write_bytes(b"")
    with pytest.raises(ValueError, match="in pairs"):
        given_rotations(None, k, None)
    with pytest.raises(ValueError, match=r"v_rotation_a\.pt: no such file"):
        given_rotations(None, k, v)
    v.write_bytes(b"")
    assert given_rotations(tmp_path, None, None) == given_rotations(None, k, v) == (k, v)
    with pytest.raises(ValueError, match="not both"):
        given_rotations(tmp_path, k, v)


def test_figures_are_readable() -> None:
    assert [number(x) for x in (0, 0.04712, 1234.5, 0.0000123)] == ["0", "0.0471", "1,234", "1.2e-05"]
    assert interval({"mean": 0.5, "low": 0.4, "high": 0.6}, sign=True) == "+0.5 (0.4 to 0.6)"
    assert interval({"difference": 0.0, "low": None, "high": None}) == "0"
    assert interval(None) == "-"
    assert p_value({"p_value": 1e-9}) == "< .001"
