"""Device code of the 2-bit KV cache and its specification. Imports torch, triton and cuda-python."""
