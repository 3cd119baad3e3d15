"""The order in which a server looks for its rotations, and what it says of where they come from.

1. ``SGLANG_OSCAR_K_ROTATION_PATH`` and ``SGLANG_OSCAR_V_ROTATION_PATH``, or ``SGLANG_OSCAR_ROTATIONS`` for both;
2. the folder ``oscar`` in the checkpoint;
3. the user's cache (:mod:`sglang_oscar.rotation_source.cache`);
4. calibration on the spot, into that cache.

All of it happens in the process that launches a server; its workers are told with the server arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oscar_rotation.recipes import BUILT_IN
from sglang_oscar.errors import Int2Error
from sglang_oscar.names import CHOSEN_ROTATIONS
from sglang_oscar.rotation_source import cache, on_the_spot, places
from sglang_oscar.rotation_source.cache import Calibration
from sglang_oscar.rotation_source.task import Task
from sglang_oscar.settings import ON_THE_SPOT, THE_CACHE, Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Rotations of a server.

    Attributes:
        keys, values: paths, or names of built-in recipes.
        origin: where they come from, in words.
    """

    keys: str
    values: str
    origin: str

    def line(self) -> str:
        """For the log."""
        files = self.keys if self.keys == self.values else f"{self.keys}, {self.values}"
        return f"rotations from {self.origin}: {files}"


@dataclass(frozen=True)
class Missing:
    """Rotations that nobody has yet.

    Attributes:
        calibration: what is needed.
        folder: of the cache, where they will be.
    """

    calibration: Calibration
    folder: Path


def of_variables(settings: Settings) -> Source | None:
    """What the environment names; None where it names nothing.

    Raises:
        Int2Error: too much, too little, or what is not there.
    """
    pair = {"SGLANG_OSCAR_K_ROTATION_PATH": settings.k_rotation, "SGLANG_OSCAR_V_ROTATION_PATH": settings.v_rotation}
    given = [name for name, value in pair.items() if value is not None]
    if settings.rotations is None:
        if not given:
            return None
        if missing := [name for name in pair if name not in given]:
            raise Int2Error(
                f"{missing[0]} is not set, {given[0]} is: name both files or built-in recipes ({', '.join(BUILT_IN)}), "
                f"or set {places.VARIABLE} to the folder of both files"
            )
        return Source(str(settings.k_rotation), str(settings.v_rotation), " and ".join(given))
    if given:
        raise Int2Error(f"{places.VARIABLE} and {given[0]} are both set; unset one of them")
    return Source(*places.named(settings.rotations), places.VARIABLE)


def find(args: Any, settings: Settings, model: Any) -> Source | Missing:
    """Where rotations are, without calibrating.

    Args:
        args: server arguments.
        settings: of int2 mode.
        model: SGLang's ModelConfig.

    Raises:
        Int2Error: what is named, or lies beside the weights or in the cache, cannot be used; or nothing is to be had
            and the weights are not either.
    """
    if (found := of_variables(settings)) is not None:
        return found
    checkpoint = places.checkpoint(args)
    if (pair := places.beside_weights(checkpoint)) is not None:
        return Source(*pair, "the checkpoint")
    wanted = Calibration.of(args, settings, model, checkpoint)
    folder = cache.root(settings) / wanted.key
    pair = cache.kept(folder)
    return Missing(wanted, folder) if pair is None else Source(*pair, THE_CACHE)


def refusal(args: Any, settings: Settings, missing: Missing) -> str | None:
    """Why a server does not calibrate on the spot, and what to do; None where it does.

    Args:
        args: server arguments.
        settings: of int2 mode.
        missing: what it would calibrate.
    """
    model, elsewhere = args.model_path, "set SGLANG_OSCAR_ROTATIONS to a folder that it wrote with --out"
    if not settings.calibrate:
        return (
            f"there are no rotations for {model} ({places.VARIABLE} is not set, nothing is in {missing.folder}) and "
            f"SGLANG_OSCAR_CALIBRATE=0 forbids to calibrate; run `oscar calibrate {model}` first, or {elsewhere}"
        )
    if args.nnodes > 1:
        return (
            f"there are no rotations for {model}, and a server of several nodes does not calibrate; run `oscar "
            f"calibrate {model}` on a machine that holds the model, and {elsewhere} and all nodes see"
        )
    return None


def choose(args: Any, settings: Settings, model: Any, flags: Sequence[str]) -> Settings:
    """Find a server's rotations, or calibrate, say so, and note them on the server arguments for its workers.

    Args:
        args: SGLang's ServerArgs; a mark is written to its ``__dict__``.
        settings: of int2 mode.
        model: SGLang's ModelConfig.
        flags: of the server that would record, see :mod:`sglang_oscar.rotation_source.flags`.

    Returns:
        the settings with both rotations.

    Raises:
        Int2Error: as :func:`find`; or there are none and it may not, or could not, calibrate.
    """
    found = find(args, settings, model)
    if isinstance(found, Missing):
        if (reason := refusal(args, settings, found)) is not None:
            raise Int2Error(reason)
        found = calibrated(Task.of(args, model, found.calibration, flags), found.folder, settings)
    logger.info("int2 %s", found.line())
    args.__dict__[CHOSEN_ROTATIONS] = asdict(found)
    return settings.with_rotations(**asdict(found))


def calibrated(task: Task, folder: Path, settings: Settings) -> Source:
    """Calibrate into the cache, once for all who want the same at the same time.

    Args:
        task: what to calibrate.
        folder: of the cache, where rotations will be.
        settings: of int2 mode.

    Raises:
        Int2Error: the cache cannot be written, or the calibration failed; nothing is left of it but a log.
    """
    seconds = settings.calibrate_seconds

    def say(line: str) -> None:
        logger.info("int2 calibration: %s", line)

    cache.writable(folder.parent)
    try:
        with cache.alone(folder, seconds, say):
            if (pair := cache.kept(folder)) is not None:
                return Source(*pair, THE_CACHE)
            say(f"{task.model} has no rotations yet; making them now, once, in {folder}")
            with cache.filling(folder) as new:
                on_the_spot.calibrate(task, new, folder.with_suffix(".log"), seconds, say)
    except OSError as error:
        raise Int2Error(f"{error.filename or folder}: {error.strerror or error}; set {cache.VARIABLE}") from None
    pair = cache.kept(folder)
    assert pair is not None
    return Source(*pair, ON_THE_SPOT)
