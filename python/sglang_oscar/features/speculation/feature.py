"""Speculative decoding: what it adds to the core, which attends to several new tokens of a request by itself."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature
from sglang_oscar.attach.touchpoint import AROUND, SRT, Touchpoint, at
from sglang_oscar.features.speculation import arguments, commit, draft_model

FEATURE = Feature(
    name="speculation",
    in_arguments=[
        Touchpoint(at(SRT + "arg_groups.speculative_hook._handle_ngram"), AROUND, arguments.around_handle_ngram),
    ],
    in_schedulers=[
        Touchpoint(
            at(SRT + "speculative.spec_utils.move_accept_tokens_to_target_kvcache"),
            AROUND,
            commit.around_move_accept_tokens,
        ),
    ],
    refused=arguments.REFUSED,
    configure=arguments.configure,
    check=draft_model.check_server,
    parts=draft_model.parts,
    draft_pool_built=draft_model.check_pool,
)
