"""Test plugin for SGLang: some of its draft models wait for a GPU when they load, also where there is none."""

from __future__ import annotations

import torch


def register():
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *device: None
