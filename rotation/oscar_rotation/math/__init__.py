"""Bases, covariances and errors: linear algebra without files."""
