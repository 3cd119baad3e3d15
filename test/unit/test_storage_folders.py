"""Folders of storage that others may write to."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_oscar.errors import Int2Error
from sglang_oscar.features.tiers import folders
from sglang_oscar.features.tiers.arguments import REFUSED
from sglang_oscar.features.tiers.folders import VARIABLE, check_folder, folders_of
from support.stored_pages import backend


def test_a_folder_of_ones_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode in (0o700, 0o755, 0o775):
        tmp_path.chmod(mode)
        check_folder(str(tmp_path))
    check_folder(str(tmp_path / "of another rank, which has not made it yet"))
    assert not caplog.records


def test_a_folder_that_all_may_write_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        check_folder(str(tmp_path))
    assert ["`chmod o-w` it" in record.getMessage() for record in caplog.records] == [True, True]


@pytest.mark.parametrize(("owner", "me", "refused"), [(7, 8, True), (7, 0, True), (0, 8, False), (8, 8, False)])
def test_a_folder_of_another_user(
    owner: int, me: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start of a server, and where storage is attached to one that runs; root's is taken."""
    told = SimpleNamespace(st_uid=owner, st_mode=0o755)
    # Not those of everybody: pytest asks for files, too.
    system = SimpleNamespace(geteuid=lambda: me, stat=lambda path: told, environ=os.environ, path=os.path)
    monkeypatch.setattr(folders, "os", system)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    args = SimpleNamespace(
        enable_hierarchical_cache=True, hicache_storage_backend="file", hicache_mem_layout="page_first",
        hicache_io_backend="kernel", hicache_storage_backend_extra_config=None, speculative_algorithm=None,
        enable_lora=None, lora_paths=None, remote_instance_weight_loader_start_seed_via_transfer_engine=False,
    )  # fmt: skip
    at_start = [what for check, what in REFUSED if check(args)]
    if refused:
        with pytest.raises(Int2Error, match=r"another user.*give storage a folder of your own"):
            check_folder(str(tmp_path))
        assert len(at_start) == 1
        assert at_start[0].endswith(f"set {VARIABLE} to a folder of your own")
    else:
        check_folder(str(tmp_path))
        assert at_start == []


def test_whose_folders_are_known(tmp_path: Path) -> None:
    assert folders_of(backend(tmp_path)) == [str(tmp_path)]
    assert folders_of(SimpleNamespace(file_manager=SimpleNamespace(base_dirs=["a", "b"]))) == ["a", "b"]
    assert folders_of(SimpleNamespace()) == []
