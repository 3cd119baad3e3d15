"""Weights that leave their rotations behind, and rotations that a running server fits again to them."""

from __future__ import annotations

import re
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from oscar_cpu.server import has_gpu
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.fit.bit_goal import BitGoal
from oscar_rotation.fit.options import FitOptions
from sglang_oscar.attention.key_errors import CHUNKS, EVERY, TOO_MUCH
from support.plain_forward import ARGS, CHUNK, LARGEST, MEDIAN, expected
from support.reference import MODEL, document, fit_rotations, question, token_ids
from support.servers import STRICT, TWO_CORES, TWO_RANKS, Server, serve
from support.weights import post

pytestmark = pytest.mark.server
TOKENS = 16
SPREAD = 8.0


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference model with channels of keys made larger and smaller, and those of queries the other way: the same
    function, to the bit, whose keys are no longer those that rotations were fitted to."""
    folder = tmp_path_factory.mktemp("changed") / "model"
    shutil.copytree(MODEL, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in weights if name.endswith("k_norm.weight")]:
        # Both channels of a pair that RoPE turns.
        factor = torch.where(torch.rand(64, generator=generator) < 0.5, SPREAD, 1 / SPREAD).repeat(2).bfloat16()
        weights[name] = weights[name] * factor
        weights[name.replace("k_norm", "q_norm")] = weights[name.replace("k_norm", "q_norm")] / factor
    save_file(weights, file, {"format": "pt"})
    return folder


@cache
def prompt(seed: int) -> list[int]:
    text = document(1300, seed, facts=2)
    return token_ids(text.text + question(next(iter(text.facts))))


def growth(server: Server) -> float:
    """Of the worst layer's error, on as many prompts as a result takes."""
    for seed in range(EVERY * CHUNKS + 1):
        server.generate(prompt(100 + seed % 6)[seed : seed + 150], 1)
    text = requests.get(f"{server.url}/metrics", timeout=600).text
    return max(map(float, re.findall(r"^sglang:oscar_key_error_growth\{.*\} (\S+)$", text, re.MULTILINE)))


def asked(server: Server) -> list[Any]:
    """A prompt, cold, and one that hits a part of it: tokens and log probabilities, from the first one on."""
    said = []
    for number, ids in enumerate((prompt(40), prompt(40)[:700] + prompt(41)[:300])):
        meta = server.generate(ids, TOKENS, return_logprob=True, logprob_start_len=0 if number == 0 else -1)[
            "meta_info"
        ]
        assert (meta["cached_tokens"] > 0) == bool(number)
        said.append([step[:2] for step in (meta["input_token_logprobs"] or []) + meta["output_token_logprobs"]])
    return said


def facts(server: Server) -> dict[str, Any]:
    return requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]["oscar"]


def refused(server: Server, action: str) -> str:
    reply = requests.post(f"{server.url}/weights_checker", json={"action": action}, timeout=600)
    assert (reply.status_code, reply.json()["success"]) == (400, False)
    return reply.json()["message"]


def cached(server: Server) -> int:
    """Tokens of a prompt that it has."""
    return server.generate(prompt(40), 1)["meta_info"]["cached_tokens"]


def refit(server: Server, out: Path) -> None:
    """Let a server see prompts and fit to them; some are in its cache when it does."""
    post(server, "weights_checker", action="oscar_sample")
    for seed in range(6):
        server.generate(prompt(60 + seed)[:600], 1)
    server.generate(prompt(40), TOKENS)
    assert cached(server) > 0
    time.sleep(3)  # until the scheduler has noticed that nobody is left
    post(server, "weights_checker", action=f"oscar_refit:{out}")
    assert cached(server) == 0, "rows of the old matrices are read with the new ones"


def test_keys_that_have_changed_are_told_and_fitted_again(changed: Path, tmp_path: Path) -> None:
    """From then on it is a server that was started on the files of the refit."""
    options = FitOptions(bits=BitGoal(3, 2), value_coding="symmetric")
    env = STRICT | fit_rotations(tmp_path, documents=2, recipe="focus", options=options)
    out, log = tmp_path / "again", tmp_path / "log"
    with serve(MODEL, log, *ARGS, "--enable-metrics", env=env | {"SGLANG_OSCAR_KEY_ERRORS": "1"}) as server:
        assert growth(server) < TOO_MUCH
        post(server, "update_weights_from_disk", model_path=str(changed), load_format="auto")
        assert growth(server) > TOO_MUCH
        assert growth(server) > TOO_MUCH
        assert len(re.findall(r"int2 key error: layer .* times that of the fit", log.read_text())) == 1
        assert "nothing was sampled" in refused(server, "oscar_refit")
        before = facts(server)
        refit(server, out)
        after = facts(server)
        assert after["fingerprint"] != before["fingerprint"]
        assert after["codes"] == before["codes"]
        assert after["rotations"]["keys"].startswith(str(out))
        answers = asked(server)
        assert growth(server) < TOO_MUCH
        text = requests.get(f"{server.url}/metrics", timeout=600).text
        shown = dict(re.findall(r'^sglang:oscar_cache_info\{.*fingerprint="(\w+)".*\} (\S+)$', text, re.MULTILINE))
        assert shown == {before["fingerprint"]: "0.0", after["fingerprint"]: "1.0"}
        assert server.alive()
    if not has_gpu():
        sides = [read_rotation_file(path) for path in rotation_files(out)]
        ids = [step[1] for step in answers[0]]
        found = torch.tensor([step[0] for step in answers[0][1:]])
        away = (found - expected(ids, len(prompt(40)), (sides[0], sides[1]), changed)).abs()
        assert away[: CHUNK - 1].max() < LARGEST
        assert away[CHUNK - 1 :].median() < MEDIAN
    files = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": str(of) for side, of in zip("KV", rotation_files(out), strict=True)}
    with serve(changed, tmp_path / "log2", *ARGS, env=STRICT | files) as server:
        assert facts(server)["fingerprint"] == after["fingerprint"]
        assert asked(server) == answers


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs")
def test_ranks_fit_alike(changed: Path, tmp_path: Path) -> None:
    """Two ranks hold a kv head each, and what is fitted to the heads of both."""
    env, out = STRICT | TWO_CORES | fit_rotations(tmp_path, documents=2, recipe="plus"), tmp_path / "again"
    with serve(MODEL, tmp_path / "log", *ARGS, *TWO_RANKS, env=env) as server:
        post(server, "update_weights_from_disk", model_path=str(changed), load_format="auto")
        refit(server, out)
        answers, fingerprint = asked(server), facts(server)["fingerprint"]
    files = {f"SGLANG_OSCAR_{side}_ROTATION_PATH": str(of) for side, of in zip("KV", rotation_files(out), strict=True)}
    with serve(changed, tmp_path / "log2", *ARGS, *TWO_RANKS, env=STRICT | TWO_CORES | files) as server:
        assert facts(server)["fingerprint"] == fingerprint
        assert asked(server) == answers
