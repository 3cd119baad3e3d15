"""Supported releases of SGLang: the installed one, and others served from their sources with its dependencies.

Int2 mode answers the same in all of them. By default the oldest and the newest are asked more: what becomes of command
lines, and that a server without int2 mode does not notice the plugin. OSCAR_TEST_RELEASES says which releases (``all``,
or versions with commas between).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_oscar import SGLANG_VERSIONS
from sglang_oscar.errors import EXIT_CODE
from support import golden, release_answers
from support.api import retracted
from support.compare import LOGPROBS, first_difference
from support.launch_cases import run_cases
from support.reference import MODEL, question, token_ids
from support.releases import environment, has_compiled_tree, installed, needs_newer_python, served, smoked
from support.servers import HADAMARD, Server, serve, server_environment

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="sources are served without compiled extensions"),
]
NEAR_TIE = 1.0
"""Between processors; on one machine all releases answer bit for bit alike."""
COMPILED_TREE = has_compiled_tree()
answers: dict[str, list[dict[str, Any]]] = {}


def needs(version: str) -> None:
    """Skip a release that this Python does not suit."""
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")


@pytest.fixture(params=served(), scope="module")
def version(request: pytest.FixtureRequest) -> str:
    needs(request.param)
    return request.param


def together(server: Server) -> list[dict[str, Any]]:
    """Three requests at once."""
    text, facts = golden.document(400, 201)
    asked = [token_ids(text + question(word)) for word in facts]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda ids: server.generate(ids, 24), asked))


# Those that are asked more come last: their warm processes are then there for the tests below.
@pytest.mark.parametrize("version", sorted(smoked(), key=served().__contains__))
def test_int2_answers(version: str, tmp_path: Path) -> None:
    needs(version)
    env = release_answers.ENV | environment(version)
    with serve(MODEL, tmp_path / "log", *release_answers.ARGS, env=env, warm_up=True) as server:
        answers[version] = release_answers.ask(server)
        assert ("RustUnifiedTreeCore" in server.text()) == (COMPILED_TREE and version == installed())
        assert retracted(server) == 0
        together(server)
        assert retracted(server) > 0
        assert server.alive()
        assert "Traceback" not in server.text()
    # Another processor or PyTorch rounds otherwise, and two bits make something of that in a few answers.
    found = [first_difference(x, y) for x, y in zip(release_answers.load(), answers[version], strict=True)]
    assert sum(one is None or one.gap <= NEAR_TIE for one in found) >= len(found) * 3 // 4
    first = next(iter(answers))
    assert answers[version] == answers[first], f"sglang {version} and {first} answer differently"


def bf16_answers(version: str, log: Path, plugins: dict[str, str]) -> list[list[int]]:
    """Tokens that a server without int2 mode answers."""
    text, facts = golden.document(400, 203)
    with serve(MODEL, log, "--attention-backend", "torch_native", env=environment(version, **plugins)) as server:
        found = [server.generate(token_ids(text + question(word)), 8, **LOGPROBS) for word in facts]
        assert "int2" not in server.text()
    return [answer["meta_info"]["output_token_logprobs"] for answer in found]


def test_bf16_does_not_notice(version: str, tmp_path: Path) -> None:
    """With the plugin, which makes int2 mode of the same command line below, and without."""
    with ThreadPoolExecutor(2) as pool:
        with_plugin = pool.submit(bf16_answers, version, tmp_path / "with.log", {})
        without = pool.submit(bf16_answers, version, tmp_path / "without.log", {"SGLANG_PLUGINS": "none"})
        assert with_plugin.result() == without.result()


def launch(version: str, **variables: str) -> list[dict[str, Any]]:
    """What becomes of command lines: int2 mode, int2 mode with a refused flag, and BF16."""
    base = ["--model-path", str(MODEL), "--device", "cpu"]
    int2 = [*base, "--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64"]
    cases = [{"argv": argv} for argv in (int2, [*int2, "--enable-streaming-session"], base)]
    return run_cases(cases, server_environment(HADAMARD | environment(version, **variables)))


def test_command_lines(version: str) -> None:
    if installed() == version:
        pytest.skip("test_refusals.py asks the installed release")
    accepted, refused, plain = launch(version)
    assert accepted["status"] == 0, accepted["error"]
    assert accepted["values"]["attention_backend"] == "oscar"
    assert accepted["values"]["kv_cache_quant_group_size"] == 64
    assert refused["status"] == EXIT_CODE
    assert "--enable-streaming-session" in refused["error"].splitlines()[-1]
    assert plain["status"] == 0, plain["error"]
    assert plain["values"]["attention_backend"] != "oscar"


def test_an_unknown_release(tmp_path: Path) -> None:
    """Nothing is hooked: int2 mode is refused with one line, and who does not ask for it gets what SGLang says. Where
    the operator allows it a newer one serves, with a warning."""
    newest = SGLANG_VERSIONS[-1]
    if needs_newer_python(newest):
        newest = SGLANG_VERSIONS[0]
    renamed = tmp_path / "sglang-9.9.9.dist-info"
    renamed.mkdir()
    (renamed / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    release = environment(newest)
    env = release | {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), release.get("PYTHONPATH")]))}
    base = ["--model-path", str(MODEL), "--device", "cpu"]
    (plain,) = run_cases([{"argv": base}], server_environment(HADAMARD | env))
    assert plain["status"] == 0, plain["error"]
    assert "oscar" not in plain["error"]
    with pytest.raises(AssertionError) as refused:
        run_cases([], server_environment(HADAMARD | env), "--kv-cache-dtype", "int2")
    assert "sglang-oscar: error: int2 mode cannot attach to SGLang: sglang 9.9.9 is installed" in str(refused.value)
    assert "all touch points read back: SGLANG_OSCAR_ALLOW_NEWER=1 serves it" in str(refused.value)
    assert "Traceback" not in str(refused.value)
    allowed = server_environment(HADAMARD | env | {"SGLANG_OSCAR_ALLOW_NEWER": "1"})
    plain, int2 = run_cases([{"argv": base}, {"argv": [*base, "--kv-cache-dtype", "int2"]}], allowed)
    assert (plain["status"], int2["status"]) == (0, 0), plain["error"] + int2["error"]
    assert int2["values"]["attention_backend"] == "oscar"
    assert "newer than what was tested" not in plain["error"]
    assert int2["error"].count("sglang 9.9.9 is newer than what was tested") == 1
