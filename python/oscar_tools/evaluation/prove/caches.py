"""Which caches are compared, and the server of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oscar_cpu.server import has_gpu
from oscar_rotation.files.pair import rotation_files
from oscar_rotation.files.reach import reach
from oscar_rotation.files.rotation_file import read_rotation_file
from oscar_rotation.model_table import ModelSettings
from oscar_rotation.recipes import DEFAULT
from oscar_tools.calibration.weight_files import file_digest
from oscar_tools.evaluation.methods import K_PATH, V_PATH, Method, contents, make_method
from oscar_tools.evaluation.prove.fp8_scales import SCALES
from oscar_tools.evaluation.prove.specs import Spec

BF16, FP8, FP8_SCALED, INT2, NAIVE = "bf16", "fp8", "fp8-scaled", "int2", "naive"
CACHES = (BF16, FP8, FP8_SCALED, INT2, NAIVE)
"""Names on the command line. ``naive`` is INT2 without rotation, windows and clipping: what a bad cache looks like."""


@dataclass(frozen=True)
class Cache:
    """One spec of the page.

    Attributes:
        name: in file names.
        title: in tables.
        int2: whether it is one of int2 mode.
        args: flags of its server.
        env: variables of its server.
        optional: a server that does not start is a remark, not a failure.
        model: folder that its server loads instead of the model's: one of :mod:`fp8_scales`.
        chunk: tokens of a prefill chunk, of a cache of which nothing but :class:`measures.Effects` is asked.
    """

    name: str
    title: str
    int2: bool
    args: tuple[str, ...]
    env: dict[str, str]
    optional: bool = False
    model: Path | None = None
    chunk: int | None = None

    def chunked(self, tokens: int) -> Cache:
        """The same cache of a server that computes prompts in chunks of so many tokens."""
        return replace(
            self,
            name=f"{self.name}-chunk-{tokens}",
            title=f"{self.title}, chunks of {tokens:,}",
            args=(*self.args, "--chunked-prefill-size", str(tokens)),
            chunk=tokens,
        )

    def named(self, facts: dict[str, Any]) -> str:
        """Its title where its server has said what it is, as JSON of :class:`ServerFacts`."""
        return self.title if self.int2 else ", ".join([facts["title"], *self.title.split(", ")[1:]])

    def fitted_for(self) -> str:
        """What its keys were fitted for, in words; empty where they were not, or their file does not say."""
        path = Path(self.env.get(K_PATH, ""))
        return reach(read_rotation_file(path).metadata) if path.is_file() else ""

    def settings(self) -> dict[str, Any]:
        """What answers depend on: flags, and variables with the content of files instead of their names."""
        scales = {} if self.model is None else {"scales": file_digest(self.model / SCALES)}
        return {"args": self.args, "env": contents(self.env)} | scales


@dataclass(frozen=True)
class Flags:
    """Further flags of servers, as the user gave them.

    Attributes:
        common: of all.
        bf16, fp8, int2: of one kind each.
    """

    common: tuple[str, ...] = ()
    bf16: tuple[str, ...] = ()
    fp8: tuple[str, ...] = ()
    int2: tuple[str, ...] = ()


def default_flags(longest: int) -> tuple[str, ...]:
    """Flags of every server, in front of the user's: what measuring needs, and no more memory than a CPU machine has.

    Args:
        longest: tokens of the longest prompt.
    """
    flags = ("--random-seed", "0", "--max-running-requests")
    if has_gpu():
        return (*flags, "32")
    # A CPU server has no operator to apply a grammar with, and dies at the first one.
    small = ("--mem-fraction-static", "0.5", "--max-total-tokens", str(max(24576, 3 * longest)))
    return (*flags, "16", *small, "--grammar-backend", "none")


class CacheMaker:
    """Makes caches of one model.

    Args:
        settings: of the model; its group size is that of int2 caches that do not say.
        config: of the model.
        flags: of the user.
        longest: tokens of the longest prompt.
    """

    def __init__(self, settings: ModelSettings, config: Any, flags: Flags, longest: int) -> None:
        self.settings, self.config, self.flags = settings, config, flags
        self.defaults = default_flags(longest)

    @property
    def dump_args(self) -> tuple[str, ...]:
        """Flags of the server that dumps: those of BF16."""
        return (*self.defaults, *self.flags.common, *self.flags.bf16)

    def bf16(self) -> Cache:
        """The reference."""
        return self._cache(make_method(BF16, self.settings), BF16, self.flags.bf16)

    def fp8(self) -> Cache:
        """SGLang's own 8-bit cache, without scales."""
        made = self._cache(Method(FP8, "FP8 (e4m3)"), FP8, ("--kv-cache-dtype", "fp8_e4m3", *self.flags.fp8))
        return replace(made, optional=True)

    def fp8_scaled(self, model: Path) -> Cache:
        """The same with a scale of keys and of values per layer, which ``model`` brings."""
        return replace(self.fp8(), name=FP8_SCALED, title="FP8 (e4m3), scales by layer", model=model)

    def naive(self) -> Cache:
        """INT2 without all that makes it work."""
        return self._cache(make_method(NAIVE, self.settings), NAIVE, self.flags.int2)

    def int2(self, spec: Spec, rotations: Path | None = None) -> Cache:
        """INT2 as asked for.

        Args:
            spec: which.
            rotations: folder of its files where it is fitted.

        Raises:
            RotationFileError: the folder does not hold one file per side.
        """
        settings = self.settings.overridden(group_size=spec.group)
        method = make_method(spec.method, settings, rotations)
        label = (INT2 if spec.recipe == DEFAULT else f"{INT2}-{spec.recipe}") + spec.suffix
        return self._cache(replace(method, title=method.title + spec.wish), label, self.flags.int2)

    def given(self, keys: Path, values: Path) -> Cache:
        """INT2 with the user's rotation files, which say their recipe."""
        env = {K_PATH: str(keys.resolve()), V_PATH: str(values.resolve())}
        title = f"INT2, {keys.stem.removeprefix('k_rotation_')}"
        return self._cache(Method(INT2, title, self.settings.group_size, env), INT2, self.flags.int2)

    def _cache(self, method: Method, name: str, args: tuple[str, ...]) -> Cache:
        extra = (*self.defaults, *self.flags.common, *args)
        flags = method.server_args(self.settings, extra)
        method.check(self.config)
        return Cache(name, method.title, method.group_size is not None, tuple(flags), method.env)


def given_rotations(folder: Path | None, keys: Path | None, values: Path | None) -> tuple[Path, Path] | None:
    """The user's rotation files; None where there are none and they have to be fitted.

    Raises:
        RotationFileError: the folder does not hold one file per side.
        ValueError: a folder and files, one file without the other, or a file that is not there.
    """
    if folder is not None:
        if keys or values:
            raise ValueError("give a folder or two files, not both")
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        return rotation_files(folder)
    if keys is None and values is None:
        return None
    if keys is None or values is None:
        raise ValueError("rotation files come in pairs: one for keys and one for values")
    for path in (keys, values):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
    return keys, values
