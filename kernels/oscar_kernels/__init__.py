"""Device code of the 2-bit KV cache and its specification. Imports torch and triton, nothing above them."""
