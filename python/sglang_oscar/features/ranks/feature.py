"""Ranks with batches of their own: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.features.ranks import arguments, cut_hits

FEATURE = Feature(
    name="ranks",
    refused_with=[(arguments.TITLE, [*arguments.WITH_ARGUMENTS, *arguments.WITH_MODELS])],
    configure=arguments.configure,
    check=arguments.check,
    built=cut_hits.built,
    longest_hit=cut_hits.longest_hit,
)
