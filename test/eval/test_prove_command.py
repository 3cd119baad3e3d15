"""``oscar prove`` as a user runs it, its servers replaced by a stand-in: options, resumption, failures, the page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.model_table import model_settings
from oscar_tools.calibration.dump_driver import DumpRequest
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.cli import app
from oscar_tools.evaluation.prove import calibration as calibrating
from oscar_tools.evaluation.prove import command, run, sizes
from oscar_tools.evaluation.prove.asking import Reply
from oscar_tools.evaluation.prove.calibration import Calibration, forget_fits
from oscar_tools.evaluation.prove.measures import Material
from oscar_tools.evaluation.prove.measures.json_schema import JsonSchema
from oscar_tools.evaluation.prove.measures.tail_kl import TailKl
from oscar_tools.evaluation.prove.options import CacheOptions
from oscar_tools.evaluation.prove.rows import Row
from oscar_tools.evaluation.prove.sizes import SIZES, Size
from oscar_tools.evaluation.prove.store import Store, alone_in
from oscar_tools.evaluation.prove.texts import MEASUREMENT, Texts
from oscar_tools.local_server import ServerFailedError
from support.reference import MODEL, ROOT
from support.server_answers import INT2, server_info
from support.stand_in_server import stand_in_server

TINY = Size("reduced", 1024, 2, 32, 2, 1, 1, 9, 1, 2, 8192, 2)
"""A run of seconds."""
BLUR = {"bf16": 0.0, "fp8": 0.3, "int2": 1.0, "naive": 4.0}
SAYS = {"fp8": server_info(kv_cache_dtype="fp8_e4m3"), "int2": server_info(INT2), "naive": server_info(INT2)}
"""Cache -> what its server says, where it is not in 16 bits."""
ROTATIONS = [f"--{side}-rotation={ROOT}/test/data/reference_{side}_rotation.safetensors" for side in "kv"]


class Servers:
    """Stand-ins in place of SGLang servers; ``options`` are those of one cache's server."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.refuse: set[str] = set()
        self.args: dict[str, tuple[str, ...]] = {}

    @contextmanager
    def serve(self, model: Any, log: Path, args: Any, env: Any, *_: Any) -> Iterator[Any]:
        cache = log.stem.removeprefix("server_")
        self.started.append(cache)
        if cache in self.refuse:
            log.write_text("ValueError: no such cache here\nbye\n")
            raise ServerFailedError(f"the server ended with status 1; end of {log}:\nmany lines")
        self.args[cache] = tuple(args)
        kind = cache.partition("-chunk")[0]
        options = {"info": SAYS.get(kind)} | self.options.get(cache, {})
        with stand_in_server(log, BLUR[kind], **options) as server:
            yield server


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(run, "serve", made.serve)
    monkeypatch.setitem(sizes.SIZES, "reduced", TINY)
    return made


def prove(out: Path, *arguments: str) -> Result:
    """Run the command on the shipped model."""
    caches = [] if "--cache" in arguments else ["--cache", "fp8", "--cache", "int2", *ROTATIONS]
    return CliRunner().invoke(app, ["prove", str(MODEL), "--size", "reduced", "--out", str(out), *caches, *arguments])


def figures(out: Path) -> dict[str, Any]:
    """Cache -> figures."""
    return {row["name"]: row["figures"] for row in json.loads((out / "prove.json").read_text())["caches"]}


def test_a_whole_run(tmp_path: Path, servers: Servers) -> None:
    done = prove(tmp_path)
    assert done.exit_code == 0, done.output
    assert servers.started == ["bf16", "fp8", "int2"]
    found = figures(tmp_path)
    kl = [found[name]["tail-kl"]["all"]["kl"]["mean"]["mean"] for name in ("bf16", "fp8", "int2")]
    assert kl[0] == 0
    assert 0 < kl[1] < kl[2]
    agreement = [found[name]["tail-kl"]["all"]["agreement"]["mean"] for name in ("bf16", "fp8", "int2")]
    assert agreement[0] == 1 > agreement[1] > agreement[2]
    assert "excess" in found["int2"]["tail-kl"]["1024"]
    assert set(found["int2"]["retrieval"]["tasks"]) == {"needle", "multi-key"}
    assert found["int2"]["session"]["cut_off"]["mean"] == 1
    assert found["int2"]["session"]["by_turn"][-1]["cached"] > 0
    assert found["fp8"]["json"]["all"]["valid"]["mean"] == 1
    page = (tmp_path / "prove.md").read_text()
    for part in ("## Verdict", "| BF16 | 16.00 |", "| FP8 (e4m3) | 8.00 |", "## Growing session", "plots/tail-kl.png"):
        assert part in page
    assert (tmp_path / "plots" / "retrieval.png").stat().st_size > 1000


def test_the_page_says_what_servers_say(tmp_path: Path, servers: Servers) -> None:
    """Bits of an int2 server and the type of a stock one are known to nobody else; a run that goes on keeps them."""
    own = INT2 | {"bits_at_128k": 3.45, "group_sizes": [32], "recent": 77}
    servers.options = {"int2": {"info": server_info(own)}, "bf16": {"info": server_info(dtype="float16")}}
    asked = ("--cache", "int2", "--measure", "tail-kl", *ROTATIONS)
    assert prove(tmp_path, *asked).exit_code == 0
    for _ in range(2):
        page = (tmp_path / "prove.md").read_text()
        assert "| FP16 | 16.00 |" in page
        assert re.search(r"\| INT2[^|]*\| 3\.45 \|", page)
        assert "groups of 32, 64 sink and 77 recent tokens, fingerprint abababababab" in page
        rows = json.loads((tmp_path / "prove.json").read_text())["caches"]
        assert rows[1]["server"]["int2"] == own
        servers.options = {}
        assert prove(tmp_path, *asked).exit_code == 0
    assert servers.started == ["bf16", "int2"]


def test_a_server_of_another_cache_is_left_out(tmp_path: Path, servers: Servers) -> None:
    servers.options = {"int2": {"info": server_info()}}
    done = prove(tmp_path, "--measure", "tail-kl", "--cache", "int2", *ROTATIONS)
    assert done.exit_code == 1
    assert "the server says that its cache is BF16; see --server-args" in done.output
    assert figures(tmp_path)["int2"] == {}


def test_questions_of_a_user(tmp_path: Path, servers: Servers) -> None:
    """Of both forms, with a function to recall. Answers of the stand-in are cut off, which the page says."""
    sums, code = tmp_path / "sums.jsonl", tmp_path / "code.jsonl"
    sums.write_text(
        "\n".join(json.dumps({"question": f"What is {i} + 1? " * 9, "answer": "#### 3"}) for i in range(60))
    )
    heads = [f'def f{i}(x):\n    """{"Add one. " * 30}"""\n' for i in range(30)]
    tests = "def check(candidate):\n    assert candidate(1) == 2\n"
    rows = [{"prompt": head, "entry_point": f"f{i}", "test": tests} for i, head in enumerate(heads)]
    code.write_text("\n".join(map(json.dumps, rows)))
    asked = ["--measure", "tasks", "--measure", "recall", "--tasks", str(sums), "--tasks", str(code)]
    refused = prove(tmp_path / "out", *asked)
    assert refused.exit_code == 1
    assert "code: scoring these questions runs code that the model writes, on this machine; allow it" in refused.stderr
    assert not servers.started
    done = prove(tmp_path / "out", *asked, "--task-count", "2", "--run-code", "--cache", "bf16")
    assert done.exit_code == 0, done.output
    found = figures(tmp_path / "out")["bf16"]
    assert found["tasks"]["counts"] == {"asked": 4, "answered": 0, "cut_off": 4}
    assert set(found["tasks"]["files"]) == {"sums", "code"}
    assert found["recall"]["counts"] == {"asked": 2, "answered": 0, "cut_off": 2}
    page = (tmp_path / "out" / "prove.md").read_text()
    for part in ("| recall, 1024 | buried sums | buried code |", "## Buried tasks", "100.0%"):
        assert part in page
    for said in (page, done.output):
        assert "BF16, Buried tasks: 4 of 4 answers were cut off at their limit of tokens" in said


def test_a_second_run_asks_nothing_and_a_third_only_what_is_new(tmp_path: Path, servers: Servers) -> None:
    assert prove(tmp_path, "--measure", "retrieval").exit_code == 0
    first = figures(tmp_path)
    servers.started.clear()
    again = prove(tmp_path, "--measure", "retrieval")
    assert again.exit_code == 0
    assert servers.started == []
    assert "all 4 answers are there" in again.output
    assert figures(tmp_path) == first
    assert prove(tmp_path, "--measure", "retrieval", "--lengths", "1024,1536").exit_code == 0
    assert servers.started == ["bf16", "fp8", "int2"]
    servers.started.clear()
    assert prove(tmp_path, "--measure", "retrieval", "--fresh").exit_code == 0
    assert len(servers.started) == 3


def test_a_server_that_dies_costs_only_what_it_did_not_answer(tmp_path: Path, servers: Servers) -> None:
    servers.options["int2"] = {"dies_after": 3}
    done = prove(tmp_path, "--measure", "retrieval")
    assert done.exit_code == 1
    assert "the server ended: RuntimeError: out of tape" in done.output
    assert "the server ended" in (tmp_path / "prove.md").read_text()
    del servers.options["int2"]
    servers.started.clear()
    done = prove(tmp_path, "--measure", "retrieval")
    assert done.exit_code == 0
    assert servers.started == ["int2"]
    assert figures(tmp_path)["int2"]["retrieval"]["all"]["questions"] == 4


def test_chunks_of_several_sizes_are_rows_of_one_measure(tmp_path: Path, servers: Servers) -> None:
    chosen = ["--cache", "int2", *ROTATIONS, "--measure", "effects", "--measure", "retrieval"]
    done = prove(tmp_path, *chosen, "--chunk-sizes", "512,2048")
    assert done.exit_code == 0, done.output
    more = [f"{name}-chunk-{tokens}" for name in ("bf16", "int2") for tokens in (512, 2048)]
    assert servers.started == ["bf16", "int2", *more]
    assert servers.args["int2-chunk-512"] == (*servers.args["int2"], "--chunked-prefill-size", "512")
    found = figures(tmp_path)
    assert set(found["int2"]) == {"effects", "retrieval"}
    assert set(found["int2-chunk-512"]) == {"effects"}
    assert found["bf16-chunk-512"]["effects"]["all"]["cold_kl"]["mean"] == 0
    assert found["int2-chunk-512"]["effects"]["all"]["cold_kl"]["mean"] > 0
    page = (tmp_path / "prove.md").read_text()
    assert "chunks of 512" not in page.split("\n## ")[1]
    assert (
        page.count("| BF16, chunks of 2,048 |")
        == page.split("Texts read cold")[1].count("| BF16, chunks of 2,048 |")
        > 0
    )


def test_two_runs_in_one_folder(tmp_path: Path, servers: Servers) -> None:
    with alone_in(tmp_path):
        done = prove(tmp_path, "--measure", "retrieval")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "another `oscar prove` writes to it" in done.stderr
    assert not servers.started
    assert prove(tmp_path, "--measure", "retrieval").exit_code == 0


def test_without_bf16_there_is_nothing_to_compare(tmp_path: Path, servers: Servers) -> None:
    servers.refuse = {"bf16"}
    done = prove(tmp_path, "--measure", "retrieval")
    assert done.exit_code == 1
    assert "error: BF16: left out, the server ended with status 1: ValueError: no such cache here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_machine_cannot_do_is_told(tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 that does not start, no grammar, no matplotlib: the rest is there and the page says what is not."""
    servers.refuse = {"fp8"}
    servers.options = {"bf16": {"grammar": False}, "int2": {"grammar": False}}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = prove(tmp_path, "--measure", "json", "--measure", "retrieval")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "prove.md").read_text()
    assert "FP8 (e4m3): left out, the server ended with status 1: ValueError: no such cache here" in page
    assert "BF16, INT2, reference_k_rotation: JSON by schema under long context left out" in page
    assert "no plots: they need matplotlib" in page
    assert "json" not in figures(tmp_path)["int2"]


def test_a_prefix_that_is_not_cached_is_no_measurement(tmp_path: Path, servers: Servers) -> None:
    servers.options = {"int2": {"caches": False}}
    done = prove(tmp_path, "--measure", "tail-kl")
    assert done.exit_code == 1
    assert "only 0 of 768 tokens came from the prefix cache" in (tmp_path / "prove.md").read_text()


def test_rotations_of_other_models_cost_no_run(tmp_path: Path, servers: Servers) -> None:
    for side in ("k", "v"):
        facts = RotationMetadata("qqt", side)  # type: ignore[arg-type]
        save_rotation_file(tmp_path / f"{side}_rotation_qqt_r_h.pt", RotationSet(torch.eye(64)[None], metadata=facts))
    done = prove(tmp_path / "out", "--cache", "int2", "--rotations", str(tmp_path))
    assert done.exit_code == 1
    assert "head_dim 64" in done.stderr
    assert not servers.started


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--measure", "luck"], "'luck' is not one of tail-kl, effects, retrieval, recall, tasks, session, json"),
        (["--cache", "int3"], "'int3' is not one of bf16, fp8, fp8-scaled, int2, naive"),
        (["--recipe", "x"], "'x' is not one of plus, focus, paper, hadamard, quarot"),
        (["--recipe", "plus", *ROTATIONS], "is for rotations that are fitted; some are given"),
        (["--bits", "3.0", *ROTATIONS], "is for rotations that are fitted; some are given"),
        (
            ["--bits", "k2v2", "--bits", "many"],
            "must be a mean such as 2.5, or widths of 2 or 3 or 4 or 16 such as k3v2",
        ),
        (["--bits", "3.0", "--recipe", "paper"], "has no meaning for --recipe paper"),
        (["--recipe", "quarot::3.0"], "has no meaning for --recipe quarot, which has two"),
        (["--recipe", "plus:many"], "'plus:many' is not NAME, NAME:GROUP, NAME:GROUP:BITS or NAME::BITS"),
        (["--recipe", "plus:48"], "--recipe: group_size must be a power of two"),
        (["--recipe", "plus:128:2.3", "--recipe", "plus:128:2.0"], "must be from 2.25 to 16 with groups of 128, got 2"),
        (["--chunk-sizes", "many"], "'many' is not numbers with commas"),
        (["--chunk-sizes", "512", "--measure", "tail-kl"], "--chunk-sizes: has no meaning without --measure effects"),
        (["--servers", "0"], "should be greater than or equal to 1"),
        (["--bits", "k3v2", "--bits-by-model"], "--bits-by-model: has no meaning without a mean of --bits"),
        (["--bits-by-model"], "--bits-by-model: has no meaning without a mean of --bits"),
        (["--bits", "2.0", "--bits", "3.0"], "--bits: must be from 2.25 to 16 with groups of 128, got 2"),
        (["--group-size", "48"], "--group-size: group_size must be a power of two"),
        (["--cache", "bf16", "--bits", "3.0"], "--bits: has no meaning without --cache int2"),
        (["--cache", "naive", *ROTATIONS], "--k-rotation: has no meaning without --cache int2"),
        (["--measure", "tasks"], "tasks needs questions: name their file with --tasks"),
        (["--measure", "json", "--tasks", "x.jsonl"], "--tasks: has no meaning without --measure tasks"),
        (["--run-code"], "--run-code: has no meaning without --tasks"),
        (["--task-count", "5"], "--task-count: has no meaning without --tasks"),
        (
            ["--measure", "json", "--recall-lengths", "2048"],
            "--recall-lengths: has no meaning without --measure recall",
        ),
        (["--seeds", "3", "--measure", "json"], "--seeds: has no meaning without --measure retrieval"),
        (["--seeds", "0"], "should be greater than or equal to 1"),
        (["--tp", "0"], "should be greater than or equal to 1"),
        (["--size", "huge"], "'huge' is not one of full, reduced"),
        (["--lengths", "many"], "'many' is not numbers with commas"),
        (["--lengths", "512"], "512 is below 1024"),
        (["--int2-args", "--x '"], "No closing quotation"),
        (["--rotations", "nowhere"], "nowhere: no such folder"),
        (["--rotations", str(ROOT / "docs")], "docs: holds no k_rotation"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], fault: str) -> None:
    done = CliRunner().invoke(app, ["prove", str(MODEL), "--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 2, done.output
    assert fault in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_every_recipe_for_all_bits() -> None:
    both = CacheOptions(recipe=["focus", "plus"], bits=["k3v2", "3.0", "3.0"]).rows()
    assert [fit.title for fit in both] == [
        f"recipe {recipe}{bits}" for recipe in ("focus", "plus") for bits in ("", ", --bits 3.0")
    ]
    assert [fit.title for fit in CacheOptions().rows()] == ["recipe focus"]
    assert [fit.title for fit in CacheOptions(recipe=["plus"], bits=["k2v2"]).rows()] == ["recipe plus, --bits k2v2"]
    asked = CacheOptions(bits=["k16v2", "3.0"], bits_by_model=True).rows()
    assert [(fit.title, fit.suffix) for fit in asked] == [
        ("recipe focus, --bits k16v2", "-k16v2"),
        ("recipe focus, --bits 3.0, by the model", "-3.0-by-model"),
    ]


def test_the_model_says_bits_on_the_calibration_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the fit is given are the texts that are dumped, for fits that ask for it, each in a folder of its own."""
    fits: dict[str, FitOptions] = {}

    def fitted(folder: CalibrationFolder, recipe: str, options: FitOptions, out: Path) -> Path:
        fits[out.name.rpartition("-")[0]] = options
        return out

    monkeypatch.setattr(calibrating, "run_dump", lambda request: CalibrationFolder(request.root))
    monkeypatch.setattr(calibrating, "run_fit", fitted)
    text = tmp_path / "text.jsonl"
    rows = [json.dumps({"text": f"document {number}: " + "some words " * 700}) for number in range(30)]
    text.write_text("\n".join(rows), encoding="utf-8")
    texts = Texts(AutoTokenizer.from_pretrained(MODEL), text)
    calibration = Calibration(model_settings("m").overridden(group_size=128), {}, texts, 8192, tmp_path / "out", ())
    for fit in (Row("plus"), Row("plus", "3.0"), Row("focus", "3.0", by_model=True)):
        calibration.rotations(fit)
    prompts = [json.loads(line)["text"] for line in calibration.prepare().read_text(encoding="utf-8").splitlines()]
    assert {name: options.text for name, options in fits.items()} == {
        "plus-g128": None, "plus-g128-3.0": None, "focus-g128-3.0-by-model": tuple(prompts),
    }  # fmt: skip
    measured = texts.documents(MEASUREMENT)[text.stem]
    assert measured
    assert not any(document[:20] in prompt for document in measured for prompt in prompts)


def test_a_long_chat_template_leaves_room_for_the_answer() -> None:
    """Some templates bring a system prompt of hundreds of tokens."""
    texts = Texts(AutoTokenizer.from_pretrained(MODEL))
    plain, sent = texts.chat_ids, []

    class Cached:
        def behind_cache(self, prefix: list[int], ids: list[int], tokens: int, sampling: Any) -> Reply:
            sent.append(ids)
            return Reply("{}", [], "stop", len(ids), len(prefix), {})

    for system in (0, 400):
        texts.chat_ids = lambda messages, n=system: [1] * n + plain(messages)  # type: ignore[method-assign]
        measure = JsonSchema(Material(texts, SIZES["reduced"], (2048,), 4096))
        measure.ask(Cached(), "2048/0", None, None)  # type: ignore[arg-type]
        assert 1400 < len(sent[-1]) <= 2048 - 160


def test_prompts_do_not_begin_twice(tmp_path: Path) -> None:
    """The dump adds what a model expects in front of a text."""
    texts = Texts(AutoTokenizer.from_pretrained(MODEL))
    texts.leading = texts.encode("BEGINNING")
    path = Calibration(model_settings("m"), {}, texts, 8192, tmp_path, ()).prepare()
    prompts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) >= 8
    assert not any("BEGINNING" in prompt for prompt in prompts)


class Fits:
    """Fits that leave empty files, and one dump."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.groups: list[int] = []
        self.dumps = 0
        patch.setattr(calibrating, "run_dump", self.dump)
        patch.setattr(calibrating, "run_fit", self.fit)

    def fit(self, folder: CalibrationFolder, recipe: str, options: FitOptions, out: Path) -> Path:
        self.groups.append(options.group_size)
        out.mkdir(parents=True)
        for side in "kv":
            (out / f"{side}_rotation_x.safetensors").touch()
        return out

    def dump(self, request: DumpRequest) -> CalibrationFolder:
        self.dumps += 1
        return CalibrationFolder(request.root)


def test_groups_of_all_sizes_are_fitted_to_one_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of bits counts scales and zero points, so its plan depends on the group size."""
    fits, texts = Fits(monkeypatch), Texts(AutoTokenizer.from_pretrained(MODEL))
    found = []
    for own, group in ((64, None), (128, None), (128, 64), (64, 128)):
        settings = model_settings("m").overridden(group_size=own)
        found.append(Calibration(settings, {}, texts, 8192, tmp_path, ()).rotations(Row("plus", "3.0", group=group)))
    assert fits.groups == [64, 128]
    assert found == [found[0], found[1]] * 2


def test_a_fit_is_not_older_than_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed recipe fits anew, to the same dump; answers that depend on it are asked anew, as its files differ."""
    package = tmp_path / "oscar_rotation"
    recipe = package / "recipes" / "plus.py"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("KEY_ROWS = 1\n")
    module = ModuleType("oscar_rotation")
    module.__file__ = str(package / "__init__.py")
    monkeypatch.setattr(calibrating, "FITTING", {module: ()})
    fits, texts = Fits(monkeypatch), Texts(AutoTokenizer.from_pretrained(MODEL))
    calibration = Calibration(model_settings("m"), {}, texts, 8192, tmp_path / "out", ())
    first = calibration.rotations(Row("plus"))
    assert calibration.rotations(Row("plus")) == first
    recipe.write_text("KEY_ROWS = 2\n")
    assert calibration.rotations(Row("plus")) != first
    forget_fits(tmp_path / "out")
    calibration.rotations(Row("plus"))
    assert (len(fits.groups), fits.dumps) == (3, 1)
    assert calibration.prepare().exists()


def test_servers_may_take_less_than_the_model(tmp_path: Path) -> None:
    for flags in ("--context-length 2048", "--context-length=2048"):
        done = CliRunner().invoke(
            app, ["prove", str(MODEL), "--out", str(tmp_path), "--lengths", "2048", "--server-args", flags]
        )
        assert "a context of 2048 tokens does not fit: the model takes 2048, less 64" in done.stderr


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        "max_position_embeddings": 32768}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "context"),
    [
        (["--lengths", "2048"], 2048 + 640),
        (["--lengths", "2048", "--measure", "session"], None),
        (["--lengths", "8128"], None),
        (["--lengths", "2048", "--fit-context", "4096"], 4096),
        (["--lengths", "20480", "--server-args", f"--json-model-override-args '{json.dumps(YARN)}'"], 20480 + 640),
        (["--lengths", "32704", "--server-args", f"--json-model-override-args '{json.dumps(YARN)}'"], None),
    ],
)
def test_fits_cover_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], context: int | None
) -> None:
    made: list[Calibration] = []

    def stop(caches: Any, maker: Any, calibration: Calibration) -> None:
        made.append(calibration)
        raise DataError("enough")

    monkeypatch.setattr(command, "_makers", stop)
    monkeypatch.setattr(TailKl, "prepare", lambda self: None)
    measure = [] if "--measure" in arguments else ["--measure", "tail-kl"]
    done = CliRunner().invoke(app, ["prove", str(MODEL), "--out", str(tmp_path), *measure, *arguments])
    assert done.stderr == "error: enough\n"
    assert made[0].context == context
    assert (json.dumps(YARN) in made[0].server_args) == ("--server-args" in arguments)


def test_a_fit_for_another_context_is_another_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits, texts = Fits(monkeypatch), Texts(AutoTokenizer.from_pretrained(MODEL))
    found = {
        Calibration(model_settings("m"), {}, texts, 8192, tmp_path, (), context).rotations(Row("plus"))
        for context in (None, 4096, 4096)
    }
    assert len(found) == len(fits.groups) == 2


def test_a_small_cache_is_asked_less_at_once(tmp_path: Path) -> None:
    plan = run.Plan(model_settings("m"), [], Store(tmp_path), tmp_path, {}, at_once=8)
    assert [plan.in_flight(n, 1000) for n in (None, 10**6, 5000, 500)] == [8, 8, 2, 1]


def test_errors_are_one_line(tmp_path: Path) -> None:
    for model, arguments, fault in (
        (tmp_path / "nowhere", [], "nowhere"),
        (MODEL, ["--lengths", "8192"], "a context of 8192 tokens does not fit: the model takes 8192, less 64"),
        (MODEL, ["--recall-lengths", "8000"], "modules of 8000 tokens do not fit: the model takes 8192, less 640"),
        (MODEL, ["--tasks", str(tmp_path / "none.jsonl")], "none.jsonl: no such file"),
        (MODEL, ["--text", str(tmp_path / "none.txt")], "none.txt: no such file"),
    ):
        done = CliRunner().invoke(app, ["prove", str(model), "--out", str(tmp_path / "out"), *arguments])
        assert done.exit_code == 1, done.output
        assert fault in done.stderr
        assert done.stderr.count("\n") == 1
