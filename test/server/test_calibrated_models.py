"""Models of other kinds calibrate themselves on the spot: with sinks and sliding windows, and with images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import requests
import torch

from oscar_rotation.files.rotation_file import read_rotation_file
from support import vision_models
from support.models import save
from support.reference import MODEL
from support.servers import serve
from support.speculation import plugins

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="gpt-oss needs a stand-in on the CPU engine only"),
]
INT2 = ["--kv-cache-dtype", "int2", "--max-running-requests", "2", "--enable-fp32-lm-head"]


def gpt_oss(folder: Path) -> tuple[Path, list[str], dict[str, str]]:
    flags = ["--moe-runner-backend", "triton", "--tokenizer-path", str(MODEL)]
    return save("gpt_oss", folder, vocab_size=4096), flags, plugins("gpt_oss_plugin")


def qwen3_vl(folder: Path) -> tuple[Path, list[str], dict[str, str]]:
    return vision_models.save("qwen3_vl", folder), [], {}


@pytest.mark.parametrize(("model", "layers"), [(gpt_oss, (1, 3)), (qwen3_vl, None)])
def test_calibrated_on_the_spot(
    model: Callable[[Path], tuple[Path, list[str], dict[str, str]]], layers: tuple[int, ...] | None, tmp_path: Path
) -> None:
    folder, flags, env = model(tmp_path / "model")
    env |= {"SGLANG_OSCAR_CACHE": str(tmp_path / "cache")}
    with serve(folder, tmp_path / "log", *INT2, *flags, env=env) as server:
        facts = requests.get(f"{server.url}/server_info", timeout=300).json()["internal_states"][0]["oscar"]
        assert facts["rotations"]["origin"] == "calibration on the spot"
        assert read_rotation_file(facts["rotations"]["keys"]).layer_ids == layers
        assert len(server.generate(list(range(100, 250)), 8)["output_ids"]) == 8
        assert server.alive()
