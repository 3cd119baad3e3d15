"""Rotations for the 2-bit KV cache: reading activation dumps, covariances, fitting, rotation files.

Imports torch, never SGLang. The entry points for a server are
:func:`oscar_rotation.files.rotation_file.load_rotation` and :class:`oscar_rotation.dump.DumpWriter`.
"""
