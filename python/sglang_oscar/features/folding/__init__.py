"""Folding the value rotation into the weights, and what that forbids."""
