"""Rotation files: what they hold, how they are read and written."""
