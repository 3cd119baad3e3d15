"""Test plugin for SGLang: random weights under which attention matters, with ``--load-format dummy``.

A class of models is then served from its configuration alone.
"""

from __future__ import annotations


def register():
    from sglang_oscar.attach import processes

    if processes.detokenizes():
        return
    from sglang.srt.model_loader import loader

    from oscar_tools.trial import weights

    loader.initialize_dummy_weights = weights.fill
