"""A GPTQ checkpoint, whose weights only its server can read, is recorded, calibrated and served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oscar_rotation.dump import DumpReader
from oscar_rotation.fit.output_weights import reader_of
from support.gptq_models import save_gptq
from support.reference import MODEL
from support.servers import serve, server_environment

KV_HEADS, D = 2, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("gptq") / "model"
    return folder, save_gptq(folder)


def test_recorded_projections_are_those_of_the_checkpoint(
    checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model, restored = checkpoint
    env = {"DUMP_KVCACHE": "1", "DUMP_KVCACHE_TOKENS": "300", "DUMP_KVCACHE_DIR": str(tmp_path / "dump")}
    with serve(model, tmp_path / "log", "--skip-tokenizer-init", env=env) as server:
        server.generate(list(range(300)), 1)
        assert "dump complete" in server.text()
    dump = DumpReader(tmp_path / "dump")
    for layer in range(dump.num_layers):
        expected = reader_of(restored[f"model.layers.{layer}.self_attn.o_proj.weight"], KV_HEADS, D)
        torch.testing.assert_close(dump.output_reader(layer), expected, rtol=0.02, atol=0.02 * float(expected.max()))


def test_calibrated_and_served(checkpoint: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    out = tmp_path / "rotations"
    command = [sys.executable, "-m", "oscar_tools", "calibrate", str(checkpoint[0]), "--out", str(out)]
    command += ["--tokenizer-path", str(MODEL), "--tokens", "4000", "--mem-fraction-static", "0.2"]
    done = subprocess.run(
        command, env=server_environment({}), capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    env = {"SGLANG_OSCAR_ROTATIONS": str(out)}
    flags = ["--kv-cache-dtype", "int2", "--kv-cache-quant-group-size", "64", "--skip-tokenizer-init"]
    with serve(checkpoint[0], tmp_path / "log", *flags, env=env) as server:
        assert len(server.generate(list(range(100, 700)), 16)["output_ids"]) == 16
        assert server.alive()
