"""Shared pieces of the rotation tests: small dumps and small rotation sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oscar_rotation.dump import DumpWriter
from oscar_rotation.files.rotation_set import RotationMetadata, RotationSet
from oscar_rotation.math.compose import r_h_pbr
from oscar_rotation.math.eigenbasis import eigenbasis

REQUESTS = [[5], [30, 50], [120], [1, 64]]


@pytest.fixture
def make_dump() -> Callable[..., Path]:
    """Writes a dump of random activations; chunk 0 is a warm-up of 5 tokens."""

    def make(
        root: Path,
        layers: int = 2,
        q_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        value_head_dim: int | None = None,
        tp_size: int = 1,
        requests: list[list[int]] = REQUESTS,
    ) -> Path:
        generator = torch.Generator().manual_seed(0)
        sizes = (q_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_head_dim or head_dim)
        for layer in range(layers):
            for chunk, lengths in enumerate(requests):
                q, k, v = (
                    (
                        torch.randn(sum(lengths), *size, generator=generator) * torch.linspace(0.2, 3.0, size[1])
                    ).bfloat16()
                    for size in sizes
                )
                q_share, kv_share = q_heads // tp_size, max(1, kv_heads // tp_size)
                for rank in range(tp_size):
                    kv = rank * kv_heads // tp_size
                    DumpWriter(root, total_kv_heads=kv_heads, tp_rank=rank, tp_size=tp_size).write(
                        layer,
                        chunk,
                        q[:, rank * q_share : (rank + 1) * q_share],
                        k[:, kv : kv + kv_share],
                        v[:, kv : kv + kv_share],
                        lengths,
                    )
        return root

    return make


@pytest.fixture
def rotation_set() -> RotationSet:
    """Three layers, head_dim 64, a key rotation."""
    generator = torch.Generator().manual_seed(1)
    rotations, spectra = [], []
    for _ in range(3):
        x = torch.randn(256, 64, generator=generator)
        eigenvalues, vectors = eigenbasis(x.T @ x)
        rotations.append(r_h_pbr(vectors, eigenvalues).float())
        spectra.append(eigenvalues.float())
    metadata = RotationMetadata(
        objective="qqt", side="k", model_id="some/model", model_hash="abc123", calibration={"tokens": 256}
    )
    return RotationSet(torch.stack(rotations), torch.stack(spectra), (0.96, 0.9, 1.0), metadata)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the output projections of a model of two layers, four query heads and head_dim 32."""
    folder = tmp_path / "model"
    folder.mkdir()
    generator = torch.Generator().manual_seed(4)
    weights = {
        f"model.layers.{n}.self_attn.o_proj.weight": torch.randn(48, 128, generator=generator).bfloat16()
        for n in range(2)
    }
    save_file(weights, str(folder / "model.safetensors"))
    return folder
