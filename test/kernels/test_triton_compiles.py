"""All Triton kernels compile for every kind of supported GPU by Triton's assembler, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
_broken_rows_kernel _fill_decode_tables _finite_kernel _merge_states_kernel _prefix_kernel _rotate_kernel _sinks_kernel
_store_kernel decode_kernel extend_kernel merge_kernel
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled: kernels that know nothing of bits are compiled once for a kind of GPU."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "sides", "head_dim"),
    [(90, ("2:codebook", 2), 128), (80, (3, 4), 128), (100, (2, 2), 192), (89, (16, "2:symmetric"), 256)],
    ids=str,
)  # fmt: skip
def test_kernels_compile(capability: int, sides: tuple[int | str, int | str], head_dim: int, cache: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        str(Path(__file__).with_name("compile_triton.py")),
        str(capability),
        *map(str, (*sides, head_dim)),
    ]
    done = subprocess.run(
        command,
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == KERNELS.split()
