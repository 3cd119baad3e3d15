"""``oscar bench``: our kernels and stock ones on this card, and what the kernel benchmarks of the repository share."""
