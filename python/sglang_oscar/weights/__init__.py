"""Rotations of a server and what they do to its weights."""
