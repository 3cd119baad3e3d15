"""Test plugin for SGLang: on a CPU, too, a step with drafts is prepared while the one before it runs, so that a request
that has ended is verified once more, as on a GPU."""


def register():
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
