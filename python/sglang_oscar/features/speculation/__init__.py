"""Speculative decoding: what is served, and what it adds to the life of a token."""
