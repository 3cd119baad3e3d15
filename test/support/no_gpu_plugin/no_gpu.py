"""Test plugin for SGLang's draft models on a CPU: some wait for a GPU when they load, also where there is none, and
compiling a few operations on drafts takes longer than a test.
"""

from __future__ import annotations

import torch


def register():
    # Not TORCH_COMPILE_DISABLE, which is read when torch is imported: servers then need a warm process of their own.
    torch.compiler.set_stance("force_eager")
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *device: None
