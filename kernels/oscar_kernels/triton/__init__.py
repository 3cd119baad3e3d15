"""Triton kernels: :mod:`store`, :mod:`decode` and :mod:`extend`, each tested against :mod:`oscar_kernels.reference`.

The modules are imported one by one by who needs them, so that importing the package does not need a GPU driver.
"""
