"""Servers on machines without a GPU."""
