"""Test plugin for caches in FP8 on any CPU: SGLang would have them for its kernels of Intel AMX alone. They are laid
out and read as on a GPU, by PyTorch.
"""

from __future__ import annotations

from typing import Any


class NoCpu:
    """SGLang's platform, which says that it is no CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def register() -> None:
    from sglang.srt.mem_cache import kv_cache_configurator as pools

    pools.current_platform = NoCpu(pools.current_platform)
