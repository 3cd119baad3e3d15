"""Prefill and decode on servers of their own: what they add to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, SRT, Touchpoint, at
from sglang_oscar.features.disaggregation import arguments, handshake, waiting

QUEUE = SRT + "disaggregation.decode.DecodePreallocQueue."

FEATURE = Feature(
    name="disaggregation",
    in_schedulers=[
        Touchpoint(at(SRT + "disaggregation.utils.setup_state_kv_args"), AROUND, handshake.around_setup_state),
        Touchpoint(at(QUEUE + "_pre_alloc"), AROUND, waiting.around_pre_alloc),
    ],
    refused=arguments.REFUSED,
    refused_with=[
        ("Hybrid models, those with sliding windows, those that see images", arguments.REFUSED_WITH),
        ("Those without windows", arguments.NO_DRAFTS_WITH),
    ],
    check_model=arguments.check_model,
    configure=arguments.configure,
    check=arguments.check,
    parts=waiting.parts,
)
