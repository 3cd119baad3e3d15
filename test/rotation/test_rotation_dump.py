"""Dumps: round trip, tensor-parallel shards, and every kind of broken dump refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from oscar_rotation.dump import MANIFEST_NAME, DumpError, DumpManifest, DumpReader, DumpWriter

MakeDump = Callable[..., Path]


def manifest(**changes: object) -> DumpManifest:
    facts = {"model_id": "some/model", "num_layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32}
    return DumpManifest.model_validate({**facts, **changes})


def read_all(root: Path) -> None:
    reader = DumpReader(root)
    for layer in range(reader.num_layers):
        for chunk in reader.chunks:
            reader.load(layer, chunk)


def refused(root: Path) -> str:
    """The one-line message with which reading everything in ``root`` fails."""
    with pytest.raises(DumpError) as caught:
        read_all(root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_round_trip(tmp_path: Path) -> None:
    q, k, v = torch.randn(9, 4, 32).bfloat16(), torch.randn(9, 2, 32).bfloat16(), torch.randn(9, 2, 32).bfloat16()
    writer = DumpWriter(tmp_path / "new" / "dump", total_kv_heads=2)
    writer.write(0, 0, q, k, v, torch.tensor([4, 5], dtype=torch.int32))
    writer.write(0, 1, q, k, v, [9])
    reader = DumpReader(tmp_path / "new" / "dump")
    assert (reader.num_layers, reader.chunks, reader.manifest) == (1, [0, 1], None)
    chunk = reader.load(0, 0)
    assert chunk.seq_lens == (4, 5)
    for loaded, written in ((chunk.q, q), (chunk.k, k), (chunk.v, v)):
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded, written)
    assert not list((tmp_path / "new").rglob("*.tmp"))


def test_public_layout_loads(tmp_path: Path) -> None:
    for kind, content in {
        "q": torch.randn(6, 4, 32),
        "k": torch.randn(6, 2, 32),
        "v": torch.randn(6, 2, 32),
        "seq_lens": torch.tensor([2, 4]),
    }.items():
        folder = tmp_path / "layer_0" / kind
        folder.mkdir(parents=True)
        torch.save(content, folder / "1.pt")
    assert DumpReader(tmp_path).load(0, 1).seq_lens == (2, 4)


def test_views_are_stored_without_their_storage(tmp_path: Path) -> None:
    fused = torch.randn(64, 400, 32)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:8]
    DumpWriter(tmp_path, total_kv_heads=2).write(0, 0, q, k, v, [64])
    assert (tmp_path / "layer_0/q/0.pt").stat().st_size < 2 * q.numel() * 4


@pytest.mark.parametrize(("tp_size", "kv_heads"), [(2, 2), (2, 4), (4, 2), (8, 1)])
def test_shards_of_ranks_are_gathered_and_replicas_dropped(
    tmp_path: Path, make_dump: MakeDump, tp_size: int, kv_heads: int
) -> None:
    plain = DumpReader(make_dump(tmp_path / "plain", q_heads=8, kv_heads=kv_heads))
    sharded = DumpReader(make_dump(tmp_path / "tp", q_heads=8, kv_heads=kv_heads, tp_size=tp_size))
    for chunk in plain.chunks:
        expected, gathered = plain.load(1, chunk), sharded.load(1, chunk)
        assert torch.equal(expected.q, gathered.q)
        assert torch.equal(expected.k, gathered.k)
        assert torch.equal(expected.v, gathered.v)
        assert expected.seq_lens == gathered.seq_lens
    assert len(list((tmp_path / "tp/layer_0/k").iterdir())) == len(plain.chunks) * min(tp_size, kv_heads)


def test_manifest_round_trip(tmp_path: Path, make_dump: MakeDump) -> None:
    written = manifest(model_hash="abc", tokens=7, tp_size=2, sm_scale=0.1, dtype="float16")
    written.write(make_dump(tmp_path))
    assert DumpReader(tmp_path).manifest == written


def test_fit_leaves_out_the_warmup_chunk(tmp_path: Path, make_dump: MakeDump) -> None:
    reader = DumpReader(make_dump(tmp_path))
    assert reader.fit_chunks() == [1, 2, 3]
    assert reader.fit_chunks(include_warmup=True) == [0, 1, 2, 3]


def test_only_the_warmup_chunk_is_not_enough(tmp_path: Path, make_dump: MakeDump) -> None:
    reader = DumpReader(make_dump(tmp_path, requests=[[5]]))
    with pytest.raises(DumpError, match="only chunk 0, the warm-up"):
        reader.fit_chunks()


def drop(name: str) -> Callable[[Path], None]:
    def breaking(root: Path) -> None:
        (root / name).unlink()

    return breaking


def drop_folder(name: str) -> Callable[[Path], None]:
    def breaking(root: Path) -> None:
        shutil.rmtree(root / name)

    return breaking


def save(name: str, content: object) -> Callable[[Path], None]:
    def breaking(root: Path) -> None:
        torch.save(content, root / name)

    return breaking


def truncate(root: Path) -> None:
    path = root / "layer_1/v/2.pt"
    path.write_bytes(path.read_bytes()[:1000])


def poison(root: Path) -> None:
    tensor = torch.load(root / "layer_1/k/3.pt", weights_only=True)
    tensor[3, 0, 7] = float("nan")
    torch.save(tensor, root / "layer_1/k/3.pt")


def describe_wrongly(root: Path) -> None:
    manifest(head_dim=64).write(root)


def describe_more_layers(root: Path) -> None:
    manifest(num_layers=3).write(root)


def describe_fewer_layers(root: Path) -> None:
    manifest(num_layers=1).write(root)


def write_text(name: str, text: str) -> Callable[[Path], None]:
    def breaking(root: Path) -> None:
        (root / name).write_text(text)

    return breaking


BROKEN = {
    "missing q": (drop("layer_1/q/2.pt"), "layer_1/q/2.pt", "missing"),
    "missing k": (drop("layer_0/k/3.pt"), "layer_0/k/3.pt", "missing"),
    "missing v": (drop("layer_1/v/1.pt"), "layer_1/v/1.pt", "missing"),
    "missing seq_lens": (drop("layer_0/seq_lens/0.pt"), "layer_0/seq_lens/0.pt", "missing"),
    "missing folder": (drop_folder("layer_1/k"), "layer_1/k", "missing"),
    "layer gap": (drop_folder("layer_0"), "layer_0", "gap"),
    "truncated": (truncate, "layer_1/v/2.pt", "truncated"),
    "not a tensor": (save("layer_0/q/1.pt", {"q": 1}), "layer_0/q/1.pt", "holds a dict"),
    "fewer tokens": (save("layer_0/k/1.pt", torch.zeros(79, 2, 32)), "layer_0/k/1.pt", "79 tokens"),
    "two dimensions": (save("layer_0/q/1.pt", torch.zeros(80, 128)), "layer_0/q/1.pt", "[80, 128]"),
    "integers": (save("layer_0/q/1.pt", torch.zeros(80, 4, 32).int()), "layer_0/q/1.pt", "int32"),
    "other v heads": (save("layer_0/v/1.pt", torch.zeros(80, 1, 32)), "layer_0/v/1.pt", "[80, 1, 32]"),
    "heads do not divide": (save("layer_0/q/1.pt", torch.zeros(80, 3, 32)), "layer_0/q/1.pt", "[80, 3, 32]"),
    "other q heads": (save("layer_1/q/1.pt", torch.zeros(80, 8, 32)), "layer_1/q/1.pt", "(8, 2, 32, 32)"),
    "not finite": (poison, "layer_1/k/3.pt", "NaN"),
    "wrong sum": (save("layer_0/seq_lens/1.pt", torch.tensor([30, 51])), "layer_0/seq_lens/1.pt", "sum to 81"),
    "zero length": (save("layer_0/seq_lens/1.pt", torch.tensor([80, 0])), "layer_0/seq_lens/1.pt", "at least 1"),
    "float lengths": (save("layer_0/seq_lens/1.pt", torch.tensor([80.0])), "layer_0/seq_lens/1.pt", "float32"),
    "stray file": (save("layer_0/q/last.pt", torch.zeros(1)), "layer_0/q/last.pt", "unexpected name"),
    "one shard": (save("layer_0/q/1.tp0of1.pt", torch.zeros(1)), "layer_0/q/1.tp0of1.pt", "unexpected name"),
    "shard beyond": (save("layer_0/q/4.tp2of2.pt", torch.zeros(1)), "layer_0/q/4.tp2of2.pt", "unexpected name"),
    "padded number": (save("layer_0/q/01.pt", torch.zeros(1)), "layer_0/q/01.pt", "unexpected name"),
    "two forms": (save("layer_0/q/1.tp0of2.pt", torch.zeros(1)), "layer_0/q/1.tp0of2.pt", "two sharded forms"),
    "manifest text": (write_text(MANIFEST_NAME, "{"), MANIFEST_NAME, "not a dump manifest"),
    "manifest key": (write_text(MANIFEST_NAME, '{"num_layers": 0}'), MANIFEST_NAME, "num_layers"),
    "manifest heads": (describe_wrongly, "layer_0/q/0.pt", "manifest.json says (4, 2, 64, 64)"),
    "manifest layers": (describe_more_layers, "layer_2", "missing"),
    "more layers": (describe_fewer_layers, "layer_1", "unexpected"),
    "interrupted": (lambda root: manifest(complete=False).write(root), MANIFEST_NAME, "interrupted"),
    "newer version": (lambda root: manifest(format_version=2).write(root), MANIFEST_NAME, "reads 1"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_dump_is_refused_by_name(tmp_path: Path, make_dump: MakeDump, kind: str) -> None:
    breaking, file, fault = BROKEN[kind]
    breaking(make_dump(tmp_path))
    message = refused(tmp_path)
    assert str(tmp_path / file) in message
    assert fault in message


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "no layer_<id> folder" in refused(tmp_path)


@pytest.mark.parametrize("name", ["q/2.tp1of2.pt", "k/2.tp0of2.pt"])
def test_missing_shard_is_refused_by_name(tmp_path: Path, make_dump: MakeDump, name: str) -> None:
    root = make_dump(tmp_path, tp_size=2)
    (root / "layer_1" / name).unlink()
    message = refused(root)
    assert str(root / "layer_1" / name) in message
    assert "missing shard" in message


def test_whole_chunks_of_an_interrupted_dump_can_be_used(tmp_path: Path, make_dump: MakeDump) -> None:
    root = make_dump(tmp_path, tp_size=2)
    manifest(complete=False).write(root)
    (root / "layer_1/q/3.tp1of2.pt").unlink()
    (root / "layer_0/v/2.tp0of2.pt").unlink()
    assert DumpReader(root, allow_incomplete=True).chunks == [0, 1]


def test_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dying(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dying)
    x = torch.zeros(3, 1, 8)
    with pytest.raises(KeyboardInterrupt):
        DumpWriter(tmp_path, total_kv_heads=1).write(0, 0, x, x, x, [3])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("q", "k", "lengths", "fault"),
    [
        ((6, 4, 32), (6, 64), [6], "tokens, heads, head_dim"),
        ((6, 4, 32), (5, 2, 32), [6], "do not fit"),
        ((6, 3, 32), (6, 2, 32), [6], "do not fit"),
        ((6, 4, 32), (6, 1, 32), [6], "should hold 2 kv heads"),
        ((6, 4, 32), (6, 2, 32), [2, 3], "do not add up to 6"),
        ((6, 4, 32), (6, 2, 32), [6, 0], "do not add up to 6"),
    ],
)
def test_writer_refuses_what_does_not_fit(
    tmp_path: Path, q: tuple[int, ...], k: tuple[int, ...], lengths: list[int], fault: str
) -> None:
    with pytest.raises(DumpError, match=fault):
        DumpWriter(tmp_path, total_kv_heads=2).write(0, 0, torch.zeros(q), torch.zeros(k), torch.zeros(k), lengths)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rank", "size", "heads"), [(2, 2, 4), (0, 3, 4), (0, 1, 0)])
def test_writer_refuses_impossible_ranks(tmp_path: Path, rank: int, size: int, heads: int) -> None:
    with pytest.raises(ValueError, match=str(heads)):
        DumpWriter(tmp_path, total_kv_heads=heads, tp_rank=rank, tp_size=size)
