"""Keys by a codebook and values without zero points, from the fit to the answers of a server and of its successor."""

from __future__ import annotations

from pathlib import Path

import requests

from oscar_rotation.fit.options import FitOptions
from support.compare import LOGPROBS
from support.reference import MODEL, document, fit_rotations, question, token_ids, tokenizer
from support.servers import Server, serve

ARGS = ("--kv-cache-dtype", "int2", "--enable-fp32-lm-head", "--chunked-prefill-size", "512")
TOKENS = 8
QUESTIONS = 4


def asked(server: Server) -> list[tuple[list[str], list[float]]]:
    """Tokens and log probabilities of answers to two questions about each document: the second meets its prefix."""
    found = []
    for seed in range(QUESTIONS):
        text = document(1400, 70 + seed, facts=2)
        for word in text.facts:
            answer = server.generate(token_ids(text.text + question(word)), TOKENS, **LOGPROBS)["meta_info"]
            steps = answer["output_token_logprobs"]
            found.append(([step[1] for step in steps], [step[0] for step in steps]))
    return found


def test_books_answer_as_affine_codes_do_and_again_after_a_restart(tmp_path: Path) -> None:
    options = FitOptions(key_coding="codebook", value_coding="symmetric")
    env = fit_rotations(tmp_path, documents=3, recipe="focus", options=options)
    runs = []
    for number in range(2):
        with serve(MODEL, tmp_path / f"log{number}", *ARGS, env=env) as server:
            runs.append(asked(server))
            facts = requests.get(f"{server.url}/server_info", timeout=300).json()["internal_states"][0]["oscar"]
            assert facts["codes"] == "keys 2 (codebook), values 2 (symmetric)"
            assert facts["bits"] == 2.125
            # Again, from the pages that the first time left.
            again = asked(server)
            assert server.alive()
        right = 0
        for (ids, _), seed_word in zip(again, _words(), strict=True):
            right += token_text(ids).strip().startswith(seed_word)
        assert right >= 0.75 * len(again)
    assert [ids for ids, _ in runs[0]] == [ids for ids, _ in runs[1]]
    assert max(abs(x - y) for (_, a), (_, b) in zip(*runs, strict=True) for x, y in zip(a, b, strict=True)) < 1e-3


def _words() -> list[str]:
    return [number for seed in range(QUESTIONS) for number in document(1400, 70 + seed, facts=2).facts.values()]


def token_text(ids: list[int]) -> str:
    """Text of tokens."""
    return tokenizer().decode(ids)
