"""Pages in storage other than files (``--hicache-storage-backend nixl``, ``mooncake``, ``hf3fs``): each keeps halves of
pages in a way of its own, and gives them back whole.

hf3fs is SGLang's own stand-in for the file system. nixl and Mooncake are installed by scripts/test_disaggregation.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from test_storage_tier import DRIFT, GROUP, NEAR_TIE, STORED, ask, model, prompts, server_on  # noqa: F401

from oscar_tools.local_server import free_port
from support.api import from_storage, wait_for
from support.compare import assert_same
from support.disaggregated import ENVIRONMENT, MISSING
from support.releases import needs_newer_python, served
from support.servers import Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(torch.cuda.is_available(), reason="sources are served without compiled extensions"),
]


@dataclass
class Storage:
    """How a server is told of a storage, the files in which it has its pages, if it has any, and what befalls them."""

    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    files: Path | None = None
    harms: tuple[Callable[[Path], None], ...] = ()


def flip(path: Path) -> None:
    """Change a byte of every half of a page."""
    content = bytearray(path.read_bytes())
    for begin in range(0, len(content), 4096):
        content[begin + 500] ^= any(content[begin : begin + 4096])
    path.write_bytes(content)


def cut(path: Path) -> None:
    """Leave too little."""
    os.truncate(path, 100)


@contextmanager
def hf3fs(folder: Path) -> Iterator[Storage]:
    """By one job: the stand-in seeks and then reads, and two of its jobs may do so in one file at once."""
    files = folder / "files"
    files.mkdir()
    config = {"file_path_prefix": str(files / "pages"), "file_size": 1 << 23, "numjobs": 1, "entries": 8}
    (folder / "hf3fs.json").write_text(json.dumps(config))
    args = ["--hicache-storage-backend-extra-config", json.dumps({"use_mock_hf3fs_client": True})]
    yield Storage(args, {"SGLANG_HICACHE_HF3FS_CONFIG_PATH": str(folder / "hf3fs.json")}, files, (flip,))


@contextmanager
def nixl(folder: Path) -> Iterator[Storage]:
    files, name = folder / "files", "SGLANG_HICACHE_NIXL_BACKEND"
    yield Storage([], {f"{name}_STORAGE_DIR": str(files), f"{name}_PLUGIN": "POSIX"}, files, (flip, cut))


@contextmanager
def mooncake(folder: Path) -> Iterator[Storage]:
    """Its master runs beside the server, which keeps the pages in memory of its own and asks for them over TCP."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("mooncake_master")), "--port", str(port)]
    command += ["--metrics_port", str(free_port())]
    with (folder / "master.log").open("w") as log:
        master = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: "service_ready=true" in (folder / "master.log").read_text(), "Mooncake's master")
        yield Storage(
            [],
            {
                "MOONCAKE_MASTER": f"127.0.0.1:{port}",
                "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
                "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
                "MOONCAKE_PROTOCOL": "tcp",
                "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(1 << 28),
            }
            | ENVIRONMENT,
        )
    finally:
        master.kill()
        master.wait()


STORAGES = {"hf3fs": (hf3fs, "page_first"), "nixl": (nixl, "page_first_direct"), "mooncake": (mooncake, "page_first")}
"""How each is made, and the layout of host memory that it is tested with."""


def hits(server: Server, asked: list[list[int]]) -> list[dict]:
    """Answers on pages that all come from storage, once they are all written: not every release can say when."""
    answers: list[dict] = []

    def come_from_storage() -> bool:
        server.flush()
        answers[:] = ask(server, asked)
        return from_storage(answers) == [STORED] * len(asked)

    wait_for(come_from_storage, "pages in storage")
    return answers


@pytest.mark.parametrize("version", served())
@pytest.mark.parametrize("kind", STORAGES)
def test_pages_come_back(kind: str, version: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    """Answers on pages from storage are those on the same rows from the device; damaged pages are computed again."""
    if kind in MISSING.values():
        pytest.skip(f"{kind} is not installed; scripts/test_disaggregation.sh does that")
    if needs_newer_python(version):
        pytest.skip(f"SGLang {version} wants a newer Python")
    asked, (made, layout) = prompts(2), STORAGES[kind]
    with made(tmp_path) as found:
        backend = ["--hicache-storage-backend", kind, "--hicache-mem-layout", layout, *found.args]
        with server_on(tmp_path, model, tmp_path / "log", *GROUP, *backend, version=version, **found.env) as server:
            computed, device = ask(server, asked), ask(server, asked)
            assert from_storage(computed) == from_storage(device) == [0, 0]
            # Sinks that are computed again differ in their last bits.
            assert_same(device, hits(server, asked), NEAR_TIE, DRIFT)
            for harm in found.harms:
                server.flush()
                assert found.files is not None
                for path in filter(Path.is_file, found.files.rglob("*")):
                    harm(path)
                mended = ask(server, asked)
                assert from_storage(mended) == [0, 0]
                assert harm is cut or "is damaged" in server.text()
                for one, other in zip(computed, mended, strict=True):
                    assert one["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]
                hits(server, asked)  # damaged pages have been written anew
