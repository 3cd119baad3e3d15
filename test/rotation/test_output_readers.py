"""What a recorded server says of its output projections, in place of a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oscar_rotation.dump import DumpManifest, DumpReader, DumpWriter
from oscar_rotation.errors import DumpError
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.output_weights import OutputWeights
from oscar_rotation.recipes import FITTED, FitRequest

KV_HEADS, GROUP, D = 2, 2, 32


def by_head(model: Path, layer: int) -> torch.Tensor:
    """W^T W of each query head: [q_heads, D, D]."""
    return OutputWeights(model).reader(layer, KV_HEADS * GROUP, D)


def record(root: Path, model: Path, ranks: int = 1) -> Path:
    """What each rank writes beside its queries."""
    for layer in range(2):
        for rank, share in enumerate(by_head(model, layer).chunk(ranks)):
            DumpWriter(root, total_kv_heads=KV_HEADS, tp_rank=rank, tp_size=ranks).write_output_reader(layer, share)
    facts = {"num_layers": 2, "q_heads": KV_HEADS * GROUP, "kv_heads": KV_HEADS, "head_dim": D, "tp_size": ranks}
    DumpManifest.model_validate(facts | {"output_readers": True}).write(root)
    return root


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_gathered_and_heads_summed(
    ranks: int, make_dump: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    dump = DumpReader(record(make_dump(tmp_path / "dump", tp_size=ranks), model, ranks))
    for layer in range(2):
        torch.testing.assert_close(dump.output_reader(layer), OutputWeights(model).reader(layer, KV_HEADS, D))


@pytest.mark.parametrize("recipe", ["focus", "plus"])
def test_a_fit_needs_no_weights_that_it_can_read(
    recipe: str, make_dump: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    """Of a GPTQ checkpoint, say, which has none under the usual name."""
    packed = tmp_path / "packed"
    packed.mkdir()
    save_file(
        {"model.layers.0.self_attn.o_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}, packed / "m.safetensors"
    )
    requests = [[5], [90, 120], [130, 70]]
    plain, recorded = (make_dump(tmp_path / name, requests=requests) for name in ("plain", "recorded"))
    record(recorded, model)
    fits = [
        FITTED[recipe].run(FitRequest(dump, FitOptions(), str(weights), "cpu"))
        for dump, weights in ((plain, model), (recorded, packed))
    ]
    for side in ("key", "value"):
        expected, found = (getattr(fit, side).rotations for fit in fits)
        torch.testing.assert_close(found, expected)


def test_broken_files_are_refused(make_dump: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    root = record(make_dump(tmp_path / "dump"), model)
    torch.save(torch.full((4, D, D), float("nan")), root / "layer_0" / "output_reader.pt")
    (root / "layer_1" / "output_reader.pt").unlink()
    with pytest.raises(DumpError, match=r"layer_0/output_reader\.pt: .*expected finite"):
        DumpReader(root).output_reader(0)
    with pytest.raises(DumpError, match=r"layer_1/output_reader\.pt: not a readable"):
        DumpReader(root).output_reader(1)
