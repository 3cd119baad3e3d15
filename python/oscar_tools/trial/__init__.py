"""Trying a class of models: a small random model of it answers with int2 mode, in exact rows, as stock SGLang does."""
