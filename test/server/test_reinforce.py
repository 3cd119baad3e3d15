"""The example of a training loop: a few steps of it, and what its committed run says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.servers import EXACT

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import reinforce  # noqa: E402


@pytest.mark.server
def test_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are exact. The second and third are sampled by the weights that were sent: the trainer's own probabilities
    are near."""
    for name, value in EXACT.items():
        monkeypatch.setenv(name, value)
    given = ["--steps", "3", "--prompts", "2", "--samples", "2", "--rate", "1e-4", "--kv-cache-dtype", "int2"]
    reinforce.main([*given, "--out", str(tmp_path / "out.json")])
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]["int2"]
    assert len(steps) == 3
    assert all(0 <= step["reward"] <= 1 for step in steps)
    assert all(0 < step["mean"] < NEAR for step in steps)


NEAR = 0.06
"""Distance of log probabilities that two ways to compute in BF16 make."""


def test_rewards_rise_as_with_rollouts_of_16_bits() -> None:
    """In the run that is committed: means of the first two steps and of the last four."""
    found = json.loads((ROOT / "benchmark" / "results" / "cpu_reinforce.json").read_text())["steps"]
    rewards = {dtype: [step["reward"] for step in steps] for dtype, steps in found.items()}
    begin, end = (
        {dtype: mean(values[part]) for dtype, values in rewards.items()} for part in (slice(2), slice(-4, None))
    )
    assert all(begin[dtype] < 0.5 and end[dtype] > 0.8 for dtype in rewards)
    assert abs(end["int2"] - end["auto"]) < 0.15


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
