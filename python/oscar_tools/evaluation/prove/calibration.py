"""Rotations of a model that has none yet: dumped and fitted on the spot, as ``oscar dump`` and ``oscar fit`` do."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.defaults import GROUP_SIZE
from oscar_rotation.errors import RotationFileError
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.texts import read_documents
from oscar_rotation.model_table import ModelSettings
from oscar_tools.calibration.dump_driver import DumpTask, run_dump
from oscar_tools.calibration.folders import CalibrationFolder
from oscar_tools.calibration.rotation_driver import run_fit
from oscar_tools.evaluation.prove.fp8_scales import scaled_model
from oscar_tools.evaluation.prove.machine import FITTING, source_digest
from oscar_tools.evaluation.prove.specs import Spec
from oscar_tools.evaluation.prove.store import fingerprint
from oscar_tools.evaluation.prove.texts import CALIBRATION, Texts

LENGTH = 1024
"""Tokens of a calibration text."""
FITS = "fits"
"""Folder of fits in that of a calibration."""
FEWEST = 8
"""Calibration texts; a user's file that makes fewer is refused."""


def forget_fits(folder: Path) -> None:
    """Remove the fits of all calibrations in the folder of a run, not their dumps."""
    for fits in folder.glob(f"calibration-*/{FITS}"):
        shutil.rmtree(fits)


class Calibration:
    """The dump of one model, made when the first recipe needs it and kept for the next.

    Args:
        settings: of the model.
        identity: of the model, as JSON values.
        texts: calibration texts come from their calibration part.
        tokens: to dump.
        folder: of the run; a calibration on other text has another folder in it.
        server_args: flags of the dumping server.
        context: positions that fits cover; None for those of the model.
    """

    def __init__(
        self,
        settings: ModelSettings,
        identity: dict[str, Any],
        texts: Texts,
        tokens: int,
        folder: Path,
        server_args: tuple[str, ...],
        context: int | None = None,
    ) -> None:
        # What comes from the prefix cache is not computed, and so not recorded.
        server_args = (*server_args, "--disable-radix-cache")
        self.settings, self.texts, self.tokens, self.server_args = settings, texts, tokens, server_args
        self.context = context
        depends = {"model": identity, "text": texts.fingerprint(CALIBRATION), "tokens": tokens, "args": server_args}
        self.root = folder / f"calibration-{fingerprint(depends)}"
        self.fits = self.root / FITS

    def prepare(self) -> Path:
        """Write the calibration texts, unless an earlier run did; returns their file.

        Raises:
            DataError: there is too little text.
        """
        path = self.root / "prompts.jsonl"
        if not path.exists():
            # Decoded and encoded again a text may lose a token or two; a few more make up for it.
            windows = self.texts.windows(CALIBRATION, self.tokens // LENGTH + 2, LENGTH, at_least=FEWEST)
            # The dump adds what the model expects in front of a text.
            begin = len(self.texts.leading)
            rows = [json.dumps({"text": self.texts.tokenizer.decode(ids[begin:])}) for ids in windows]
            write_text_atomically(path, "\n".join(rows) + "\n")
        return path

    @cached_property
    def dumped(self) -> CalibrationFolder:
        """The dump, made where it is not there; rows with groups of any size are fitted to it.

        Raises:
            DataError: too little calibration text, or the server recorded too little.
            DumpError: there is a broken one.
            ServerFailedError: the dumping server did not start or ended.
        """
        settings = self.settings.overridden(group_size=GROUP_SIZE)
        return run_dump(DumpTask(settings, self.root, str(self.prepare()), self.tokens, server_args=self.server_args))

    def rotations(self, spec: Spec) -> Path:
        """Folder with the rotation files of a cache.

        Raises:
            DataError, DumpError, ServerFailedError: see :attr:`dumped`.
            DumpError, RotationFileError: the fit failed.
        """
        # A mean of bits counts scales and zero points, so a plan for groups of one size is none for another.
        group = spec.group or self.settings.group_size
        fit = replace(spec, group=group)
        # What a changed package fits is not what the old one fitted.
        key = fingerprint({"row": asdict(fit), "context": self.context, "code": source_digest(FITTING)})
        folder = self.fits / f"{fit.recipe}{fit.suffix}-{key}"
        try:
            rotation_files(folder)
        except RotationFileError:  # There is none, or one that was interrupted.
            # Of the calibration's part, as all that is fitted: nothing is measured on text that decided about bits.
            text = read_documents(self.prepare()) if spec.by_model else None
            options = FitOptions(
                group_size=group, bits=spec.goal, text=text, context=self.context, key_coding=spec.key_coding,
                value_coding=spec.value_coding,
            )  # fmt: skip
            run_fit(self.dumped, spec.recipe, options, out=folder)
        return folder

    def scaled_model(self, model: Path) -> Path:
        """The model with scales of an FP8 cache, as :func:`fp8_scales.scaled_model` makes it.

        Raises:
            DataError: SGLang takes none for this model.
            DumpError, ServerFailedError: see :attr:`dumped`.
        """
        return scaled_model(model, lambda: self.dumped.dump, self.root / "fp8-scaled")
