"""Test plugin for SGLang: lets a stock server run gpt-oss on any CPU, and poisons pools of windows.

SGLang's attention backend for CPUs needs operators of a kernel package that is made for few of them; what int2 mode
reads window layers with on a CPU takes its place. An activation function is not compiled, which would take half a
minute. Slots of the pool of windows are NaN until something is written to them, the dummy page included, which is where
the slots of freed windows lead.
"""

from __future__ import annotations


def register():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    from oscar_cpu.window_attention import WindowAttention

    ATTENTION_BACKENDS["intel_amx"] = ATTENTION_BACKENDS["torch_native"] = WindowAttention
    compiled = fused_moe_native.swiglu_gpt_oss_sigmoid_alpha
    fused_moe_native.swiglu_gpt_oss_sigmoid_alpha = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    init = SWAKVPool.__init__

    def init_poisoned(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for buffer in (*self.swa_kv_pool.k_buffer, *self.swa_kv_pool.v_buffer):
            buffer.fill_(float("nan"))

    SWAKVPool.__init__ = init_poisoned
