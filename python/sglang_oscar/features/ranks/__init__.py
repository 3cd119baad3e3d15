"""Ranks that do not run the same batches: each has rows, rings and sinks of its own requests.

No rank computes anything that the others do not: a pass that refills sink blocks would leave them waiting. So a prefix
hit whose sink block is gone is none (:mod:`sglang_oscar.features.ranks.cut_hits`).
"""
