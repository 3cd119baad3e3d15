"""The command ``oscar``: calibration and evaluation drivers, ``oscar prove``, ``oscar doctor``, ``oscar bench``,
``oscar run``.

Tools beside the plugin: they start servers and read files, and no server imports them.
"""
