"""How int2 mode enters SGLang: hooks, flags, refusals."""
