"""The small Qwen3-style model that the project trains, ships and tests itself with."""
