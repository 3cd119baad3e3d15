"""Recording queries, keys and values of an ordinary server: what it adds to the core."""

from __future__ import annotations

from sglang_oscar.attach.feature import Feature, OfAnyServer
from sglang_oscar.attach.touchpoint import AFTER, BEFORE, SRT, Touchpoint, at
from sglang_oscar.features.recording import dump_hook

FEATURE = Feature(
    name="recording",
    any_server=OfAnyServer(
        what="DUMP_KVCACHE=1",
        wanted=dump_hook.is_wanted,
        configure=dump_hook.configure,
        check=dump_hook.check_heads,
        # Every attention call of every model passes here, so only where a dump is wanted.
        in_schedulers=[
            Touchpoint(
                at(SRT + "model_executor.model_runner.ModelRunner.load_model"), AFTER, dump_hook.after_load_model
            ),
            Touchpoint(at(SRT + "layers.radix_attention.RadixAttention.forward"), BEFORE, dump_hook.before_attention),
        ],
    ),
)
