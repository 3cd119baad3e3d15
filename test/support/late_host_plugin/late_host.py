"""Test plugin for SGLang: a host tier whose rows are there only once somebody has waited for them.

On a CPU a copy is done when it is asked for, so nobody would notice a reader that does not wait. Here every layer's
rows are loaded, put aside and overwritten, and come back when its attention waits; lossless ones are NaN until then.
"""

from __future__ import annotations

import os


def register():
    from sglang.srt.managers.cache_controller import LayerLoadingEvent

    from sglang_oscar.attention.backend import OscarAttentionBackend
    from sglang_oscar.tiers.host_pool import Int2HostPool

    load, complete, wait = Int2HostPool.load_to_device_per_layer, LayerLoadingEvent.complete, LayerLoadingEvent.wait
    loaded = []

    def load_late(self, device_pool, host_indices, device_indices, layer_id, io_backend, **kwargs):
        load(self, device_pool, host_indices, device_indices, layer_id, io_backend, **kwargs)
        pages = self._numbers(device_indices)
        for side in (0, 1):
            rows = self._device_pages.item(side, layer_id)
            loaded.append((rows, pages, rows[pages].clone()))
            rows[pages] = 0xFF

    def complete_late(self, layer_index):
        self.late = getattr(self, "late", {})
        self.late.setdefault(layer_index, []).extend(loaded)
        loaded.clear()
        complete(self, layer_index)

    def wait_and_finish(self, layer_index):
        wait(self, layer_index)
        for rows, pages, content in getattr(self, "late", {}).pop(layer_index, ()):
            rows[pages] = content

    Int2HostPool.load_to_device_per_layer = load_late
    LayerLoadingEvent.complete, LayerLoadingEvent.wait = complete_late, wait_and_finish
    if os.environ.get("LATE_HOST_NOBODY_WAITS"):
        # A deliberate fault, to prove that it is noticed.
        OscarAttentionBackend._wait_for_rows = lambda self, layer_id: None
