"""Files that several processes write at the same time appear whole."""

from __future__ import annotations

from pathlib import Path

from oscar_rotation.atomic import write_atomically, write_text_atomically


def test_writers_of_one_number_do_not_meet(tmp_path: Path) -> None:
    """As in two containers on one volume, whose processes have the same number: the last one's file stands."""
    path = tmp_path / "file"

    def slowly(temporary: Path) -> None:
        temporary.write_text("slow")
        write_text_atomically(path, "quick")
        assert path.read_text() == "quick"

    write_atomically(path, slowly)
    assert path.read_text() == "slow"
    assert list(tmp_path.iterdir()) == [path]
