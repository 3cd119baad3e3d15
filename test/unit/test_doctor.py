"""``oscar doctor``: one line per finding, and an exit status that says whether int2 mode can run."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, Qwen3Config, Qwen3NextConfig, Qwen3VLConfig
from typer.testing import CliRunner

from oscar_rotation.files.rotation_file import save_rotation_file
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_tools.cli import app
from oscar_tools.doctor import account, command, machine
from oscar_tools.doctor.account import parameters, weight_bytes
from oscar_tools.doctor.check import Check, attempt
from oscar_tools.doctor.model import Ranks, model_checks, model_config
from sglang_oscar.attach import failure, releases
from sglang_oscar.attention.flash_attention3 import FlashAttention3

GIB = 1 << 30
SIZES = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configuration of a small model; both rotation variables name a recipe."""
    config = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=128, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(tmp_path)
    monkeypatch.setenv("SGLANG_OSCAR_K_ROTATION_PATH", "hadamard")
    monkeypatch.setenv("SGLANG_OSCAR_V_ROTATION_PATH", "hadamard")
    return tmp_path


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name.partition(" (")[0]: check for check in checks}


def test_a_fitting_model(model: Path) -> None:
    checks = by_name(model_checks(str(model), 64, 8 * GIB))
    assert all(check.ok for check in checks.values()), checks
    assert "Qwen3ForCausalLM, 2 layers, 4 query and 2 kv heads of 128" in checks["model"].detail
    assert "2.50 bits per element" in checks["group size"].detail
    for what in ("6.735 GiB budget", "tokens x 320 bytes", "at 8K", "at 32K", "at 128K"):
        assert what in checks["memory"].detail


def test_weights_are_counted_wherever_they_are(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder, of an id that was downloaded, in one of several formats; else it is said that they are missing."""
    assert "weights of" in by_name(model_checks(str(model), 64, 8 * GIB))["memory"].detail
    cache = tmp_path / "hub"
    snapshot = cache / "models--acme--ref" / "snapshots" / ("1" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    (snapshot / "pytorch_model.bin").write_bytes(bytes(300))
    assert weight_bytes("acme/ref") == weight_bytes(str(snapshot)) == 300
    (snapshot / "consolidated.safetensors").write_bytes(bytes(290))
    assert weight_bytes("acme/ref") == 290
    (snapshot / "model-1.safetensors").write_bytes(bytes(280))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weight_bytes("acme/ref") == 280
    assert weight_bytes(str(snapshot / "pytorch_model.bin")) == 300
    assert weight_bytes("acme/other") == 0
    (model / "model.safetensors").write_bytes(bytes(GIB // 10))
    detail = by_name(model_checks(str(model), 64, 8 * GIB))["memory"].detail
    assert "6.700 GiB budget" in detail
    assert "weights of" not in detail


def test_ranks_share_heads_and_weights(model: Path) -> None:
    """Weights that are not here are counted by the configuration; a number of ranks that heads cannot be shared by is
    refused."""
    alone, shared = (by_name(model_checks(str(model), 64, GIB, ranks=Ranks(n)))["memory"] for n in (1, 2))
    assert "one device" in alone.name
    assert "tokens x 320 bytes" in alone.detail
    assert "each of 2 devices" in shared.name
    assert "tokens x 160 bytes" in shared.detail
    size = re.search(r"counted as ([\d.]+) GB in 16 bits", shared.detail)
    assert size is not None
    budgets = [float(re.search(r"of a ([\d.]+) GiB budget", x.detail)[1]) for x in (alone, shared)]  # type: ignore[index]
    assert budgets[1] - budgets[0] == pytest.approx(float(size[1]) * 1e9 / GIB / 2, abs=0.06)
    assert "weights take 0.1 GiB of 0.1 GiB" in failed(model_checks(str(model), 64, GIB // 16), "memory")
    assert "--tp 3 cannot share 4 query and 2 kv heads" in failed(
        model_checks(str(model), 64, GIB, ranks=Ranks(3)), "model"
    )


def test_replicas_of_attention_have_heads_and_tokens_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds all of attention's weights, and no kv head twice; the other weights are shared by all ranks. What a
    model that is not here would have is counted once."""
    counted = Mock(wraps=parameters)
    monkeypatch.setattr(account, "parameters", counted)
    alone, twice = (by_name(model_checks(str(model), 64, GIB, ranks=Ranks(2, dp)))["memory"] for dp in (1, 2))
    assert counted.call_count == 2
    assert "each of 2 devices, tokens of one of 2 replicas" in twice.name
    assert "tokens x 320 bytes" in twice.detail
    budgets = [float(re.search(r"of a ([\d.]+) GiB budget", x.detail)[1]) for x in (alone, twice)]  # type: ignore[index]
    sizes = parameters(model_config(str(model)).hf_config)
    half = sum(size for name, size in sizes.items() if "self_attn" in name)  # of two bytes, and half of them
    assert budgets[0] - budgets[1] == pytest.approx(half / GIB, abs=0.002)
    assert "--dp 3 does not divide --tp 2" in failed(model_checks(str(model), 64, GIB, ranks=Ranks(2, 3)), "model")


def test_a_model_without_rotations_is_sized_with_the_bits_of_a_calibration(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side in "KV":
        monkeypatch.delenv(f"SGLANG_OSCAR_{side}_ROTATION_PATH")
    assert "2.75 bits per element, group 128" in by_name(model_checks(str(model), None, 8 * GIB))["memory"].detail


def test_a_model_that_reads_images(model: Path) -> None:
    config = Qwen3VLConfig(text_config=SIZES | {"num_key_value_heads": 2, "head_dim": 128})
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    config.save_pretrained(model)
    checks = by_name(model_checks(str(model), 64, 8 * GIB))
    assert all(check.ok for check in checks.values()), checks
    assert "Qwen3VLForConditionalGeneration, 2 layers, 4 query and 2 kv heads of 128" in checks["model"].detail
    assert "tokens x 320 bytes" in checks["memory"].detail


def failed(checks: list[Check], name: str) -> str:
    """The line of the failed check ``name``, with reason and change."""
    check = by_name(checks)[name]
    assert not check.ok
    assert check.change
    assert check.line() == f"FAIL {check.name}: {check.detail} -> {check.change}"
    return check.line()


def test_unsupported_model(model: Path) -> None:
    config = DeepseekV3Config(**SIZES, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(model)
    line = failed(model_checks(str(model), None, 8 * GIB), "model")
    assert "latent attention" in line
    assert line.endswith("-> use --kv-cache-dtype auto")


def test_sliding_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss-20b's sizes: both halves in the account."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for side in "KV":
        monkeypatch.setenv(f"SGLANG_OSCAR_{side}_ROTATION_PATH", "hadamard")
    sizes = {"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    sizes["num_local_experts"] = 32
    GptOssConfig(**sizes, hidden_size=2880, dtype="bfloat16", architectures=["GptOssForCausalLM"]).save_pretrained(
        tmp_path
    )
    checks = by_name(model_checks(str(tmp_path), None, 80 * GIB))
    assert all(check.ok for check in checks.values()), checks
    assert "24 layers (12 in 2 bits, 12 with a window of 128)" in checks["model"].detail
    assert "tokens x 3840 bytes" in checks["memory"].detail
    assert "window layers: 12 in bfloat16, 24576 bytes a token" in checks["memory"].detail
    fewer = re.search(r"would hold \d+ tokens, ([\d.]+) times fewer", checks["memory"].detail)
    assert fewer is not None
    assert float(fewer[1]) > 4
    on_device = re.search(r"24576 bytes a token x (\d+) tokens", checks["memory"].detail)
    assert on_device is not None
    twice = by_name(model_checks(str(tmp_path), None, 80 * GIB, host_ratio=2.0))["host tier"].detail
    assert re.findall(r"host tier: (\d+) tokens.*?, (\d+) layers", twice)[1] == (str(2 * int(on_device[1]) + 64), "12")
    sizes = by_name(model_checks(str(tmp_path), None, 80 * GIB, host_size=50))["host tier"].detail
    assert sum(map(float, re.findall(r"= ([\d.]+) GiB", sizes))) == pytest.approx(50e9 / GIB, abs=0.01)


@pytest.fixture
def hybrid(model: Path) -> Path:
    """Configuration of a small hybrid model, every fourth layer of full attention."""
    sizes = SIZES | {"num_hidden_layers": 8, "num_key_value_heads": 2, "head_dim": 128}
    config = Qwen3NextConfig(**sizes, dtype="bfloat16", architectures=["Qwen3NextForCausalLM"]).to_dict()
    # Files of the Hub have it; this class leaves it out.
    (model / "config.json").write_text(json.dumps(config | {"full_attention_interval": 4}))
    return model


@pytest.mark.parametrize("apart", [True, False])
def test_a_hybrid_model(apart: bool, hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "tells_kept_states_apart", lambda: apart)
    checks = by_name(model_checks(str(hybrid), None, 8 * GIB))
    assert all(check.ok for check in checks.values()), checks
    assert "8 layers, 2 of them with full attention" in checks["model"].detail
    assert ("--disable-overlap-schedule" in checks["model"].detail) == (not apart)
    assert "states of linear layers" in checks["memory"].detail


def test_what_a_hybrid_model_is_served_with(hybrid: Path) -> None:
    """Its own draft layer; a host tier."""
    checks = by_name(model_checks(str(hybrid), None, 8 * GIB, str(hybrid)))
    assert checks["model"].ok
    assert checks["draft model"].ok
    assert "states behind drafts" in checks["memory"].detail
    checks = by_name(model_checks(str(hybrid), None, 8 * GIB, host_size=1))
    assert checks["model"].ok == releases.carries_slot_states()
    if checks["model"].ok:
        rows, states = map(float, re.findall(r"= ([\d.]+) GiB", checks["host tier"].detail))
        assert rows + states == pytest.approx(1e9 / GIB, abs=0.1)
        assert rows < states


def test_unreadable_model(tmp_path: Path) -> None:
    assert str(tmp_path) in failed(model_checks(str(tmp_path), None, 8 * GIB), "model")


def test_draft_model(model: Path, tmp_path: Path) -> None:
    """Its cache is part of the account; a whole model does not draft."""
    folder, sizes = tmp_path / "draft", {"num_key_value_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    Qwen3Config(**SIZES, **sizes, architectures=["LlamaForCausalLMEagle3"]).save_pretrained(folder)
    checks = by_name(model_checks(str(model), 64, 8 * GIB, str(folder)))
    assert checks["draft model"].detail == "LlamaForCausalLMEagle3, 2048 bytes a token in torch.bfloat16"
    assert "tokens x 2048 bytes" in checks["memory"].detail
    checks = by_name(model_checks(str(model), 64, 8 * GIB, str(folder), host_ratio=2.0))
    assert checks["model"].ok
    tokens = re.findall(r": (\d+) tokens", checks["host tier"].detail)
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]
    assert "whole model" in failed(model_checks(str(model), 64, 8 * GIB, str(model)), "draft model")


def test_group_size(model: Path) -> None:
    line = failed(model_checks(str(model), 48, 8 * GIB), "group size")
    assert "48" in line
    assert "power of two" in line


def test_variables(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OSCAR_V_CLIP_RATIO", "7")
    assert "SGLANG_OSCAR_V_CLIP_RATIO='7'" in failed(model_checks(str(model), None, 8 * GIB), "variables")


def test_a_sink_that_no_page_ends_at(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MIXED_KV_PREFIX_TOKENS", "100")
    assert "SGLANG_MIXED_KV_PREFIX_TOKENS=100" in failed(model_checks(str(model), None, 8 * GIB), "variables")


def test_a_kernel_for_gpus_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_OSCAR_DECODE_BACKEND", "cuda")
    assert "--device cuda" in failed(model_checks(str(model), None, 8 * GIB), "prompts")


def test_an_import_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("\n\n[sgl_kernel] CRITICAL: no library\nmore")

    monkeypatch.setattr("sglang.srt.plugins.load_plugins", load)
    line = failed([attempt("hooks", machine.check_hooks)], "hooks")
    assert "[sgl_kernel] CRITICAL: no library" in line
    assert "more" not in line


def test_prompts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is nothing to choose."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = by_name(model_checks(str(model), None, 8 * GIB))
    assert checks["prompts"].detail == "attention by the torch reference"
    monkeypatch.setenv("SGLANG_OSCAR_EXTEND_BACKEND", "triton")
    assert "--device cuda" in failed(model_checks(str(model), None, 8 * GIB), "prompts")


@pytest.mark.parametrize("value", [None, "/nonexistent/k.pt"])
def test_rotations(value: str | None, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_OSCAR_K_ROTATION_PATH")
    if value is not None:
        monkeypatch.setenv("SGLANG_OSCAR_K_ROTATION_PATH", value)
    line = failed(model_checks(str(model), None, 8 * GIB), "rotations")
    assert "SGLANG_OSCAR_K_ROTATION_PATH" in line
    assert (value or "not set") in line


@pytest.mark.parametrize("per_head", [True, False])
def test_sharing(per_head: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files per kv head say how different heads are; a shared one on two heads is warned of, and good."""
    rotations = torch.linalg.qr(torch.randn(2, 2, 128, 128, generator=torch.Generator().manual_seed(1)))[0]
    for side in "kv":
        path = tmp_path / f"{side}.pt"
        content = RotationSet(rotations if per_head else rotations[:, 0], metadata=RotationMetadata(side=side))
        save_rotation_file(path, content)
        monkeypatch.setenv(f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH", str(path))
    check = by_name(model_checks(str(model), 64, 8 * GIB))["rotations"]
    assert check.ok
    assert ("keys: rotations of two heads overlap by 0.0" in check.detail) == per_head
    assert ("warning: " in check.detail) == (not per_head)


def test_too_little_memory(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"0")
    assert "too small" in failed(model_checks(str(model), None, GIB // 1024), "memory")


def test_another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "SGLANG_VERSIONS", ("9.9.8", "9.9.9"))
    check = attempt("sglang", machine.check_sglang)
    assert not check.ok
    assert check.change == 'pip install "sglang>=9.9.8,<=9.9.9"'


def test_plugin_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt("plugin", machine.check_entry_point).ok
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    check = attempt("plugin", machine.check_entry_point)
    assert not check.ok
    assert "SGLANG_PLUGINS=other" in check.detail


def test_driver_without_usable_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path / "none")
    assert "no GPU" in attempt("device", machine.check_torch).detail
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path)
    assert "driver" in attempt("device", machine.check_torch).change


@pytest.mark.parametrize(("capability", "ok"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_compute_capability(capability: tuple[int, int], ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check = attempt("device", machine.check_torch)
    assert check.ok is ok
    assert "8.0" in check.line() or ok


@pytest.mark.parametrize(
    ("name", "capability", "said"),
    [
        (
            "NVIDIA H200",
            (9, 0),
            "the CUDA kernel decodes, measured at 5?% to 9?% of the card's read bandwidth with 2 bits",
        ),
        ("NVIDIA H20", (9, 0), "the CUDA kernel decodes, never timed on this card; oscar bench does so in two minutes"),
        (
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            "the Triton kernel decodes, expected, not measured, at 4?% to 8?% of the card's*",
        ),
        ("NVIDIA GeForce RTX 4090", (8, 9), "the Triton kernel decodes, expected, not measured, at 95% of the card's*"),
    ],
)
def test_what_applies_to_the_card(
    name: str, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(FlashAttention3, "installed", lambda: True)
    assert fnmatch.fnmatchcase(machine.check_kernels(), f"{said}*; prompts by FlashAttention-3")


def test_why_prompts_are_not_those_of_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Thor")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (11, 0))
    assert "(FlashAttention-4: it is not for this GPU; FlashAttention-3: " in machine.check_kernels()


def test_broken_sgl_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> SimpleNamespace:
        raise ImportError("libcuda.so.1 is missing")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.importlib, "import_module", broken)
    check = attempt("sgl_kernel", machine.check_sgl_kernel)
    assert not check.ok
    assert "libcuda.so.1" in check.detail


@pytest.mark.parametrize("healthy", [True, False])
def test_command(healthy: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and JSON say the same; the exit status is 0 only if every check is fine."""
    found = [Check("sglang", True, "0.0"), Check("hooks", healthy, "found", "" if healthy else "do this")]
    monkeypatch.setattr(command, "machine_checks", lambda: found)
    monkeypatch.setattr(command, "memory_bytes", lambda: 8 * GIB)
    arguments = ["doctor", str(model), "--kv-cache-quant-group-size", "128"]
    text = CliRunner().invoke(app, arguments)
    structured = CliRunner().invoke(app, [*arguments, "--json"])
    assert text.exit_code == structured.exit_code == (0 if healthy else 1)
    report = json.loads(structured.stdout)
    assert report["ok"] is healthy
    lines = text.stdout.splitlines()
    assert lines == [Check(**check).line() for check in report["checks"]]
    assert all(line.startswith(("ok   ", "FAIL ")) for line in lines)
    assert ("FAIL hooks: found -> do this" in lines) is not healthy


def test_host_tier(model: Path) -> None:
    """Only where it is asked for; of bytes, or of the tokens on the device."""
    assert "host tier" not in by_name(model_checks(str(model), 64, 8 * GIB))
    checks = by_name(model_checks(str(model), 64, 8 * GIB, host_size=1))
    assert checks["host tier"].detail.startswith("host tier: 2604224 tokens x 384 bytes = 0.931 GiB of host memory")
    twice = by_name(model_checks(str(model), 64, 8 * GIB, host_ratio=2.0))
    on_device = int(twice["memory"].detail.partition(" tokens x 320 bytes")[0].rpartition(" ")[2])
    assert f"host tier: {2 * on_device // 64 * 64 + 64} tokens" in twice["host tier"].detail


@pytest.mark.parametrize(
    ("arguments", "flag", "fault"),
    [
        (["--hicache-ratio", "nan", "model"], "--hicache-ratio", ""),
        (["--hicache-ratio", "inf", "model"], "--hicache-ratio", "inf is no number of times"),
        (["--hicache-size", "4"], "--hicache-size", "has no meaning without a MODEL"),
        (["--context-length", "4"], "--context-length", "has no meaning without a MODEL"),
        (["--json-model-override-args", "{"], "--json-model-override-args", "is not JSON"),
    ],
)
def test_options_without_a_meaning(
    arguments: list[str], flag: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is looked at."""
    monkeypatch.setattr(command, "machine_checks", lambda: pytest.fail("looked"))
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert flag in result.output
    assert fault in result.output


def test_a_longer_context_is_warned_of(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the context length and the overrides that a server would be started with."""
    import torch

    from oscar_rotation.files.rotation_file import save_rotation_file
    from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet

    for side in ("k", "v"):
        metadata = RotationMetadata(side=side, recipe="plus", calibration={"context": 1024})
        path = tmp_path / f"{side}.safetensors"
        save_rotation_file(path, RotationSet(torch.eye(128).expand(2, 2, -1, -1).contiguous(), metadata=metadata))
        monkeypatch.setenv(f"SGLANG_OSCAR_{side.upper()}_ROTATION_PATH", str(path))
    for length, warned in ((1024, False), (4096, True)):
        found = by_name(model_checks(str(model), 64, 8 * GIB, config={"context_length": length}))
        assert f"{length:,} positions" in found["model"].detail
        assert "keys fitted for 1,024 positions" in found["rotations"].detail
        assert ("oscar fit --context 4096" in found["rotations"].detail) == warned
