"""A trained draft head on a server: SGLang accepts as many of its drafts as are counted without a server.

The INT2 cache holds 16 bits a side here, so that the model computes what transformers does but for roundings. A head
whose weights or features were read otherwise than they were trained would hardly ever be right.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.servers import STRICT, serve
from support.speculation import plugins

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "benchmark/serving")]

from bench_acceptance import ask_all, cache_settings  # noqa: E402
from subjects import eagle3  # noqa: E402

from draft_head.acceptance import right_drafts, steps_of_verification  # noqa: E402
from draft_head.head import load_head  # noqa: E402
from draft_head.prompts import held_out_prompts  # noqa: E402
from draft_head.target import Target  # noqa: E402
from draft_head.training import Plan, texts, train  # noqa: E402
from reference_model import retrieval  # noqa: E402
from reference_model.export import load_tokenizer  # noqa: E402

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="counted in float32 on a CPU, served alike"),
]
MODEL = ROOT / "models" / "reference"
TOKENS, STEPS = 40, 3


def test_sglang_accepts_what_is_counted(tmp_path: Path) -> None:
    tokenizer, target = load_tokenizer(MODEL), Target(MODEL, "cpu")
    text = "".join(retrieval.filler_lines()[:6000])
    np.save(tmp_path / "tokens.npy", np.array(tokenizer.encode(text).ids, dtype=np.uint16))
    plan = Plan(updates=60, lengths=(256,), batch_tokens=512, lr=4e-3)
    torch.manual_seed(plan.seed)
    head = target.new_head()
    train(head, target, texts(plan, tmp_path, tokenizer, ["alpha", "beta", "gamma", "delta"]), plan)
    head.save(tmp_path / "draft")
    head = load_head(tmp_path / "draft", target.config)
    prompts = held_out_prompts(tokenizer, [500], 2, questions=1)
    counted = []
    for prompt in prompts:
        answer = target.answer(prompt.ids, TOKENS + STEPS + 1)
        right = right_drafts(head, target, prompt.ids + answer, STEPS)
        counted.append(steps_of_verification(right, len(prompt.ids), TOKENS))
    args = ["--kv-cache-dtype", "int2", *eagle3(tmp_path / "draft", STEPS + 1)]
    env = cache_settings("exact", "", "") | STRICT | plugins("no_gpu_plugin")
    with serve(MODEL, tmp_path / "log", *args, env=env) as server:
        answers = ask_all(server, prompts, TOKENS, workers=2)
        assert server.alive()
    assert all(answer.right for answer in answers if answer.right is not None)
    # It has learned something, and each prompt takes the steps that were counted, near ties of a draft aside.
    assert sum(counted) < 0.85 * len(prompts) * (TOKENS - 1)
    assert sum(answer.steps for answer in answers) == pytest.approx(sum(counted), abs=2 * len(prompts))
