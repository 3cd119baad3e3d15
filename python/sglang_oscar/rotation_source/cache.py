"""The user's cache of calibrations: a folder for each, by what the weights hold and by what it was fitted for."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oscar_kernels.layout import AFFINE
from oscar_rotation.defaults import BITS, RECIPE
from oscar_rotation.fit.bit_goal import BitGoal, coding_at
from oscar_rotation.math.rope import rope_of
from oscar_rotation.recipes import FITTED
from sglang_oscar.errors import Int2Error
from sglang_oscar.formats.content import attention_digest
from sglang_oscar.formats.geometry import row_layouts
from sglang_oscar.formats.model_identity import model_identity
from sglang_oscar.formats.origin import sample_digest, weight_files
from sglang_oscar.rotation_source.places import Pair, pair_in
from sglang_oscar.settings import Settings

VERSION = 1
"""Of what a calibration is: to be raised where text or fit change so much that old results should not be served."""
VARIABLE = "SGLANG_OSCAR_CACHE"
KINDS = (".new", ".old")
"""Suffixes of folders that take the place of others, and of those."""


@dataclass(frozen=True)
class Calibration:
    """What a calibration is for; servers with the same take one another's.

    Attributes:
        weights: digest of what the weights hold.
        model: hash of the configuration.
        rope: how keys turn by their position, under the server's overrides; None where that is not known.
        context: positions.
        group_size: channels.
        bits: as ``oscar fit --bits`` takes them.
        key_coding, value_coding: of :class:`oscar_rotation.fit.options.FitOptions`.
        recipe: name.
        version: :data:`VERSION`.
    """

    weights: str
    model: str
    rope: dict[str, Any] | None
    context: int
    group_size: int
    bits: str = BITS
    key_coding: str = AFFINE
    value_coding: str = AFFINE
    recipe: str = RECIPE
    version: int = VERSION

    @classmethod
    def of(cls, args: Any, settings: Settings, model: Any, folder: Path) -> Calibration:
        """What a server needs.

        Args:
            args: server arguments.
            settings: of int2 mode.
            model: SGLang's ModelConfig.
            folder: with the weights, or the one file of them.

        Raises:
            Int2Error: there are no weights in the folder, the group size does not fit the model, or codings fit neither
                bits nor recipe.
        """
        layouts = row_layouts(args, settings, model, model.get_total_num_kv_heads())
        return cls(
            weights=_weights(folder),
            model=model_identity(args.model_path, model).model_hash,
            rope=rope_of(model.hf_text_config.to_dict(), model.head_dim),
            context=model.context_len,
            # A fit takes the largest that divides the heads of a side.
            group_size=max(layout.group_size for layout in layouts),
            bits=bits_of(settings),
            **_codings(settings),  # type: ignore[arg-type]
            recipe=settings.recipe or RECIPE,
        )

    @property
    def key(self) -> str:
        """Name of its folder, in hex; affine codes are left out, as they were before there were others."""
        facts = {name: value for name, value in asdict(self).items() if value != AFFINE}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def bits_of(settings: Settings) -> str:
    """Bits to fit for: the default, or what the variables for keys and values say."""
    if settings.k_bits is None and settings.v_bits is None:
        return BITS
    usual = BitGoal.parse(BITS)
    return f"k{settings.k_bits or usual.key}v{settings.v_bits or usual.value}"


def _codings(settings: Settings) -> dict[str, str]:
    """Codings to fit for, by their fields.

    Raises:
        Int2Error: they do not fit the bits or the recipe.
    """
    goal, recipe = BitGoal.parse(bits_of(settings)), settings.recipe or RECIPE
    asked = {"key_coding": settings.k_coding, "value_coding": settings.v_coding}
    for side, (name, coding), bits in zip("KV", asked.items(), (goal.key, goal.value), strict=True):
        variable = f"SGLANG_OSCAR_{side}_CODING={coding}"
        if coding in (None, AFFINE):
            continue
        if name not in FITTED[recipe].options:
            raise Int2Error(f"{variable} has no meaning for the recipe {recipe}; unset it or SGLANG_OSCAR_RECIPE")
        if coding_at(str(coding), bits or 2) != coding:
            raise Int2Error(f"{variable} is not of codes of {bits} bits; set SGLANG_OSCAR_{side}_BITS=2")
    return {name: coding or AFFINE for name, coding in asked.items()}


def _weights(folder: Path) -> str:
    """Digest of what a checkpoint's weights hold: of attention, or of all of a format that names no tensors.

    Raises:
        Int2Error: there are none.
    """
    if digest := attention_digest(str(folder)):
        return digest
    if not (files := weight_files(folder)):
        raise Int2Error(
            f"{folder}: holds no files of weights, which a calibration is kept by; calibrate a copy that does with "
            "`oscar calibrate --out FOLDER` and set SGLANG_OSCAR_ROTATIONS to it"
        )
    return hashlib.sha256("".join(sorted(map(sample_digest, files))).encode()).hexdigest()


def root(settings: Settings) -> Path:
    """The folder of all calibrations.

    Raises:
        Int2Error: this user has no home, and no variable names a folder.
    """
    if settings.cache is not None:
        return Path(settings.cache)
    home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if home.startswith("~"):
        raise Int2Error(f"this user has no home folder to keep rotations in; set {VARIABLE} to a folder")
    return Path(home) / "sglang-oscar"


def kept(folder: Path) -> Pair | None:
    """Rotation files of a calibration; None where there is none.

    Raises:
        Int2Error: the folder holds something else.
    """
    if not os.path.isdir(folder):  # also where it may not be looked at
        return None
    return pair_in(folder, "{}; remove this folder of the cache")


def writable(folder: Path) -> None:
    """Make a folder and see that it can be written to.

    Raises:
        Int2Error: it cannot; says what to set.
    """
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Int2Error(
            f"rotations that are calibrated need a place to stay, and {folder} cannot be written "
            f"({error.strerror or error}); set {VARIABLE} to a folder that can"
        ) from None


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder that takes the place of another, with all that was put into it, unless an error is raised.

    What a process left that was killed meanwhile is removed.

    Args:
        folder: appears as a whole, or stays as it was; nobody else fills it.

    Yields:
        an empty folder.

    Raises:
        OSError: it cannot be made.
    """
    for rest in folder.parent.glob(f".*{glob.escape(folder.name)}.*"):
        if rest.suffix in KINDS:
            shutil.rmtree(rest, ignore_errors=True)
    new, old = (folder.parent / f".{folder.name}.{uuid.uuid4().hex}{kind}" for kind in KINDS)
    new.mkdir(parents=True)
    try:
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        for rest in (new, old):
            shutil.rmtree(rest, ignore_errors=True)


@contextmanager
def alone(folder: Path, seconds: float, waiting: Callable[[str], None]) -> Iterator[None]:
    """While inside, no other process of any machine that shares the cache fills this folder.

    Args:
        folder: in the cache.
        seconds: to wait at most.
        waiting: told once that somebody else is at it.

    Raises:
        Int2Error: somebody else still is.
        OSError: the lock cannot be made.
    """
    until = time.monotonic() + seconds
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waiting(f"another server calibrates the same model; waiting for {folder}")
                    told = True
                if time.monotonic() > until:
                    raise Int2Error(
                        f"another server has been calibrating the same model for {seconds:.0f} s ({folder}); start "
                        "again when it is done, or raise SGLANG_OSCAR_CALIBRATE_SECONDS"
                    ) from None
                time.sleep(0.2)
        yield
