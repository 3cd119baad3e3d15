"""Confidence intervals of the laboratory: those of the package, under the name that its measures use."""

from sglang_oscar.evaluation.intervals import RESAMPLES, Estimate, Z, bootstrap, wilson

__all__ = ["RESAMPLES", "Estimate", "Z", "bootstrap", "wilson"]
