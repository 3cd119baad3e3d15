"""Models in which layers with a sliding window alternate with layers that attend to everything."""
