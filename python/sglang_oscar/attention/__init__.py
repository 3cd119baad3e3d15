"""The attention backend and the kernels it chooses."""
