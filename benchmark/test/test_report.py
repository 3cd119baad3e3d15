"""Tables, and a run from the command line to the report."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "benchmark", "kernels", "rotation", "python")]

from accuracy.earlier_runs import merged, resumed  # noqa: E402
from accuracy.models import REGIMES  # noqa: E402
from accuracy.report import lines, share  # noqa: E402
from accuracy.run import chosen_methods, parse_args  # noqa: E402
from accuracy.scope import SETS, SIZES  # noqa: E402


def test_share_of_a_gap() -> None:
    assert share(0.04, 0.01) == "75%"
    assert share(0.001, 0.0) == "-"


def test_runs_are_merged_by_model_and_regime() -> None:
    def run(model: str, regime: str, row: str, seconds: int) -> dict:
        found = {model: {"parameters": 1, "regimes": {regime: {"rows": {row: row}, "seconds": 2.0}}}}
        return {"size": "s", "device": "d", "seconds": seconds, "models": found}

    out = merged([run("a", "x", "one", 3), run("a", "x", "two", 5), run("a", "y", "one", 1), run("b", "x", "one", 1)])
    assert out["seconds"] == 5
    assert out["models"]["a"]["regimes"] == {
        "x": {"run": "s, d, 2 s; s, d, 2 s", "rows": {"one": "one", "two": "two"}, "seconds": 2.0},
        "y": {"run": "s, d, 2 s", "rows": {"one": "one"}, "seconds": 2.0},
    }
    assert list(out["models"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        (["--split", "choice"], "split report, not choice"),
        (["--size", "full"], "size tiny, not full"),
        (["--calibrate", "broad"], "calibration each method's own, not broad"),
        ([], None),
    ],
)
def test_a_run_goes_on_with_what_it_measured_only(tmp_path: Path, more: list[str], fault: str | None) -> None:
    out = tmp_path / "accuracy.json"
    out.write_text(json.dumps({"size": "tiny", "models": {"a": {"split": "report", "regimes": {}}}}))
    args = parse_args(["--resume", "--size", "tiny", "--out", str(out), *more])
    if fault is None:
        assert list(resumed(out, args.size, args.split, args.calibrate)) == ["a"]
        return
    with pytest.raises(SystemExit, match=f"has rows of {fault}; name another --out"):
        resumed(out, args.size, args.split, args.calibrate)


def test_parts_of_a_named_set_are_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [parse_args(["--methods", "real", "--methods", "chart", "--part", f"{n}/3"]) for n in (1, 2, 3)]
    chosen = [[method.name for method in chosen_methods(REGIMES[0], SIZES["full"], x, True, set())] for x in parts]
    names = dict.fromkeys((*SETS["real"], *SETS["chart"]))
    assert sorted(name for names in chosen for name in names) == sorted(names)
    assert chosen[0][0] == "BF16"
    done = chosen_methods(REGIMES[0], SIZES["full"], parts[0], True, {"BF16"})
    assert [method.name for method in done] == chosen[0][1:]
    for wrong in ("3", "0/2", "3/2"):
        with pytest.raises(SystemExit):
            parse_args(["--part", wrong])
        assert "must be I/N with I from 1 to N" in capsys.readouterr().err


def test_a_real_model_has_kinds_of_text_and_tables_of_its_own() -> None:
    results = json.loads((ROOT / "benchmark" / "results" / "h200_accuracy_reference.json").read_text())
    measured = results["models"].pop("reference")
    data = measured["regimes"]["as trained"]
    methods = {name: row for name, row in data["rows"].items() if row["table"] == "methods"}
    for row in methods.values():
        row["kinds"] = {"chat": row["language"]}
    variant = {**methods["plus g64"], "table": "bits", "kinds": {}}
    results["models"]["real"] = {
        **measured,
        "calibration": "broad",
        "regimes": {"as trained": {**data, "rows": {**methods, "K3V2": variant}}},
    }
    text = "\n".join(lines(merged([results]), {}))
    assert "| KL | KL, chat | retrieval, 1024 |" in text
    assert "All methods are calibrated on broad text." in text
    table = text.split("### real: Bits of keys and values\n\n")[1].split("\n\n")[0].splitlines()
    names = [line.split("|")[1].strip() for line in table]
    assert names == ["variant", "---", "plus g128", "plus g64", "focus g128", "focus g64", "K3V2"]


def test_a_run_end_to_end(tmp_path: Path) -> None:
    """The shipped model, two regimes, a few methods: results, then every table of the report."""
    command = [sys.executable, str(ROOT / "benchmark" / "accuracy" / "run.py")]
    out = tmp_path / "results.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    few = [word for name in ("naive INT2", "OSCAR g128", "plus g128") for word in ("--only", name)]
    args = ["--size", "tiny", *few, "--device", "cpu", "--no-server", "--measure-only", "--out", str(out)]
    subprocess.run([*command, *args], check=True, env=env, timeout=1500)
    results = json.loads(out.read_text())
    regimes = results["models"]["reference"]["regimes"]
    assert list(regimes) == ["as trained", "keys x32"]
    for data in regimes.values():
        assert data["rows"]["BF16"]["language"]["kl"]["mean"] == pytest.approx(0, abs=1e-6)
        assert data["rows"]["BF16"]["retrieval"]["700"]["accuracy"]["mean"] == 1.0
        naive, plus = (data["rows"][name]["language"]["kl"]["mean"] for name in ("naive INT2 g128", "plus g128"))
        assert plus < naive / 10
        layers = data["rows"]["OSCAR g128"]["layers"]
        assert len(layers["k"]) == 4
        assert all(0 < x < 1 for x in layers["attention_output"])
    keys = [regimes[name]["outliers"][0]["k"]["channel_ratio"] for name in regimes]
    assert keys[1] > 4 * keys[0]
    text = "\n".join(lines(results, {}))
    for wanted in ("| plus g128 | 2.28 |", "| BF16 | 16.00 |", "## Does plus beat", "### reference, keys x32"):
        assert wanted in text
    if importlib.util.find_spec("matplotlib"):
        report = tmp_path / "results" / "accuracy.md"
        subprocess.run([*command, "--from", str(out), "--report", str(report)], check=True, env=env, timeout=1500)
        drawn = sorted(path.name for path in (report.parent / "figures").iterdir())
        assert drawn == ["accuracy-reference-as-trained.png", "accuracy-reference-keys-x32.png"]
        assert all(f"figures/{name}" in report.read_text() for name in drawn)
