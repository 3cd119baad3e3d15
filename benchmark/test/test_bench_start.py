"""The first start of a server: stages read off a log as it grows, kernels counted where they are kept."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "serving"))

from bench_start import STAGES, at_home, forget_rotations, plugin_bytes, watched, written

from oscar_tools.calibration.self_calibration import FACTS
from oscar_tools.local_server import READY


def wait_for(stage: str, seen: dict[str, float]) -> None:
    """Wait until a stage is seen."""
    deadline = time.monotonic() + 600
    while stage not in seen and time.monotonic() < deadline:
        time.sleep(0.01)


def test_stages_of_a_growing_log(tmp_path: Path) -> None:
    """A line counts when it is whole, the last of several counts, and what never comes has no time."""
    log = tmp_path / "log"
    log.write_text(f"{READY}\n")  # of an earlier server
    begin = time.monotonic()
    with watched(log, begin) as seen, log.open("w", buffering=1) as file:
        assert not seen
        file.write("int2 calibration: recording: 1 of 32 prompts\nint2 calibration: recording: 32 of 32 prompts\n")
        wait_for("recorded", seen)
        file.write("Load weight begin. avail mem=1\nLoad weight end. elap")
        wait_for("imported", seen)
        assert "weights" not in seen
        file.write("sed=1\nCapture decode CUDA graph begin.\nCapture decode CUDA graph end. 1 s\n")
        wait_for("graphs", seen)
        file.write(f"Capture prefill CUDA graph end. 1 s\n{READY}")
    assert set(STAGES) - set(seen) == {"recording", "calibrated", "pools"}
    assert seen["recorded"] < seen["imported"] < seen["weights"] < seen["graphs"] <= seen["ready"]
    assert seen["ready"] <= time.monotonic() - begin


def test_megabytes_by_folder(tmp_path: Path) -> None:
    files = {".cache/a/b/c": 3_000_000, ".cache/a/d": 1_000_000, ".cache/e": 5_000, ".f/g/h": 2_000_000}
    for name, size in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / ".f" / "link").symlink_to(tmp_path / ".cache" / "e")
    assert written(tmp_path) == {".cache": 0.005, ".cache/a": 4.0, ".f": 2.0}


def test_kernels_stay_where_rotations_are_forgotten(tmp_path: Path) -> None:
    made = tmp_path / ".cache" / "sglang-oscar" / "key"
    made.mkdir(parents=True)
    kernel = made.with_name("kernel.cubin")
    for path in (made / FACTS, made / "k.safetensors", kernel):
        path.write_bytes(b"x")
    assert forget_rotations(tmp_path)
    assert kernel.exists()
    assert not made.exists()
    assert not forget_rotations(tmp_path)


def test_caches_move_with_the_home_folder() -> None:
    env = at_home({"TRITON_CACHE_DIR": "/elsewhere", "HOME": "/root", "OTHER": "1"}, Path("/home/new"))
    assert env["OTHER"] == "1"
    assert "/elsewhere" not in env.values()
    assert all(env[name].startswith("/home/new") for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"))


def test_what_the_plugin_adds() -> None:
    added = plugin_bytes()
    assert added["files"] > 50
    assert 100_000 < added["compressed_bytes"] < added["bytes"] < 5_000_000
