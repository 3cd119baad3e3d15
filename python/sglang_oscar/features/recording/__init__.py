"""Recording queries, keys and values of an ordinary server, for the fit of rotations."""
