"""From a dump to rotations, layer by layer (paper, algorithm 1, procedure Calibrate)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_rotation.compose import COMPOSITIONS, DEFAULT_COMPOSITION
from oscar_rotation.covariance import CovarianceAccumulator, QueryCovariance
from oscar_rotation.dump import DumpError, DumpReader
from oscar_rotation.eigenbasis import EIGEN_ORDERS, EigenOrder, eigenbasis
from oscar_rotation.hadamard import is_power_of_two
from oscar_rotation.rotation_set import RotationMetadata, RotationSet, Side
from oscar_rotation.targets import DEFAULT_METHOD, KEY_TARGETS, METHODS, VALUE_TARGETS, TargetInputs

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

FEW_TOKENS_PER_CHANNEL = 8
"""Below this many tokens per channel a covariance is too noisy to trust its small eigenvalues."""


@dataclass(frozen=True)
class FitOptions:
    """How to fit.

    Attributes:
        key_target: "qqt" (C_Q) or "ktk".
        value_target: "sst" (exact C_S), "proxy" or "vtv".
        order: order of the eigenvectors: "ascending" (default) or "descending".
        composition: how the rotation is put together; "r_h_pbr" is U H P.
        include_warmup: fit on chunk 0 too.

    Raises:
        ValueError: for an unknown name.
    """

    key_target: str = METHODS[DEFAULT_METHOD][0]
    value_target: str = METHODS[DEFAULT_METHOD][1]
    order: EigenOrder = "ascending"
    composition: str = DEFAULT_COMPOSITION
    include_warmup: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("key_target", KEY_TARGETS),
            ("value_target", VALUE_TARGETS),
            ("order", EIGEN_ORDERS),
            ("composition", COMPOSITIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @classmethod
    def of_method(cls, method: str, **overrides: Any) -> FitOptions:
        """Options of a named method, for instance "qqt_sst"; ``overrides`` replace single fields.

        Raises:
            ValueError: for an unknown method or value.
        """
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        key_target, value_target = METHODS[method]
        return cls(**{"key_target": key_target, "value_target": value_target, **overrides})


@dataclass(frozen=True)
class FitResult:
    """Rotations of both sides, and remarks on the calibration data for the user."""

    key: RotationSet
    value: RotationSet
    remarks: tuple[str, ...] = ()


def choose_device(name: str = "auto") -> torch.device:
    """The torch device of a name: "auto" is CUDA where there is a GPU, else the CPU; other names are torch devices.

    Raises:
        ValueError: if the device does not exist here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no usable CUDA GPU; use auto or cpu")
    return device


def fit(
    dump: DumpReader | str | Path,
    options: FitOptions | None = None,
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> FitResult:
    """Fit one key and one value rotation per layer.

    Covariances are accumulated on ``device``; eigenvectors are computed in float64 on the CPU with a fixed sign, so
    a refit of the same dump on the same kind of device gives the same files. Memory is one chunk of one layer.

    Args:
        dump: reader of a dump, or its folder.
        options: targets, order, composition; the method's defaults.
        device: "auto", "cpu", "cuda" or another torch device.
        progress: told about every chunk.

    Returns:
        FitResult; float32 rotations [layers, head_dim, head_dim] with eigenvalues and metadata.

    Raises:
        DumpError: the dump is broken or does not suffice.
        ValueError: unknown device.
    """
    options = options or FitOptions()
    chosen_device = choose_device(device)
    reader = dump if isinstance(dump, DumpReader) else DumpReader(dump)
    chunks = reader.fit_chunks(options.include_warmup)
    fitter = _LayerFitter(reader, chunks, options, chosen_device, progress)
    layers = [fitter.run(layer) for layer in range(reader.num_layers)]
    calibration = {
        "tokens": fitter.tokens,
        "requests": sum(map(len, fitter.seq_lens.values())),
        "chunks": len(chunks),
        "include_warmup": options.include_warmup,
        "q_heads": fitter.q_heads,
        "kv_heads": fitter.kv_heads,
    }
    remarks = []
    if fitter.tokens < FEW_TOKENS_PER_CHANNEL * fitter.head_dim:
        remarks.append(
            f"only {fitter.tokens} calibration tokens for head_dim {fitter.head_dim}; "
            f"{FEW_TOKENS_PER_CHANNEL * fitter.head_dim} or more make a sound fit"
        )

    def pack(side: Side, index: int, target: str) -> RotationSet:
        manifest = reader.manifest
        metadata = RotationMetadata(
            objective=target,
            side=side,
            composition=options.composition,
            eigen_order=options.order,
            model_id=manifest.model_id if manifest else "",
            model_hash=manifest.model_hash if manifest else "",
            version=_version(),
            calibration=calibration,
        )
        rotations = torch.stack([layer[index][0] for layer in layers])
        eigenvalues = torch.stack([layer[index][1] for layer in layers])
        return RotationSet(rotations, eigenvalues, None, metadata)

    return FitResult(pack("k", 0, options.key_target), pack("v", 1, options.value_target), tuple(remarks))


class _LayerFitter:
    """Runs the passes over one layer after the other and keeps the counts of the calibration set."""

    def __init__(
        self,
        reader: DumpReader,
        chunks: list[int],
        options: FitOptions,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self.reader, self.chunks, self.options, self.device = reader, chunks, options, device
        self.key_target = KEY_TARGETS[options.key_target]
        self.value_target = VALUE_TARGETS[options.value_target]
        self.two_passes = self.key_target.needs_query_covariance or self.value_target.needs_query_covariance
        self.steps = reader.num_layers * len(chunks) * (1 + self.two_passes)
        self.done = 0
        self.progress = progress
        self.seq_lens: dict[int, tuple[int, ...]] = {}
        first = reader.load(0, chunks[0])
        self.q_heads, self.kv_heads, self.head_dim = first.q.shape[1], first.k.shape[1], first.k.shape[2]
        if not is_power_of_two(self.head_dim):
            raise DumpError(f"{reader.root}: head_dim is {self.head_dim}; a Hadamard rotation needs a power of two")

    @property
    def tokens(self) -> int:
        """Calibration tokens of a layer, the same in all."""
        return sum(sum(lengths) for lengths in self.seq_lens.values())

    def run(self, layer: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """(rotation, eigenvalues) float32 of keys and of values of one layer."""
        sm_scale = self.reader.manifest.sm_scale if self.reader.manifest else None
        query_covariance = None
        if self.two_passes:
            queries = QueryCovariance(self.kv_heads, self.head_dim, self.device)
            self._pass(layer, queries)
            query_covariance = queries.per_head()
        inputs = TargetInputs(self.kv_heads, self.head_dim, self.device, sm_scale, query_covariance)
        key, value = self.key_target.make(inputs), self.value_target.make(inputs)
        self._pass(layer, key, value)
        return self._rotation(key.shared()), self._rotation(value.shared())

    def _pass(self, layer: int, *accumulators: CovarianceAccumulator) -> None:
        for chunk_id, chunk in zip(self.chunks, self.reader.iterate(layer, self.chunks), strict=True):
            expected = self.seq_lens.setdefault(chunk_id, chunk.seq_lens)
            if chunk.seq_lens != expected:
                raise DumpError(
                    f"{self.reader.root}: chunk {chunk_id} of layer {layer} holds other requests than in layer 0; "
                    "dump again"
                )
            q, k, v = (tensor.to(self.device) for tensor in (chunk.q, chunk.k, chunk.v))
            for accumulator in accumulators:
                accumulator.update(q, k, v, chunk.seq_lens)
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.steps)

    def _rotation(self, covariance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        eigenvalues, eigenvectors = eigenbasis(covariance.cpu(), self.options.order)
        rotation = COMPOSITIONS[self.options.composition](eigenvectors, eigenvalues)
        return rotation.float(), eigenvalues.float()


def _version() -> str:
    try:
        return importlib.metadata.version("sglang-oscar")
    except importlib.metadata.PackageNotFoundError:
        return ""
