"""Tiers below the GPU: rows in host memory and in storage, moved in pages."""
