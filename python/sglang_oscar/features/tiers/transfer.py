"""Transfer of page items between the history pool and the host: in torch, or by SGLang's kernels for host memory.

The kernels copy items of one size by number. To them a page of a layer and side is an item: indices are page numbers,
and a warp copies 256 bytes in a step, where a row of its own may have as few as 36.
"""

from __future__ import annotations

import torch

from sglang_oscar.features.tiers.pages import HostPages, PageItems, PageLayout


def device_pages(layout: PageLayout, rows: tuple[list[torch.Tensor], list[torch.Tensor]]) -> PageItems:
    """The history pool as pages; ``rows`` are those of keys and of values, by layer: uint8 [slots, ...]."""
    slots = rows[0][0].shape[0] // layout.page_size * layout.page_size
    return PageItems({(of.side, of.layer): rows[of.side][of.layer][:slots].view(-1, of.size) for of in layout.items})


class TorchTransfer:
    """Both directions, as any units are copied; page numbers are int64, pair by pair, and the host's."""

    def load(
        self, host: HostPages, device: PageItems, layer: int, host_pages: torch.Tensor, device_pages: torch.Tensor
    ) -> None:
        """Copy one layer from the host."""
        device.of_layer(layer).copy(host.of_layer(layer), host_pages, device_pages)

    def back_up(self, host: HostPages, device: PageItems, host_pages: torch.Tensor, device_pages: torch.Tensor) -> None:
        """Copy all layers to the host."""
        host.copy(device, device_pages, host_pages)


class KernelTransfer(TorchTransfer):
    """SGLang's kernels, which read and write pinned host memory themselves; indices are the GPU's."""

    def __init__(self) -> None:
        self._tables: dict[int, torch.Tensor] = {}

    def load(
        self, host: HostPages, device: PageItems, layer: int, host_pages: torch.Tensor, device_pages: torch.Tensor
    ) -> None:
        """A launch per side."""
        from sgl_kernel import kvcacheio

        for side in (0, 1):
            source, target = host.item(side, layer), device.item(side, layer)
            common = {"src_indices": host_pages, "dst_indices": device_pages, "item_size": target.shape[1]}
            if host.page_first:
                kvcacheio.transfer_kv_per_layer_mla_pf_lf(
                    src=source, dst=target, layer_id=0, src_layout_dim=host.layout.page_bytes, **common
                )
            else:
                kvcacheio.transfer_kv_per_layer_mla(src=source, dst=target, **common)

    def back_up(self, host: HostPages, device: PageItems, host_pages: torch.Tensor, device_pages: torch.Tensor) -> None:
        """A launch per size of item."""
        from sgl_kernel import kvcacheio

        for number, group in enumerate(host.layout.groups):
            theirs = [device.item(item.side, item.layer) for item in group]
            ours = [host.item(item.side, item.layer) for item in group]
            common = {
                "src_layers": self._table(2 * number, theirs, device_pages.device),
                "src_indices": device_pages,
                "dst_indices": host_pages,
                "item_size": group[0].size,
                "num_layers": len(group),
            }
            if host.page_first:
                kvcacheio.transfer_kv_all_layer_mla_lf_pf(dst=ours[0], dst_layout_dim=host.layout.page_bytes, **common)
            else:
                table = self._table(2 * number + 1, ours, device_pages.device)
                kvcacheio.transfer_kv_all_layer_mla(dst_layers=table, **common)

    def _table(self, key: int, tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Addresses of tensors, uint64 on the device; they are made once."""
        if key not in self._tables:
            self._tables[key] = torch.tensor([x.data_ptr() for x in tensors], dtype=torch.uint64, device=device)
        return self._tables[key]
