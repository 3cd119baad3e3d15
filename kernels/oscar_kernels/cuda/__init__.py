"""CUDA C++ kernels for compute capability 9.0 (Hopper), compiled at run time by NVRTC and cached on disk.

:mod:`decode` and :mod:`store` are what callers need; what they cannot run, the Triton kernels can.
"""
