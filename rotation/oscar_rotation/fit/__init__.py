"""From a dump to rotations."""
