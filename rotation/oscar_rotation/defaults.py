"""What is fitted and served unless somebody says otherwise.

The one place: ``oscar fit``, ``calibrate``, ``prove``, the table of models, servers and the quickstart read it.
"""

RECIPE = "focus"
"""A name of :data:`oscar_rotation.recipes.FITTED`."""

BITS = "k3v2"
"""As ``--bits`` takes it: widths, or a mean; for every recipe that takes bits."""

GROUP_SIZE = 128
"""Channels that share a scale, or head_dim where that is smaller."""
