"""The quickstart's jobs: rows and files of each, and how each asks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "kernels", "rotation", "python")]

import quickstart  # noqa: E402
import quickstart_jobs  # noqa: E402
import typer  # noqa: E402
from quickstart_jobs import FITS, REAL_JOBS, RealJob, ShippedJob  # noqa: E402
from real_models import MODELS  # noqa: E402

from reference_model.retrieval import DIGITS, Document  # noqa: E402

DOCUMENT = Document("some text\n", {"amber": "1234567", "river": "7654321"})


@pytest.fixture
def rotations(tmp_path: Path) -> Path:
    """Files of each fit, where the quickstart leaves them."""
    for fit in FITS:
        (tmp_path / fit.folder).mkdir()
        for side in ("k", "v"):
            (tmp_path / fit.folder / f"{side}_rotation_{fit.recipe}.safetensors").touch()
    return tmp_path


def test_rows_of_the_shipped_model(rotations: Path) -> None:
    """Those of the table in the README, in its order, with files where the fit leaves them."""
    rows = ShippedJob().methods(rotations)
    assert [(row.name, row.group) for row in rows] == [
        ("BF16", None), ("INT2 (focus, k3v2)", 128), ("INT2 (plus, k2v2)", 128),
        ("naive INT2", 64), ("QuaRot-INT2", 64), ("OSCAR INT2", 64),
        ("naive INT2", 128), ("QuaRot-INT2", 128), ("OSCAR INT2", 128),
    ]  # fmt: skip
    assert rows[0].env == {}
    default = rotations / "focus-k3v2" / "k_rotation_focus.safetensors"
    assert rows[1].env["SGLANG_OSCAR_K_ROTATION_PATH"] == str(default)
    assert rows[3].env["SGLANG_OSCAR_K_ROTATION_PATH"] == "identity"
    assert rows[5].env["SGLANG_OSCAR_V_ROTATION_PATH"] == str(rotations / "paper" / "v_rotation_paper.safetensors")
    assert rows[4].args[-4:] == ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64"]


def test_rows_of_the_real_model(rotations: Path) -> None:
    """A row per fit, each with its own files."""
    rows = RealJob().methods(rotations)
    assert [row.name for row in rows] == ["BF16", "INT2 (focus, k3v2)", "INT2 (plus, k2v2)", "OSCAR INT2"]
    files = [path for row in rows[1:] for path in row.env.values()]
    assert {Path(path) for path in files} == set(rotations.rglob("*.safetensors"))
    assert len(set(files)) == len(files) == 6


def test_fits_are_those_of_their_rows() -> None:
    """The default as it is by its name; the published recipe takes no bits."""
    assert [fit.args for fit in FITS] == [
        ["--recipe", "focus", "--bits", "k3v2"], ["--recipe", "plus", "--bits", "k2v2"], ["--recipe", "paper"],
    ]  # fmt: skip


class Client:
    """Remembers what the OpenAI client is asked and answers with a sentence."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.completions = self
        self.chat = SimpleNamespace(completions=self)

    def create(self, **asked: Any) -> Any:
        self.asked.append(asked)
        sentence = "The magic number for river is 7654321."
        return SimpleNamespace(choices=[SimpleNamespace(text=sentence, message=SimpleNamespace(content=sentence))])


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    fake = Client()
    monkeypatch.setattr(quickstart_jobs, "client", lambda server: fake)
    return fake


def test_the_shipped_model_completes(client: Client) -> None:
    job = ShippedJob()
    job.say(None, DOCUMENT, None, 1)  # type: ignore[arg-type]
    job.say(None, DOCUMENT, "river", job.answer_tokens)  # type: ignore[arg-type]
    assert [(len(x["prompt"]) > len(DOCUMENT.text), x["max_tokens"]) for x in client.asked] == [
        (False, 1),
        (True, DIGITS),
    ]
    assert all(x["temperature"] == 0 for x in client.asked)
    assert job.right("7654321", "7654321")
    assert not job.right("It is 7654321", "7654321")


def test_the_real_model_chats(client: Client) -> None:
    """The document comes first in the message, so that every question finds it cached."""
    answers = quickstart.ask(RealJob(), None, DOCUMENT)  # type: ignore[arg-type]
    assert answers == 1
    assert [x["max_tokens"] for x in client.asked] == [1, 24, 24]
    messages = [x["messages"] for x in client.asked]
    assert all(len(m) == 1 and m[0]["role"] == "user" for m in messages)
    assert messages[0][0]["content"] == DOCUMENT.text
    assert sorted(m[0]["content"] for m in messages[1:]) == [
        f"{DOCUMENT.text}What is the magic number for {word}?" for word in sorted(DOCUMENT.facts)
    ]


def test_jobs_of_real_models() -> None:
    """One for each model that can be made and chats, each with results, matrices among them, and a model of its own;
    groups are of a whole head."""
    chatting = {name: of for name, of in MODELS.items() if of.chats}
    assert REAL_JOBS.keys() == chatting.keys()
    assert len({job.out for job in REAL_JOBS.values()} | {ShippedJob().out}) == len(REAL_JOBS) + 1
    assert {name: job.model for name, job in REAL_JOBS.items()} == {name: of.folder for name, of in chatting.items()}
    assert {name: job.group for name, job in REAL_JOBS.items()} == {"smollm2-135m": 64, "qwen2.5-coder-1.5b": 128}


@pytest.mark.parametrize("gpu", [True, False])
def test_servers_have_room_for_the_weights(gpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """1.5 billion parameters take more of a CPU's memory than small models are given."""
    monkeypatch.setattr(quickstart, "has_gpu", lambda: gpu)
    monkeypatch.setattr(quickstart, "serve", lambda model, log, args, env: args)
    shares = [
        quickstart.start(job, quickstart_jobs.Method("BF16"), tmp_path)[1]
        for job in (ShippedJob(), REAL_JOBS["qwen2.5-coder-1.5b"])
    ]
    assert shares == (["0.5", "0.5"] if gpu else ["0.2", "0.4"])


@pytest.mark.parametrize(
    ("flags", "gpu", "made"),
    [
        (["--real"], False, "smollm2-135m"),
        (["--real"], True, "qwen2.5-coder-1.5b"),
        (["--model", "smollm2-135m"], True, "smollm2-135m"),
        (["--real", "--model", "qwen2.5-coder-1.5b"], False, "qwen2.5-coder-1.5b"),
    ],
)
def test_a_gpu_takes_the_larger_model(
    flags: list[str], gpu: bool, made: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unless one is named; a model that cannot be made ends the run."""
    asked: list[list[str]] = []
    monkeypatch.setattr(quickstart.real_model, "main", lambda argv: asked.append(argv) or 1)
    monkeypatch.setattr(quickstart, "has_gpu", lambda: gpu)
    monkeypatch.setattr(quickstart, "EXTRA_ARGS", [])
    app = typer.Typer()
    app.command()(quickstart.main)
    assert CliRunner().invoke(app, [*flags, "--out", str(tmp_path / "out")]).exit_code == 1
    assert asked == [["--model", made, "--out", str(MODELS[made].folder)]]
    assert not (tmp_path / "out").exists()


def test_an_unknown_real_model_is_refused() -> None:
    app = typer.Typer()
    app.command()(quickstart.main)
    done = CliRunner().invoke(app, ["--model", "gpt-2"])
    assert done.exit_code == 2
    assert "'gpt-2' is not one of" in done.output
