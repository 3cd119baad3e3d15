"""The passes over one layer of a dump: covariances, rotations, clip ratios, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from oscar_rotation.dump import DumpError, DumpReader
from oscar_rotation.dump.stream import stream_chunks
from oscar_rotation.files.rotation_set import DEFAULT_CLIP_RATIOS
from oscar_rotation.fit.clip import fit_clip_ratio
from oscar_rotation.fit.heads import check_heads
from oscar_rotation.fit.options import FitOptions
from oscar_rotation.fit.samples import HeadSample, head_samples, plan_samples
from oscar_rotation.fit.targets import KEY_TARGETS, VALUE_TARGETS, Target, TargetInputs
from oscar_rotation.math.compose import COMPOSITIONS
from oscar_rotation.math.covariance import CovarianceAccumulator, QueryCovariance, ScoreValueCovariance
from oscar_rotation.math.eigenbasis import eigenbasis
from oscar_rotation.math.hadamard import hadamard
from oscar_rotation.report.layer_report import layer_report
from oscar_rotation.threads import one_thread

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


@dataclass(frozen=True)
class SideFit:
    """One side of one layer.

    ``rotation`` is float32 [d, d], or [kv_heads, d, d] where each head has its own; ``eigenvalues`` float32 [d] or
    [kv_heads, d], None for the data-free target; ``clip_ratio`` None where it was not fitted.
    """

    rotation: torch.Tensor
    eigenvalues: torch.Tensor | None
    clip_ratio: float | None = None


@dataclass(frozen=True)
class LayerFit:
    """Both sides of one layer and its report, empty where none was asked for."""

    key: SideFit
    value: SideFit
    report: dict[str, Any] = field(default_factory=dict)


class LayerFitter:
    """Fits one layer after the other and keeps the counts of the calibration set.

    Args:
        reader: the dump.
        options: how to fit.
        device: where to accumulate.
        progress: told about every chunk.

    Raises:
        DumpError: the dump is broken or there is no Hadamard matrix of its heads.
    """

    def __init__(
        self, reader: DumpReader, options: FitOptions, device: torch.device, progress: Progress | None = None
    ) -> None:
        self.reader, self.options, self.device, self.progress = reader, options, device, progress
        self.chunks = reader.fit_chunks(options.include_warmup)
        self.key_target = KEY_TARGETS[options.key_target]
        self.value_target = VALUE_TARGETS[options.value_target]
        self.two_passes = self.key_target.needs_query_covariance or self.value_target.needs_query_covariance
        passes = [
            (layer, chunk)
            for layer in range(reader.num_layers)
            for _ in range(1 + self.two_passes)
            for chunk in self.chunks
        ]
        self.steps = len(passes)
        self.stream = stream_chunks(reader, passes, device)
        self.done = 0
        self.seq_lens = {chunk: reader.seq_lens(0, chunk) for chunk in self.chunks}
        self.sampled = plan_samples(self.seq_lens, options.holdout_tokens) if options.needs_samples else {}
        first = reader.load(0, self.chunks[0])
        self.q_heads, self.kv_heads, self.head_dim = first.q.shape[1], first.k.shape[1], first.k.shape[2]
        self.value_head_dim = first.v.shape[2]
        check_heads(reader.root, self.head_dim, self.value_head_dim)
        if options.needs_samples and not self.sampled:
            raise DumpError(f"{reader.root}: holds one request; clip ratios and errors need a second one to measure on")
        scale = reader.manifest.sm_scale if reader.manifest else None
        self.sm_scale = self.head_dim**-0.5 if scale is None else scale

    @property
    def tokens(self) -> int:
        """Tokens per layer that the covariances see."""
        held_out = (
            sum(sum(self.seq_lens[c][first:]) for c, first in self.sampled.items()) if self.options.fit_clip else 0
        )
        return sum(map(sum, self.seq_lens.values())) - held_out

    @property
    def sampled_tokens(self) -> int:
        """Tokens of the requests that errors are measured on."""
        return sum(sum(self.seq_lens[chunk][first:]) for chunk, first in self.sampled.items())

    def run(self, layer: int) -> LayerFit:
        """Rotations, clip ratios and report of the next layer: layers must be asked for in order, each once.

        Raises:
            DumpError: a broken chunk.
        """
        queries = QueryCovariance(self.kv_heads, self.head_dim, self.device)
        query_covariance = None
        if self.two_passes:
            self._pass(layer, queries)
            query_covariance = queries.per_head()
        sinks = self.reader.sink_logits(layer)
        sizes = (self.kv_heads, self.head_dim, self.value_head_dim)
        inputs = TargetInputs(*sizes, self.device, self.sm_scale, query_covariance, sinks)
        key, value = (target.make(inputs) if target.make else None for target in (self.key_target, self.value_target))
        running = [accumulator for accumulator in (key, value) if accumulator is not None]
        metrics: list[CovarianceAccumulator] = []
        if self.options.report:
            known = [queries] if self.two_passes else []
            metrics = self._metrics(known + running, running, sinks)
        samples = self._pass(layer, *running, sinks=sinks)
        sides = [self._rotation(key, self.head_dim), self._rotation(value, self.value_head_dim)]
        if not self.options.needs_samples:
            return LayerFit(sides[0], sides[1])
        with one_thread():
            return self._measured(layer, sides, metrics, samples)

    def _measured(
        self, layer: int, sides: list[SideFit], metrics: list[CovarianceAccumulator], samples: list[HeadSample]
    ) -> LayerFit:
        """Clip ratios and report, on the samples."""
        per_head = [side.rotation.to(self.device).expand(self.kv_heads, -1, -1) for side in sides]
        report: dict[str, Any] = {"layer": layer}
        if self.options.fit_clip:
            for index, name in enumerate(("k", "v")):
                ratio, errors = fit_clip_ratio(name, per_head[index], samples, self.options.group_size)  # type: ignore[arg-type]
                sides[index] = SideFit(sides[index].rotation, sides[index].eigenvalues, ratio)
                report[f"{name}_clip_errors"] = {str(r): error for r, error in errors.items()}
        if self.options.report:
            ratios = [s.clip_ratio or default for s, default in zip(sides, DEFAULT_CLIP_RATIOS.values(), strict=True)]
            report |= {"k_clip": ratios[0], "v_clip": ratios[1]}
            covariances = [m.shared()[None] if self.options.share == "layer" else m.per_head() for m in metrics]
            report |= layer_report(
                (per_head[0], per_head[1]),
                (covariances[0], covariances[1]),
                (ratios[0], ratios[1]),
                samples,
                self.options.group_size,
            )
        return LayerFit(sides[0], sides[1], report)

    def _metrics(
        self, known: list[CovarianceAccumulator], running: list[CovarianceAccumulator], sinks: torch.Tensor | None
    ) -> list[CovarianceAccumulator]:
        """C_Q and C_S, from what is accumulated anyway or, if need be, in addition to it."""
        metrics: list[CovarianceAccumulator] = []
        of_values = (self.kv_heads, self.value_head_dim, self.device, self.sm_scale, sinks)
        queries = QueryCovariance(self.kv_heads, self.head_dim, self.device)
        for fresh in (queries, ScoreValueCovariance(*of_values)):
            found = next((accumulator for accumulator in known if type(accumulator) is type(fresh)), None)
            if found is None:
                found = fresh
                running.append(found)
            metrics.append(found)
        return metrics

    def _pass(
        self, layer: int, *accumulators: CovarianceAccumulator, sinks: torch.Tensor | None = None
    ) -> list[HeadSample]:
        samples: list[HeadSample] = []
        for chunk_id in self.chunks:
            whole = next(self.stream)
            if whole.seq_lens != self.seq_lens[chunk_id]:
                raise DumpError(
                    f"{self.reader.root}: chunk {chunk_id} of layer {layer} holds other requests than in layer 0; "
                    "dump again"
                )
            if chunk_id in self.sampled:
                fitted, kept = whole.split(self.sampled[chunk_id])
                samples += head_samples(kept.q, kept.k, kept.v, kept.seq_lens, self.sm_scale, sinks)
                if self.options.fit_clip:
                    whole = fitted
            if whole.seq_lens:
                for accumulator in accumulators:
                    accumulator.update(whole.q, whole.k, whole.v, whole.seq_lens)
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.steps)
        return samples

    def _rotation(self, accumulator: CovarianceAccumulator | None, head_dim: int) -> SideFit:
        if accumulator is None:
            rotation = hadamard(head_dim).float()
            return SideFit(rotation if self.options.share == "layer" else rotation.repeat(self.kv_heads, 1, 1), None)
        if self.options.share == "layer":
            return SideFit(*compose_side(accumulator.shared(), self.options))
        pairs = [compose_side(covariance, self.options) for covariance in accumulator.per_head()]
        return SideFit(torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs]))


def compose_side(covariance: torch.Tensor, options: FitOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotation and eigenvalues of one covariance, float32 [d, d] and [d]."""
    eigenvalues, eigenvectors = eigenbasis(covariance.cpu(), options.order)
    rotation = COMPOSITIONS[options.composition](eigenvectors, eigenvalues)
    return rotation.float(), eigenvalues.float()


def target_composition(target: Target, composition: str) -> str:
    """The composition that a file states: "h" where the target fits nothing."""
    return composition if target.make else "h"
