"""Fitting rotations again to the weights of a running server, at a trainer's word: prompts are sampled, matrices fitted
to them, and put where the old ones are, with nothing cached.

``POST /weights_checker`` takes the words, as its ``action``: SGLang hands it to all ranks and answers with a line.
"""
