"""What reaches every server: flags as the user quoted them, and trust in a model's own code only where it was given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oscar_rotation.model_table import known_models, model_settings
from oscar_tools.calibration import dump_driver
from oscar_tools.calibration.errors import DataError
from oscar_tools.calibration.model_files import load_config
from oscar_tools.calibration.option_groups import ServerOptions
from oscar_tools.cli import app
from oscar_tools.evaluation import runner
from oscar_tools.evaluation.methods import make_method
from oscar_tools.local_server import ServerFailedError
from support.benchmark_data import write_rows

QUOTED = """--json-model-override-args '{"rope_scaling": {"type": "yarn"}}' --page-size 64"""


def test_quoted_server_arguments_survive() -> None:
    flags = ServerOptions(server_args=QUOTED).flags
    assert flags[0::2] == ("--json-model-override-args", "--page-size")
    assert json.loads(flags[1]) == {"rope_scaling": {"type": "yarn"}}


@pytest.mark.parametrize("name", [*known_models(), "some/model"])
def test_remote_code_is_trusted_only_on_request(name: str) -> None:
    """No model of the table needs it with the release of transformers that SGLang pins."""
    for options, trusted in (
        (ServerOptions(), False),
        (ServerOptions(server_args=QUOTED), False),
        (ServerOptions(trust_remote_code=True), True),
        (ServerOptions(server_args=f"{QUOTED} --trust-remote-code"), True),
    ):
        settings = options.settings(name, None)
        assert settings.trust_remote_code is trusted
        args = make_method("hadamard", settings).server_args(settings, options.flags)
        assert args.count("--trust-remote-code") == int(trusted)


@pytest.fixture
def model_with_code(tmp_path: Path) -> Path:
    """A model whose configuration and tokenizer are classes of its own repository, which leave a trace when run."""
    folder = tmp_path / "model"
    folder.mkdir()
    code = f"""
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizer
Path({str(tmp_path / "ran")!r}).touch()

class Own(PretrainedConfig):
    model_type = "own"

class OwnTokenizer(PreTrainedTokenizer):
    vocab_size = 1

    def get_vocab(self):
        return {{"x": 0}}

    def _tokenize(self, text):
        return ["x" for _ in text]

    def _convert_token_to_id(self, token):
        return 0
"""
    (folder / "own.py").write_text(code)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.OwnTokenizer", None]}}
    shape = {"head_dim": 128, "num_key_value_heads": 1, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | shape))
    tokenizer = {"tokenizer_class": "OwnTokenizer", "auto_map": config["auto_map"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_code_of_a_model_runs_only_on_request(
    tmp_path: Path, model_with_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every place where the drivers read a model, and in the servers they start."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    started: list[list[str]] = []

    def no_server(model: str, log: Path, args: list[str], env: dict[str, str], **more: object) -> None:
        started.append(args)
        raise ServerFailedError("not started")

    for module in (dump_driver, runner):
        monkeypatch.setattr(module, "serve", no_server)
    data = write_rows(tmp_path / "data.jsonl", [{"text": "hello"}])
    commands: list[list[str]] = [
        ["dump", str(model_with_code), "--root", str(tmp_path), "--dataset", str(data), "--tokens", "5"],
        ["eval", str(model_with_code), "--root", str(tmp_path), "--benchmarks", "niah_4k", "--limit", "1"],
    ]
    monkeypatch.setattr(runner, "check_harness", lambda: None)
    monkeypatch.setenv("METHODS", "quarot")
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 1
        fault = "comes with code of its own; read it, then allow it with --trust-remote-code"
        assert result.stderr.splitlines()[-1] == f"error: {model_with_code}: {fault}"
        assert started == []
        assert not (tmp_path / "ran").exists()
    with pytest.raises(DataError, match="comes with code of its own"):
        load_config(model_settings(str(model_with_code)))
    assert not (tmp_path / "ran").exists()
    for command in commands:
        result = CliRunner().invoke(app, [*command, "--trust-remote-code"])
        assert "error: not started" in result.stderr, result.output
        assert "--trust-remote-code" in started.pop()
    assert (tmp_path / "ran").exists()
    trusted = model_settings(str(model_with_code)).overridden(trust_remote_code=True)
    assert load_config(trusted).model_type == "own"
