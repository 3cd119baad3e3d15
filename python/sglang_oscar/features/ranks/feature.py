"""Ranks with batches of their own: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AFTER, SRT, Touchpoint, at
from sglang_oscar.features.ranks import arguments, cut_hits, stages

PIPELINE = SRT + "managers.scheduler_pp_mixin.SchedulerPPMixin."

FEATURE = Feature(
    name="ranks",
    in_schedulers=[
        Touchpoint(at(PIPELINE + "_pp_prepare_tensor_dict"), AFTER, stages.after_prepare_tensor_dict),
        Touchpoint(at(PIPELINE + "_pp_prep_batch_result"), AFTER, stages.after_prep_batch_result),
    ],
    refused_with=[(arguments.TITLE, [*arguments.WITH_ARGUMENTS, *arguments.WITH_MODELS])],
    configure=arguments.configure,
    check=arguments.check,
    built=cut_hits.built,
    longest_hit=cut_hits.longest_hit,
)
