"""Test plugin for SGLang: a host tier whose rows are there only once somebody has waited for them.

On a CPU a copy is done when it is asked for, so nobody would notice a reader that does not wait. Here every layer's
rows are loaded, put aside and overwritten, and come back when its attention waits; lossless ones are NaN until then.
On a GPU all layers' rows are overwritten before the first is loaded, and every load comes late, by some milliseconds
of its stream. Windows beside the states of hybrid models are NaN likewise, on a CPU; rows of a draft model are zeros
with LATE_HOST_DRAFTS_STAY, a deliberate fault.
"""

from __future__ import annotations

import os

LATE_CYCLES = 40_000_000
"""Of the GPU's clock, about 20 ms: by then a reader that does not wait has read."""


def register():
    import torch
    from sglang.srt.managers.cache_controller import LayerLoadingEvent

    from sglang_oscar.attention.backend import OscarAttentionBackend
    from sglang_oscar.features.tiers.host_pool import Int2HostPool

    MambaPoolHost = host_pool_of_states()
    load, complete, wait = Int2HostPool.load_to_device_per_layer, LayerLoadingEvent.complete, LayerLoadingEvent.wait
    loaded = []

    def load_slowly(self, pages, layer_id):
        for layer in range(self.layer_num) if layer_id == 0 else ():
            for side in (0, 1):
                rows = self._device_pages.item(side, layer)
                rows[pages.to(rows.device)] = 0xFF
        torch.cuda._sleep(LATE_CYCLES)

    def load_late(self, device_pool, host_indices, device_indices, layer_id, io_backend, **kwargs):
        pages = self._numbers(device_indices)
        if self._device_pages.item(0, layer_id).is_cuda:
            load_slowly(self, pages, layer_id)
            load(self, device_pool, host_indices, device_indices, layer_id, io_backend, **kwargs)
            return
        load(self, device_pool, host_indices, device_indices, layer_id, io_backend, **kwargs)
        stays = self.dtype != torch.uint8 and bool(os.environ.get("LATE_HOST_DRAFTS_STAY"))
        for side in (0, 1):
            rows = self._device_pages.item(side, layer_id)
            loaded.append((rows, pages, rows[pages] * (not stays)))
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

    transfer = getattr(MambaPoolHost, "_transfer_slot_states", None)

    def transfer_late(self, host_indices, device_indices, *, to_device):
        """Windows beside states, which come with the first layer that has states."""
        transfer(self, host_indices, device_indices, to_device=to_device)
        for windows in self.slot_state_device_tensors if to_device else ():
            if not os.environ.get("LATE_HOST_WINDOWS_STAY"):
                loaded.append((windows, device_indices, windows[device_indices].clone()))
            windows[device_indices] = float("nan")

    put = MambaPoolHost.set_from_flat_data_page

    def put_states_alone(self, index, data_page):
        put(self, index, data_page)
        for windows in self.slot_state_buffers:
            windows[index] = float("nan")

    if transfer is not None:
        MambaPoolHost._transfer_slot_states = transfer_late
    if os.environ.get("LATE_HOST_WINDOWS_UNREAD"):
        # A deliberate fault: states come from storage without their windows.
        MambaPoolHost.set_from_flat_data_page = put_states_alone
    Int2HostPool.load_to_device_per_layer = load_late
    LayerLoadingEvent.complete, LayerLoadingEvent.wait = complete_late, wait_and_finish
    if os.environ.get("LATE_HOST_NOBODY_WAITS"):
        # A deliberate fault, to prove that it is noticed.
        OscarAttentionBackend._wait_for_rows = lambda self, layer_id: None


def host_pool_of_states():
    """SGLang's class, which 0.5.17 has elsewhere."""
    try:
        from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
    except ModuleNotFoundError:
        from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost
    return MambaPoolHost
