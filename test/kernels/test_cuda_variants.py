"""Variants of the Hopper decode kernel: they compile without a GPU, are kept, and say what they cannot do."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import (
    Shape,
)
from kernel_cases import (
    empty_cache as empty_layer_cache,
)
from test_cuda_decode import BF16, FP32, MATRIX, QWEN3, SHAPES

from oscar_kernels.cache import LayerCache
from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.cuda import jit, pair, together
from oscar_kernels.cuda import store as cuda_store
from oscar_kernels.cuda.decode import unsupported
from oscar_kernels.cuda.variant import MAX_BATCH, Variant
from oscar_kernels.errors import KernelError
from oscar_kernels.layout import RowLayout
from oscar_kernels.prepared import prepare


def variant(shape: Shape) -> Variant:
    return Variant(
        shape.key_layout, shape.value_layout, shape.windows, shape.gqa, shape.page_size, shape.dtype, shape.dtype
    )


def test_variants_are_compiled_from_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, then loaded."""
    shape = Shape(kv_heads=2, gqa=8, head_dim=256, group=128, page_size=64, k_bits=3)
    cache, seen = empty_layer_cache(shape, 1, 64, torch.device("cpu")), []
    variants = [cuda_decode.variant_of(cache, 64, 16, BF16, drafts=tokens) for tokens in (0, 4)]
    monkeypatch.setattr(cuda_decode, "compile_together", seen.extend)
    monkeypatch.setattr(cuda_decode, "load", lambda *args: seen.append(args))
    cuda_decode.build(variants)
    names = ("decode.cu", "oscar_decode"), ("verify.cu", "oscar_verify")
    compiled = [(name, one.defines()) for (name, _), one in zip(names, variants, strict=True)]
    loaded = [(*of, one.defines(), one.shared_bytes) for of, one in zip(names, variants, strict=True)]
    assert seen == [*compiled, *loaded]


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What is kept and how does not depend on what is compiled: a kernel in place of ``decode.cu``, and its macros."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "decode.cu").write_text("__global__ void kernel(int* x) { *x = OSCAR_SINK; }\n")
    monkeypatch.setattr(jit, "SOURCES", tmp_path / "src")
    return {"OSCAR_SINK": 64}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-oscar"


@pytest.mark.parametrize(
    "shape",
    [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in (MATRIX[0], MATRIX[17], *QWEN3))],
    ids=str,
)
def test_variants_compile(shape: Shape, empty_cache: Path) -> None:
    """Also checks that the host launches with the shared memory that the kernel expects: the source asserts it."""
    if variant(shape).unsupported():
        pytest.fail(f"{shape}: {variant(shape).unsupported()}")
    for lse in (False, True) if shape == SHAPES[0] else (True,):
        defines = dict(replace(variant(shape), lse=lse).defines())
        assert jit.compile_source("decode.cu", defines)[:4] == b"\x7fELF"


def test_two_parts_compile(empty_cache: Path) -> None:
    """Kept apart from other pairs: the text says for which parts it is."""
    first, second = variant(replace(SHAPES[0], k_bits=3)), variant(SHAPES[0])
    codes = {jit.compile_source(pair.SOURCE, {}, pair.source(*of)) for of in ((first, second), (second, first))}
    assert all(code[:4] == b"\x7fELF" for code in codes)
    assert len(codes) == len(list(empty_cache.iterdir())) == 2


def test_compiled_code_is_kept(empty_cache: Path, small_source: dict[str, int]) -> None:
    defines = small_source
    first = jit.compile_source("decode.cu", defines)
    (file,) = empty_cache.iterdir()
    assert file.read_bytes() == first
    file.write_bytes(b"from the cache")
    assert jit.compile_source("decode.cu", defines) == b"from the cache"
    assert jit.compile_source("decode.cu", {**defines, "OSCAR_SINK": 8})[:4] == b"\x7fELF"


def test_kept_code_may_be_read_by_whom_the_umask_allows(empty_cache: Path, small_source: dict[str, int]) -> None:
    before = os.umask(0o027)
    try:
        jit.compile_source("decode.cu", small_source)
    finally:
        os.umask(before)
    (file,) = empty_cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_cache_that_cannot_be_used_is_no_cache(
    empty_cache: Path, small_source: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept file that cannot be read, a folder that cannot be made, no home directory."""
    defines = small_source
    code = jit.compile_source("decode.cu", defines)
    (file,) = empty_cache.iterdir()
    file.unlink()
    file.mkdir()
    assert jit.compile_source("decode.cu", defines) == code
    assert list(empty_cache.iterdir()) == [file]
    (empty_cache.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache.parent / "file"))
    assert jit.compile_source("decode.cu", defines) == code

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(jit.Path, "home", no_home)
    assert jit.cache_dir() is None
    assert jit.compile_source("decode.cu", defines) == code


def test_a_source_that_does_not_compile_is_one_line(empty_cache: Path) -> None:
    with pytest.raises(KernelError, match=r"^decode\.cu does not compile: .*OSCAR_KV_HEADS.*$") as caught:
        jit.compile_source("decode.cu", {})
    assert "\n" not in str(caught.value)
    assert len(caught.value.log.splitlines()) > 1


@pytest.mark.parametrize("error", [ImportError("No module named 'cuda'"), RuntimeError("no libnvrtc\nlooked in ...")])
def test_a_missing_compiler_is_one_line(error: Exception, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise error

    monkeypatch.setattr(jit.importlib, "import_module", missing)
    with pytest.raises(KernelError, match=r"^cuda\.bindings\.nvrtc cannot be used \([Nn]o .*\); install .*$") as caught:
        jit.compile_source("decode.cu", {})
    assert "\n" not in str(caught.value)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LayerCache:
    """A cache that says it is on a GPU of compute capability 9.0, in a clean environment."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in [name for name in os.environ if name.startswith("CUDA_MPS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(cuda_decode, "DEFAULT_MPS_PIPES", tmp_path)
    cache = empty_layer_cache(SHAPES[0], 1, 1, torch.device("cpu"))
    rows = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    return replace(cache, k_rows=rows)  # type: ignore[arg-type]


def test_as_many_requests_as_fit_the_plan(on_hopper: LayerCache) -> None:
    assert unsupported(on_hopper, 64, 32, BF16, MAX_BATCH) is None
    assert "1024 requests at a time, not 1025" in (unsupported(on_hopper, 64, 32, BF16, MAX_BATCH + 1) or "")


def test_sides_left_exact_are_not_read(on_hopper: LayerCache) -> None:
    """Neither kernel is compiled for such a layer."""
    exact = replace(on_hopper, v_layout=replace(on_hopper.v_layout, bits=16))
    assert unsupported(exact, 64, 32, BF16) == "the CUDA kernel does not support keys or values of 16 bits"
    assert unsupported(exact, 64, 32, BF16, drafts=4) is not None
    shape = replace(SHAPES[0], v_bits=16)
    with pytest.raises(ValueError, match="CUDA store kernel does not support keys or values of 16 bits"):
        cuda_store.prepare(variant(shape), prepare(shape.format(), BF16))


def test_multiprocessors_are_not_shared(on_hopper: LayerCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks wait for each other: beside another process's blocks they might do so for ever."""
    (tmp_path / "control").touch()
    assert "Multi-Process Service" in (unsupported(on_hopper, 64, 32, BF16) or "")
    (tmp_path / "control").unlink()
    assert unsupported(on_hopper, 64, 32, BF16) is None
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    assert "(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set)" in (unsupported(on_hopper, 64, 32, BF16) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gqa": 17}, "query heads"),
        ({"key": RowLayout(8, 128, 128, bits=16)}, "keys or values of 16 bits"),
        ({"value": RowLayout(8, 128, 128, bits=16)}, "keys or values of 16 bits"),
        ({"key": RowLayout(8, 128, 128, coding="codebook")}, "codebooks of 8 kv heads of 128"),
        ({"key": RowLayout(8, 128, 128, torch.float16)}, "scales of different dtypes"),
        ({"key": RowLayout(17, 128, 128), "value": RowLayout(17, 128, 128)}, "kv heads"),
        ({"page_size": 16}, "page size 16"),
        ({"window_dtype": FP32}, "windows of"),
    ],
)
def test_unsupported_variants_say_why(change: dict[str, object], reason: str) -> None:
    base = variant(SHAPES[0])
    assert base.unsupported() is None
    assert reason in (replace(base, **change).unsupported() or "")


def test_scales_of_two_dtypes_are_not_stored() -> None:
    mixed = replace(variant(SHAPES[0]), key=RowLayout(8, 128, 128, torch.float16))
    with pytest.raises(ValueError, match="scales of different dtypes"):
        cuda_store._load(mixed, ())


def test_several_are_compiled_in_processes(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And found where they are loaded; one that does not compile is left to that, with a warning."""
    shapes = [SHAPES[0], replace(SHAPES[0], v_bits=4)]
    jobs = [("decode.cu", variant(shape).defines()) for shape in shapes]
    wrong = ("decode.cu", (*jobs[0][1], ("OSCAR_SINK", 1 << 20)))
    together.compile_together([*jobs, jobs[0]])
    assert len([*empty_cache.iterdir()]) == len(jobs)
    bindings = jit._bindings("nvrtc")
    with monkeypatch.context() as without_compiler:
        without_compiler.setattr(bindings, "nvrtcCreateProgram", None)
        for name, defines in jobs:
            assert jit.compile_source(name, dict(defines))[:4] == b"\x7fELF"
    with monkeypatch.context() as without_python:
        without_python.setattr(sys, "executable", "/bin/false")
        together.compile_together(jobs)
    assert not caplog.messages
    together.compile_together([*jobs, wrong, ("decode.cu", (("OSCAR_SINK", 1),))])
    (said,) = caplog.messages
    assert said.startswith("2 of 2 CUDA kernels were not compiled at once")
    assert "decode.cu does not compile" in said


def test_a_process_ends_with_the_server(empty_cache: Path) -> None:
    """However that ends; here it waits to be told what the cache has."""
    place = jit._place("decode.cu", {})
    assert place is not None
    place.parent.mkdir()
    os.mkfifo(place)
    program = "from oscar_kernels.cuda import together; together._compile_apart(('decode.cu', ()))"
    server = subprocess.Popen([sys.executable, "-c", program])
    told = os.open(place, os.O_WRONLY)  # returns once the process reads
    server.kill()
    server.wait()
    ended = select.poll()
    ended.register(told, 0)
    assert ended.poll(300_000), "the process goes on"
    os.close(told)
