"""Test plugin for SGLang: host pools of some megabytes are allowed on machines that lack the 10 GiB which SGLang wants
left over."""


def register():
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
