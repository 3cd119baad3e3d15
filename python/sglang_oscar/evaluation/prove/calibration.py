"""Rotations of a model that has none yet: dumped and fitted on the spot, as ``oscar dump`` and ``oscar fit`` do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_rotation.atomic import write_text_atomically
from oscar_rotation.errors import RotationFileError
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.texts import read_documents
from oscar_rotation.model_table import ModelSettings
from oscar_rotation.recipe_options import bit_goal
from sglang_oscar.calibration.dump_driver import DumpRequest, run_dump
from sglang_oscar.calibration.folders import CalibrationFolder
from sglang_oscar.calibration.rotation_driver import rotation_files, run_fit
from sglang_oscar.evaluation.prove.store import fingerprint
from sglang_oscar.evaluation.prove.texts import CALIBRATION, Texts

LENGTH = 1024
"""Tokens of a calibration text."""
FEWEST = 8
"""Calibration texts; a user's file that makes fewer is refused."""


@dataclass(frozen=True)
class Fit:
    """Rotations to be fitted.

    Attributes:
        recipe: one of :data:`oscar_rotation.recipes.FITTED`.
        bits: what ``--bits`` asks for; None for the recipe's own two.
        by_model: whether the model itself says, on the calibration texts, where a mean of ``bits`` is needed.
    """

    recipe: str
    bits: str | None = None
    by_model: bool = False

    @property
    def wish(self) -> str:
        """What is asked of bits, for tables; empty without."""
        return "" if self.bits is None else f", --bits {self.bits}" + (", by the model" if self.by_model else "")

    @property
    def suffix(self) -> str:
        """The same for names."""
        return "" if self.bits is None else f"-{self.bits}" + ("-by-model" if self.by_model else "")

    @property
    def title(self) -> str:
        """In tables."""
        return f"recipe {self.recipe}{self.wish}"


class Calibration:
    """The dump of one model, made when the first recipe needs it and kept for the next.

    Args:
        settings: of the model.
        identity: of the model, as JSON values.
        texts: calibration texts come from their calibration part.
        tokens: to dump.
        folder: of the run; a calibration on other text has another folder in it.
        server_args: flags of the dumping server.
    """

    def __init__(
        self,
        settings: ModelSettings,
        identity: dict[str, Any],
        texts: Texts,
        tokens: int,
        folder: Path,
        server_args: tuple[str, ...],
    ) -> None:
        # What comes from the prefix cache is not computed, and so not recorded.
        server_args = (*server_args, "--disable-radix-cache")
        self.settings, self.texts, self.tokens, self.server_args = settings, texts, tokens, server_args
        depends = {"model": identity, "text": texts.fingerprint(CALIBRATION), "tokens": tokens, "args": server_args}
        self.root = folder / f"calibration-{fingerprint(depends)}"

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

    def rotations(self, fit: Fit) -> Path:
        """Folder with the rotation files of a fit.

        Raises:
            DataError: too little calibration text, or the server recorded too little.
            DumpError, RotationFileError: the fit failed.
            ServerFailedError: the dumping server did not start or ended.
        """
        name = CalibrationFolder(Path()).rotations(fit.recipe).name + fit.suffix.replace("-", "_")
        # A mean of bits counts scales and zero points, so a plan for groups of one size is none for another.
        group = self.settings.group_size
        for folder in sorted(self.root.rglob(f"*_group{group}/{name}")):
            try:
                rotation_files(folder)
            except RotationFileError:
                continue  # A fit that was interrupted.
            return folder
        prompts = self.prepare()
        dump = DumpRequest(self.settings, self.root, str(prompts), self.tokens, server_args=self.server_args)
        dumped = run_dump(dump)
        # Of the calibration's part, as all that is fitted: nothing is measured on text that decided about bits.
        text = read_documents(prompts) if fit.by_model else None
        options = FitOptions(group_size=group, bits=bit_goal(fit.bits), text=text)
        return run_fit(dumped, fit.recipe, options, out=dumped.path / name)
