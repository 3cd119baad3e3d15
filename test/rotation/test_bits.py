"""Bits of a code by layer and side: the goal, the plan, what it is made of, files that state it and the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oscar_kernels.layout import BITS
from oscar_rotation.cli import app
from oscar_rotation.dump import DumpReader
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.rotation_file import read_rotation_file, save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.fit.bit_goal import BitGoal, stored_bits
from oscar_rotation.fit.bits import layer_losses, measure
from oscar_rotation.fit.held_out import Request, held_out_requests, plan_held_out
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.fit.side_codes import SideCodes, reading, with_bits
from oscar_rotation.math.bit_plan import spend
from oscar_rotation.recipes.plus import KEY_ROWS, VALUE_ROWS, fit_plus

KV_HEADS, GROUP, D = 2, 2, 32
runner = CliRunner()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Output projections of two layers."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    save_file(
        {
            f"model.layers.{layer}.self_attn.o_proj.weight": torch.randn(48, KV_HEADS * GROUP * D, generator=generator)
            for layer in range(2)
        },
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.parametrize(
    "text", ["k5v2", "k16v1", "k0160v2", "k3", "v2k3", "2,5", "", "-2", "nan", "1e1", "k3v2 ", "two"]
)
def test_goals_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"a mean such as 2\.5, or widths of 2 or 3 or 4 or 16 such as k3v2"):
        BitGoal.parse(text)


def test_goals() -> None:
    assert BitGoal.parse("K4V3") == BitGoal(4, 3)
    assert BitGoal.parse("3") == BitGoal(mean=3.0)
    assert (BitGoal.parse("k16v2"), BitGoal.parse("k4v16")) == (BitGoal(16, 2), BitGoal(4, 16))
    losses = torch.tensor([[9.0, 1.0, 0.1]] * 60)

    def spent(text: str, head_dim: int) -> int:
        return sum(BitGoal.parse(text).plan(losses, head_dim, 128))

    assert spent("2.5", 128) == 60 * 2 + 15
    assert spent("2.25", 128) == 120
    # A group is never larger than a head.
    assert spent("3", 64) == 150
    for text in ("2.2", "16.1"):
        with pytest.raises(ValueError, match=r"from 2\.25 to 16 with groups of 128, got"):
            BitGoal.parse(text).plan(losses, 128, 128)


@settings(max_examples=40, deadline=None)
@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=4),
    mean=st.floats(3, 16),
    group=st.sampled_from([32, 64, 128, 256]),
)
def test_sides_are_left_exact_where_codes_cannot_spend_a_mean(
    losses: list[list[float]], mean: float, group: int
) -> None:
    """Against all plans there are, scales and zero points counted; no side of 16 bits up to four bits for all."""
    goal, table = BitGoal(mean=mean), torch.tensor(losses, dtype=torch.float64)
    widths = (*BITS, 16) if mean > 4 + 32 / group else BITS

    def cost(plan: tuple[int, ...]) -> tuple[float, float]:
        pairs = list(zip(table, plan, strict=True))
        lost = sum(0.0 if width == 16 else float(row[BITS.index(width)]) for row, width in pairs)
        return lost, sum(width if width == 16 else width + 32 / group for width in plan)

    found = goal.plan(table, 256, group)
    plans = [plan for plan in itertools.product(widths, repeat=len(losses)) if cost(plan)[1] <= mean * len(losses)]
    assert cost(found)[1] <= mean * len(losses) + 1e-5
    assert cost(found)[0] <= min(cost(plan)[0] for plan in plans) + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=6, max_size=6), min_size=1, max_size=3),
    mean=st.floats(2.125, 5),
    group=st.sampled_from([16, 32, 128]),
)
def test_no_choice_of_codings_is_better(losses: list[list[float]], mean: float, group: int) -> None:
    """Against all there are, so never worse than scalars; of codings that cost as much the one that loses less."""
    table = torch.tensor(losses, dtype=torch.float64)
    table[::2, 4:] = table[::2, 1:3]  # keys of three and four bits have no codebook
    goal, auto = BitGoal(mean=mean), ("auto", "auto")
    forms = [
        [(width, "codebook" if other and width == 2 else "affine") for other in (0, 1) for width in BITS],
        [(width, "symmetric" if other else "affine") for other in (0, 1) for width in BITS],
    ]

    def spent(plan: tuple[tuple[int, str], ...]) -> float:
        return sum(float(stored_bits(width, group, coding, 128)) for width, coding in plan) / len(plan)

    def lost(plan: tuple[tuple[int, str], ...]) -> float:
        ways = (zip(forms[n % 2], table[n], strict=True) for n in range(len(plan)))
        return sum(
            min(0.0 if choice[0] == 16 else float(loss) for way, loss in row if way == choice or choice[0] == 16)
            for row, choice in zip(ways, plan, strict=True)
        )

    try:
        found = goal.choices(table, 128, group, auto)
    except ValueError:
        return
    assert spent(found) <= mean + 1e-5
    choices = [[*dict.fromkeys(forms[n % 2])] for n in range(len(losses))]
    best = min(lost(plan) for plan in itertools.product(*choices) if spent(plan) <= mean)
    assert lost(found) <= best + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(
        st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=6, max_size=6), min_size=1, max_size=2
    ),
    mean=st.floats(2.125, 5),
)
def test_no_cut_is_better(losses: list[list[list[float]]], mean: float) -> None:
    """Against all plans that cut the keys of a layer once between its three heads, so never worse than whole layers."""
    table, goal, auto = torch.tensor(losses, dtype=torch.float64), BitGoal(mean=mean), ("auto", "auto")
    table[::2, 4:] = table[::2, 1:3]  # keys of three and four bits have no codebook
    forms = [
        [(width, "codebook" if other and width == 2 else "affine") for other in (0, 1) for width in BITS],
        [(width, "symmetric" if other else "affine") for other in (0, 1) for width in BITS],
    ]

    def of(side: int, heads: list[tuple[int, str]]) -> tuple[float, float]:
        """What is lost by codes of these heads, and their bits."""
        lost = sum(
            0.0 if pair[0] == 16 else min(float(table[side, n, head]) for n in range(6) if forms[side % 2][n] == pair)
            for head, pair in enumerate(heads)
        )
        return lost, sum(float(stored_bits(width, 32, coding, 64)) for width, coding in heads) / 3

    try:
        found = goal.choices(table, 64, 32, auto)
    except ValueError:
        return
    plan = [[x if isinstance(x, tuple) else (x,) * 3 for x in choice] for choice in found]
    heads = [list(zip(*choice, strict=True)) for choice in plan]
    assert all(len(set(own)) == 1 for own in heads[1::2])
    assert all(sum(a != b for a, b in itertools.pairwise(own)) <= 1 for own in heads[::2])
    lost, bits = (sum(x) for x in zip(*(of(side, own) for side, own in enumerate(heads)), strict=True))
    assert bits <= mean * len(losses) + 1e-5
    ways = []
    for side in range(len(losses)):
        pairs = [*dict.fromkeys(forms[side % 2])]
        ways.append([of(side, [a] * cut + [b] * (3 - cut)) for a in pairs for b in pairs for cut in (1, 2)])
        ways[-1] = ways[-1] if side % 2 == 0 else [of(side, [a] * 3) for a in pairs]
    plans = ([sum(x) for x in zip(*own, strict=True)] for own in itertools.product(*ways))
    assert lost <= min(other for other, cost in plans if cost <= mean * len(losses)) + 1e-9


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=5),
    extra=st.integers(0, 12),
)
def test_no_plan_is_better(losses: list[list[float]], extra: int) -> None:
    """Against all plans there are, whether or not losses fall as widths grow."""
    table, budget = torch.tensor(losses, dtype=torch.float64), 2 * len(losses) + extra

    def cost(plan: tuple[int, ...]) -> tuple[float, int]:
        return sum(float(row[BITS.index(width)]) for row, width in zip(table, plan, strict=True)), sum(plan)

    found = spend(table, BITS, budget)
    plans = [plan for plan in itertools.product(BITS, repeat=len(losses)) if sum(plan) <= budget]
    best = min(cost(plan)[0] for plan in plans)
    assert cost(found)[0] == pytest.approx(best, abs=1e-9)
    assert sum(found) <= budget


def test_budgets_that_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="3 items cost 6 at least, the budget is 5"):
        spend(torch.zeros(3, 3), BITS, 5)
    with pytest.raises(ValueError, match="finite"):
        spend(torch.full((3, 3), float("nan")), BITS, 9)


def naive_measure(
    request: Request, key: torch.Tensor, value: torch.Tensor, scale: float, reader: torch.Tensor
) -> tuple[float, float, float]:
    """Key error, value error and energy of one request in float64, query by query."""
    q, k, v = (x.double() for x in (request.q, request.k, request.v))
    n = k.shape[1]
    sink, recent = min(64, n // 8), min(256, n // 4)
    totals = [0.0, 0.0, 0.0]
    for head, i, g in itertools.product(range(len(k)), range(max(n - 128, min(sink + recent, n - 1)), n), range(GROUP)):
        true = k[head, : i + 1] @ q[head, i, g] * scale
        seen = key[head, : i + 1].double() @ q[head, i, g] * scale
        stored = (torch.arange(i + 1) >= sink) & (i - torch.arange(i + 1) >= recent)
        p, other = true.softmax(0), torch.where(stored, seen, true).softmax(0)
        outputs = (
            (other - p) @ v[head, : i + 1],
            (p * stored) @ (value[head].double() - v[head])[: i + 1],
            p @ v[head, : i + 1],
        )
        for index, x in enumerate(outputs):
            totals[index] += float(x @ reader[head].double() @ x)
    return totals[0], totals[1], totals[2]


def test_measured_in_float64() -> None:
    generator = torch.Generator().manual_seed(3)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    request = Request(drawn(2, 90, GROUP, D) * 2, drawn(2, 90, D), drawn(2, 90, D))
    readers = drawn(2, D, D)
    readers = readers @ readers.mT
    keys, values = ([x + width * drawn(2, 90, D) for width in (0.3, 0.1, 0.03)] for x in (request.k, request.v))
    errors, whole = measure(request, keys, values, D**-0.5, readers)
    for width in range(3):
        wanted = naive_measure(request, keys[width], values[width], D**-0.5, readers)
        assert [*errors[:, width].sum(-1).tolist(), whole] == pytest.approx(wanted, rel=1e-4)


def test_more_bits_lose_less(make_dump: Callable[..., Path], weights: Path, tmp_path: Path) -> None:
    """By about a factor of four a bit, in layers, sides and requests."""
    dump = DumpReader(make_dump(tmp_path / "dump", requests=[[90, 120], [130, 200]]))
    fitted = fit_plus(dump, OutputWeights(weights))
    held = plan_held_out(dump, dump.fit_chunks(), "this")
    for layer in range(2):
        sides = (
            reading(side, layer, SideCodes(rows), 32)
            for side, rows in ((fitted.key, KEY_ROWS), (fitted.value, VALUE_ROWS))
        )
        held_out = held_out_requests(dump, layer, held, torch.device("cpu"))
        losses = layer_losses(held_out, *sides, D**-0.5, OutputWeights(weights).reader(layer, KV_HEADS, D))
        ratios = losses[:, :-1] / losses[:, 1:]  # of every kv head
        assert ((ratios > 2) & (ratios < 9)).all(), losses


def identity(bits: tuple[int, ...] | None) -> RotationSet:
    return RotationSet(torch.eye(D).repeat(3, 1, 1), bits=bits, metadata=RotationMetadata(side="k", recipe="plus"))


def test_files_state_their_bits(tmp_path: Path) -> None:
    """Older releases must not read them as two bits, so they have a version of their own; others keep theirs."""
    for bits, version in (((3, 2, 4), "2"), (None, "1")):
        path = tmp_path / f"{version}.safetensors"
        save_rotation_file(path, identity(bits))
        assert read_rotation_file(path).bits == bits
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format_version"] == version
    with pytest.raises(RotationFileError, match=r"codes of 2 bits.*save them as \.safetensors"):
        save_rotation_file(tmp_path / "k.pt", identity((3, 2, 4)))
    assert with_bits(identity(None), (2, 2, 2), SideCodes(KEY_ROWS)).bits is None
    mixed = with_bits(identity(None), (2, 4, 3), SideCodes(KEY_ROWS))
    assert (mixed.bits, mixed.clip_ratios, mixed.gains) == ((2, 4, 3), (0.88, 1.0, 0.97), (0.98, 1.0, 0.995))


@pytest.mark.parametrize("per_head", [False, True])
def test_layers_left_exact_are_left_alone(per_head: bool, tmp_path: Path) -> None:
    """Their transforms are the identity and their centers nothing, of others nothing changes; and files keep that."""
    shape = (3, 2, D, D) if per_head else (3, D, D)
    generator = torch.Generator().manual_seed(5)
    bases = torch.linalg.qr(torch.randn(shape, generator=generator))[0]
    spread = torch.linspace(0.5, 2.0, D)
    fitted = RotationSet(
        bases * spread, duals=bases / spread, centers=torch.randn(3, 2, D, generator=generator),
        metadata=RotationMetadata(side="k", recipe="plus"),
    )  # fmt: skip
    found = with_bits(fitted, (2, 16, 4), SideCodes(KEY_ROWS))
    save_rotation_file(tmp_path / "k.safetensors", found)
    for mixed in (found, read_rotation_file(tmp_path / "k.safetensors")):
        assert (mixed.bits, mixed.clip_ratios, mixed.gains) == ((2, 16, 4), (0.88, 1.0, 1.0), (0.98, 1.0, 1.0))
        assert mixed.duals is not None
        assert mixed.centers is not None
        for x, before in ((mixed.rotations, fitted.rotations), (mixed.duals, fitted.duals)):
            assert torch.equal(x[1], torch.eye(D).expand(shape[1:]))
            assert before is not None
            assert torch.equal(x[::2], before[::2])
        assert not mixed.centers[1].any()
        assert fitted.centers is not None
        assert torch.equal(mixed.centers[::2], fitted.centers[::2])


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ("[3, 3]", "bits of 2 layers for 3 layers"),
        ("[3, 3, 5]", "codes of 5 bits, this release knows 2, 3, 4, 16; update"),
        ("[3, 3, 2.5]", "whole numbers"),
        ("[3, 3, 1e999]", "number"),
        ('"3"', "list of numbers"),
        (None, "cannot be read"),
    ],
)
def test_hostile_bits_are_refused(bits: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "k.safetensors"
    save_rotation_file(path, identity((3, 3, 3)))
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    del header["bits"]
    save_file(load_file(path), path, metadata=header if bits is None else {**header, "bits": bits})
    with pytest.raises(RotationFileError, match=message):
        read_rotation_file(path)


@pytest.mark.parametrize("recipe", ["plus", "focus"])
def test_the_command(recipe: str, make_dump: Callable[..., Path], weights: Path, tmp_path: Path) -> None:
    """A mean, widths and what nobody asks for: what the files state, what inspect shows; the transforms do not depend
    on it."""
    root = make_dump(tmp_path / "dump", requests=[[5], [90, 120], [130], [64, 80]])

    def fitted(*options: str) -> tuple[RotationSet, RotationSet, list[Path]]:
        out = tmp_path / "-".join(("out", *options))
        command = ["fit", str(root), "--out", str(out), "--recipe", recipe, "--model", str(weights), *options]
        done = runner.invoke(app, command)
        assert done.exit_code == 0, done.output
        paths = sorted(out.iterdir())
        return read_rotation_file(paths[0]), read_rotation_file(paths[1]), paths

    plain = fitted("--bits", "k2v2")
    assert plain[0].bits is plain[1].bits is None
    key, value, paths = fitted("--bits", "k3v2")
    assert (key.bits, value.bits, key.clip_ratios) == ((3, 3), None, (0.97, 0.97))
    assert torch.equal(key.rotations, plain[0].rotations)
    assert key.metadata.calibration["bits"] == "k3v2"
    key, value, _ = fitted()
    assert (key.bits, value.bits) == ((3, 3), None)
    key, value, _ = fitted("--bits", "4.0", "--group-size", "32")
    assert sum((*(key.bits or (2, 2)), *(value.bits or (2, 2)))) == 12
    assert key.metadata.calibration["mean_bits"] == 4.0
    rows = json.loads(runner.invoke(app, ["inspect", str(paths[0]), "--json"]).output)["layers"]
    assert [row["bits"] for row in rows] == [3, 3]
    assert "bits" in runner.invoke(app, ["inspect", str(paths[0])]).output
    key, value, paths = fitted("--bits", "k16v2")
    assert (key.bits, value.bits) == ((16, 16), None)
    rows = json.loads(runner.invoke(app, ["inspect", str(paths[0]), "--json"]).output)["layers"]
    assert [(row["bits"], row["overlap"], row["sharing_loss"]) for row in rows] == [(16, None, None)] * 2
    key, value, _ = fitted("--bits", "9", "--group-size", "32")
    widths = (*(key.bits or (2, 2)), *(value.bits or (2, 2)))
    assert 16 in widths
    assert value.metadata.calibration["mean_bits"] == sum(x + (x < 16) for x in widths) / 4 <= 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "17"], "from 3 to 16 with groups of 32, got 17"),
        (["--bits", "k1v1"], "such as k3v2"),
        (["--bits", "k3v2", "--group-size", "64"], "no meaning without a mean of --bits"),
        (["--group-size", "64"], "no meaning without a mean of --bits"),
        (["--bits", "3", "--recipe", "paper"], "--recipe plus or focus takes it"),
    ],
)
def test_refusals_name_the_option(
    options: list[str], message: str, make_dump: Callable[..., Path], weights: Path, tmp_path: Path
) -> None:
    root = make_dump(tmp_path / "dump", requests=[[90, 120], [130, 70]])
    out = tmp_path / "out"
    done = runner.invoke(app, ["fit", str(root), "--out", str(out), "--model", str(weights), *options])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert not out.exists()


def test_one_request_is_not_enough_for_a_mean(make_dump: Callable[..., Path], weights: Path, tmp_path: Path) -> None:
    root = make_dump(tmp_path / "dump", requests=[[5], [90]])
    command = ["fit", str(root), "--out", str(tmp_path / "out"), "--model", str(weights), "--recipe", "plus", "--bits"]
    done = runner.invoke(app, [*command, "3.5"])
    assert done.exit_code == 1
    assert "a mean of --bits needs two or more" in done.output
    assert runner.invoke(app, [*command, "k3v2"]).exit_code == 0


def test_bits_follow_their_layers() -> None:
    assert replace(identity((3, 2, 4)), metadata=RotationMetadata()).recipe == "paper"
