"""A one-layer draft head (EAGLE3) for the reference models: its layer, its training, and how often it is right."""
