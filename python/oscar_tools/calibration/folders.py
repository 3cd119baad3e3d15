"""Where the drivers put things: ``<root>/<model>/<DATASET>/seq<T>_prompt<N>_group<G>/``."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oscar_rotation.dump.covariances import is_covariance_dump
from oscar_rotation.dump.manifest import DumpManifest
from oscar_rotation.errors import DumpError, DumpVersionError
from oscar_rotation.recipes import PUBLISHED


@dataclass(frozen=True)
class CalibrationFolder:
    """One calibration: ``qkv_dumps`` and ``rotations`` lie in it, and evaluations of these rotations.

    Attributes:
        path: of the folder.
        given: a dump by another name, or from elsewhere, in place of ``qkv_dumps``.
    """

    path: Path
    given: Path | None = None

    @classmethod
    def of_dump(cls, dump: Path) -> CalibrationFolder:
        """The folder that a dump lies in, whatever the dump's name; its rotations are put beside the dump."""
        dump = dump.resolve()
        return cls(dump.parent, dump)

    @classmethod
    def of(cls, root: Path, model: str, dataset: str, tokens: int, prompts: int, group: int) -> CalibrationFolder:
        """The folder of a calibration by its parts."""
        return cls(root / model / dataset / f"seq{tokens}_prompt{prompts}_group{group}")

    @property
    def dump(self) -> Path:
        """Activations or covariances."""
        return self.given or self.path / "qkv_dumps"

    def rotations(self, recipe: str = PUBLISHED) -> Path:
        """Rotation files of a recipe; those of the published one lie where the public release puts them."""
        return self.path / ("rotations" if recipe == PUBLISHED else f"rotations_{recipe}")


@contextmanager
def held(lock: Path, refusal: Exception) -> Iterator[None]:
    """While inside, no other process holds the lock, which ends with the process.

    Args:
        lock: a file, made where it is missing.
        refusal: raised where another process holds it.

    Raises:
        OSError: the file cannot be made.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal from None
        yield


def dump_state(folder: Path) -> str:
    """ "complete", "interrupted" or "none".

    Raises:
        DumpVersionError: the dump is of another release, which knows what it is.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return "none"
    try:
        manifest = DumpManifest.read(folder)
    except DumpVersionError:
        raise
    except DumpError:
        return "interrupted"
    if manifest is None:
        # A dump in the public layout states nothing; the reader checks its files.
        return "complete" if (folder / "layer_0").is_dir() or is_covariance_dump(folder) else "interrupted"
    return "complete" if manifest.complete else "interrupted"


def latest_calibration(root: Path, model: str, dataset: str, tokens: int | None, group: int) -> CalibrationFolder:
    """The calibration with the newest complete dump.

    Raises:
        DumpError: there is none.
    """
    pattern = f"seq{tokens if tokens is not None else '*'}_prompt*_group{group}"
    found = [CalibrationFolder(path) for path in (root / model / dataset).glob(pattern)]
    complete = [folder for folder in found if dump_state(folder.dump) == "complete"]
    if not complete:
        place = root / model / dataset / pattern
        raise DumpError(f"{place}/qkv_dumps: no complete dump; make one with `oscar dump`")
    return max(complete, key=lambda folder: folder.dump.stat().st_mtime)
