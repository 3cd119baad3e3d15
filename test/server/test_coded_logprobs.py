"""Log probabilities of a server beside a plain forward pass that knows rows by their codec alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from oscar_rotation.files.by_head import flat
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.files.rotation_set import RotationSet
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from support.plain_forward import ARGS, CHUNK, LARGEST, MEDIAN, expected
from support.reference import MODEL, document, fit_rotations, question, token_ids
from support.servers import serve

TOKENS = 24


def test_log_probabilities_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    """Of a prompt in chunks and of its answer; kv heads have codebooks and affine keys, values no zero points."""
    options = FitOptions(bits=BitGoal(mean=2.6), key_coding="codebook", value_coding="symmetric")
    env = fit_rotations(tmp_path, documents=3, recipe="focus", options=options)
    key, value = (read_rotation_file(Path(env[f"SGLANG_OSCAR_{side}_ROTATION_PATH"])) for side in "KV")
    assert set(flat(key.codings or ())) == {"codebook", "affine"}
    assert {len(key.runs(layer)) for layer in range(4)} == {1, 2}
    text = document(1300, 40, facts=2)
    prompt = token_ids(text.text + question(next(iter(text.facts))))
    with serve(MODEL, tmp_path / "log", *ARGS, env=env) as server:
        meta = server.generate(prompt, TOKENS, return_logprob=True, logprob_start_len=0)["meta_info"]
    steps = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    found, ids = torch.tensor([step[0] for step in steps]), [prompt[0], *(step[1] for step in steps)]

    def apart(key: RotationSet, value: RotationSet) -> list[torch.Tensor]:
        """Of the first chunk, of the rest of the prompt, and of the answer."""
        away = (found - expected(ids, len(prompt), (key, value))).abs()
        return list(away.split([CHUNK - 1, len(prompt) - CHUNK, TOKENS]))

    exact, behind, answer = apart(key, value)
    assert exact.max() < LARGEST
    assert behind.median() < MEDIAN
    assert answer.median() < MEDIAN
    # What such a comparison sees: points a channel off, the next layer's gains, values that are read short.
    assert key.codebooks is not None
    assert key.gains is not None
    assert value.gains is not None
    points = key.codebooks.points.roll(1, 4)
    for wrong in (
        (replace(key, codebooks=replace(key.codebooks, points=points)), value),
        (replace(key, gains=(*key.gains[1:], key.gains[0])), value),
        (key, replace(value, gains=tuple(0.95 * gain for gain in value.gains))),
    ):
        assert apart(*wrong)[1].median() > 2 * MEDIAN
