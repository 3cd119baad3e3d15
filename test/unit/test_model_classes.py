"""Classes of models that are served, and the trial that says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oscar_tools.trial import experts, trial, weights
from sglang_oscar.attach import model_classes
from sglang_oscar.attach.model_classes import REFUSED, SERVED, UNTRIED, Row
from sglang_oscar.errors import Int2Error

ROWS = {"A": Row(SERVED, "tried"), "B": Row(REFUSED, "heads of another kind"), "C": Row(UNTRIED, "no kernel")}


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_classes, "rows", lambda: ROWS)
    monkeypatch.delenv(model_classes.ALLOW, raising=False)


@pytest.mark.parametrize(
    ("architectures", "line"),
    [
        (["B"], "does not support M: heads of another kind; use --kv-cache-dtype auto"),
        (
            ["C"],
            "has not been tried with M: no kernel; try it with `oscar try-class` and set SGLANG_OSCAR_ALLOW_UNTRIED=1",
        ),
        (["New"], "has not been tried with M: no such class was there"),
    ],
)
def test_classes_that_are_not_served(architectures: list[str], line: str) -> None:
    with pytest.raises(Int2Error, match="--kv-cache-dtype int2") as refused:
        model_classes.check(architectures, "M")
    assert line in str(refused.value)


def test_classes_that_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several names SGLang takes one; what was not tried serves where the operator wants it, refusals stay."""
    for architectures in (["A"], ["New", "A"]):
        model_classes.check(architectures, "M")
    monkeypatch.setenv(model_classes.ALLOW, "1")
    for architectures in (["C"], ["New"]):
        model_classes.check(architectures, "M")
    with pytest.raises(Int2Error):
        model_classes.check(["B"], "M")


def answers(other: float = 3.0, **changes: torch.Tensor) -> dict:
    """Of a trial: logits of five tokens of which the second is the best, but behind the other beginning."""
    logits = torch.zeros(2, 5)
    logits[:, 1] = 1.0
    behind = logits.clone()
    behind[:, 1] = other
    return {"first": ([1, 1], logits), "other": ([1, 1], behind), "second": ([1, 1], logits), "hits": 384} | {
        turn: ([1, 1], changed) for turn, changed in changes.items()
    }


def test_what_a_trial_compares() -> None:
    same = trial.compare(answers(), answers())
    assert (same.drift, same.steps, same.hits, same.passed) == (0.0, 6, 384, True)
    wrong = answers()["second"][1].clone()
    wrong[1, 1] += 1.0  # at the last step of a turn that hit the cache
    assert not trial.compare(answers(), answers(second=wrong)).passed
    wrong[1, 1] = float("nan")
    assert trial.compare(answers(), answers(second=wrong)).drift == float("inf")
    # A model that does not look at what lies before: nothing would show.
    assert not trial.compare(answers(other=1.0), answers(other=1.0)).passed


def test_weights_depend_on_names_alone() -> None:
    def module() -> torch.nn.Module:
        made = torch.nn.Module()
        made.norm, made.proj = torch.nn.RMSNorm(64), torch.nn.Linear(64, 8)
        made.sinks = torch.nn.Parameter(torch.rand(8))  # whatever was in memory
        weights.fill(made)
        return made

    one, other = module(), module()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert abs(float(one.norm.weight.mean()) - 1) < 0.1
    assert 0.5 < float((one.proj.weight @ torch.ones(64)).std()) < 2
    assert float(one.sinks.mean()) > 1  # so strong that dropping them would show


def test_experts_say_what_their_layers_would() -> None:
    """Of three experts two are asked, as two layers with a gate."""
    torch.manual_seed(0)
    tokens, w1, w2 = torch.randn(5, 8), torch.randn(3, 12, 8), torch.randn(3, 8, 6)
    ids, shares = torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    found = experts.experts(tokens, w1, w2, (shares, ids, None), SimpleNamespace(routed_scaling_factor=2.0))
    expected = torch.zeros(5, 8)
    for place, expert in enumerate((0, 2)):
        gate, up = (tokens @ w1[expert].T).chunk(2, dim=-1)
        expected += 2 * shares[:, place, None] * ((torch.nn.functional.silu(gate) * up) @ w2[expert].T)
    assert torch.allclose(found, expected, atol=1e-5)
