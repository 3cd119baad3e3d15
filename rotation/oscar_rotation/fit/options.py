"""How to fit: options of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oscar_kernels.layout import AFFINE, CODEBOOK, EXACT, SYMMETRIC
from oscar_rotation.defaults import GROUP_SIZE
from oscar_rotation.fit.bit_goal import AUTO, BitGoal
from oscar_rotation.fit.targets import DEFAULT_METHOD, KEY_TARGETS, METHODS, VALUE_TARGETS
from oscar_rotation.fit.texts import Document
from oscar_rotation.math.compose import COMPOSITIONS, DEFAULT_COMPOSITION
from oscar_rotation.math.eigenbasis import EIGEN_ORDERS, EigenOrder

Share = Literal["layer", "kv_head"]
SHARES: tuple[str, ...] = get_args(Share)
KEY_CODINGS, VALUE_CODINGS = (AFFINE, CODEBOOK, AUTO), (AFFINE, SYMMETRIC, AUTO)
"""Of :data:`oscar_kernels.layout.CODINGS`, what a fit gives keys and values, or by layer what is best."""


class OptionError(ValueError):
    """An option of a fit that is not possible.

    Attributes:
        option: its field in :class:`FitOptions`.
        fault: what it must be.
    """

    def __init__(self, option: str, fault: str) -> None:
        super().__init__(f"{option} {fault}")
        self.option, self.fault = option, fault


@dataclass(frozen=True)
class FitOptions:
    """How to fit.

    Attributes:
        key_target: "qqt" (C_Q), "ktk", "uresidual" or "hadamard".
        value_target: "sst" (exact C_S), "proxy", "vtv", "uresidual" or "hadamard".
        order: order of the eigenvectors: "ascending" (default) or "descending".
        composition: how the rotation is put together; "r_h_pbr" is U H P.
        include_warmup: fit on chunk 0 too.
        share: "layer": one rotation for all kv heads of a layer; "kv_head": one per kv head.
        fit_clip: choose clip ratios per layer on held-out requests, which then take no part in the covariances.
        report: measure errors per layer; see :mod:`oscar_rotation.report.layer_report`.
        group_size: channels that share a scale, for ``fit_clip`` and ``report``.
        holdout_tokens: tokens that clip ratios and errors are measured on.
        context: positions that keys may have; None for the model's, 0 for those of the dump alone.
        overrides: of the model's configuration, as SGLang's ``--json-model-override-args``; None for those that the
            dump's server had.
        bits: of codes; None for 2 everywhere.
        text: documents on which the model says what bits cost, for a mean of ``bits``; None to ask attention alone.
        key_coding: "affine", "codebook" for keys of two bits, or "auto": of both, by layer, what loses least at a mean.
        value_coding: "affine", "symmetric" for values that have codes, or "auto". These two, ``text``, ``bits``,
            ``overrides`` and ``context`` are options of the recipes that read the model, the others of the recipe
            ``paper``; ``group_size`` is of both.

    Raises:
        OptionError: for an unknown name or a number out of range.
    """

    key_target: str = METHODS[DEFAULT_METHOD][0]
    value_target: str = METHODS[DEFAULT_METHOD][1]
    order: EigenOrder = "ascending"
    composition: str = DEFAULT_COMPOSITION
    include_warmup: bool = False
    share: Share = "layer"
    fit_clip: bool = False
    report: bool = False
    group_size: int = GROUP_SIZE
    holdout_tokens: int = 1024
    context: int | None = None
    overrides: Mapping[str, Any] | None = None
    bits: BitGoal | None = None
    text: tuple[Document, ...] | None = None
    key_coding: str = AFFINE
    value_coding: str = AFFINE

    def __post_init__(self) -> None:
        for name, known in (
            ("key_target", KEY_TARGETS),
            ("value_target", VALUE_TARGETS),
            ("order", EIGEN_ORDERS),
            ("composition", COMPOSITIONS),
            ("share", SHARES),
            ("key_coding", KEY_CODINGS),
            ("value_coding", VALUE_CODINGS),
        ):
            if getattr(self, name) not in known:
                raise OptionError(name, f"must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.group_size < 2 or self.group_size & (self.group_size - 1):
            raise OptionError("group_size", f"must be a power of two, got {self.group_size}")
        if self.holdout_tokens < 1:
            raise OptionError("holdout_tokens", f"must be at least 1, got {self.holdout_tokens}")
        if self.context is not None and self.context < 0:
            raise OptionError("context", f"must not be negative, got {self.context}")
        bits = self.bits or BitGoal(2, 2)
        for name in ("key_coding", "value_coding"):
            if getattr(self, name) == AUTO and bits.mean is None:
                raise OptionError(name, f"{AUTO} chooses what a mean is spent on; add a mean such as --bits 2.5")
        if self.key_coding == CODEBOOK and bits.key not in (None, 2):
            raise OptionError(
                "key_coding", f"{CODEBOOK} is of keys of 2 bits, not {bits.key}; add --bits k2v2, or a mean"
            )
        if self.value_coding == SYMMETRIC and bits.value == EXACT:
            raise OptionError("value_coding", f"{SYMMETRIC} is of values that have codes, not of {EXACT} bits")

    @classmethod
    def of_method(cls, method: str, **overrides: Any) -> FitOptions:
        """Options of a named method, for instance "qqt_sst"; ``overrides`` replace single fields.

        Raises:
            OptionError: for an unknown method or value.
        """
        if method not in METHODS:
            raise OptionError("method", f"must be one of {', '.join(METHODS)}, got {method!r}")
        key_target, value_target = METHODS[method]
        return cls(**{"key_target": key_target, "value_target": value_target, **overrides})

    @property
    def codings(self) -> tuple[str, str]:
        """Of keys and of values."""
        return self.key_coding, self.value_coding

    @property
    def needs_samples(self) -> bool:
        """Whether single requests are kept to measure errors on."""
        return self.fit_clip or self.report
