"""CUDA C++ kernels for compute capability 9.0 (Hopper), compiled at run time by NVRTC and cached on disk.

:mod:`decode` is the only module that callers need; what it cannot run, the Triton kernels can.
"""
