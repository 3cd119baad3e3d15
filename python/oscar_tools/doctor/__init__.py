"""What ``oscar doctor`` says of a machine, and of a model on it."""
