"""The sizing table of docs/guide.md says what ``oscar doctor`` computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from oscar_tools.doctor.model import Ranks, model_checks

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
CARDS = 79, 139
"""GiB of the cards of the table's columns."""
QWEN3_32B = Qwen3Config(
    hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False, dtype="bfloat16",
    architectures=["Qwen3ForCausalLM"],
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 8])
def test_sizing_table(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    QWEN3_32B.save_pretrained(tmp_path)
    cells = []
    for card in CARDS:
        detail = model_checks(str(tmp_path), None, card << 30, ranks=Ranks(ranks))[-1].detail
        tokens, budget, full = (
            float(re.search(pattern, detail)[1])  # type: ignore[index]
            for pattern in (r"pool: (\d+) tokens", r"of a ([\d.]+) GiB budget", r"16 bits would take ([\d.]+) GiB")
        )
        cells.append(f"{tokens // 1000:,.0f} ({budget * tokens / full // 1000:,.0f})")
    assert f"| Qwen3-32B, {ranks} | {' | '.join(cells)} |" in GUIDE.read_text(encoding="utf-8")
