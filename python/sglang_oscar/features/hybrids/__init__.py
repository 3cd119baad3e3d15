"""Hybrid models: layers of linear attention, whose states SGLang keeps, between layers of full attention.

* Pool: SGLang's HybridLinearKVPool takes the INT2 pool of the full layers ready-made; layers keep their global ids.
  Values are rotated online, because a gate multiplies outputs before ``o_proj``.
* Prefix hits end where a state was kept. Computing the last ``W`` tokens again would take an older state, so a copy of
  ring and sink block lies beside every state slot and shares its fate: written in the same pass, read with it. No token
  is computed again and no sink refilled. Within a chunk the copy gets the ring as it was before, and the chunk's tokens
  up to the tracked one are stored there a second time.
* Drafts: SGLang has a state behind every token that is verified and commits that of the last accepted one. The state
  behind an accepted token that ends a page is kept, and the window behind that token with it: the ring has a row for
  every token of the step, so nothing of it is gone yet.
* Host memory: copies are registered with SGLang's state slots (``window_slots.py``), so they go where states go. From
  the host a state comes into the request's own slot. SGLang before 0.5.22 leaves copies behind; refused there.
* Storage: a state is a page of its own in files, with its windows. SGLang's other backends refuse what lies beside.
* Prefill and decode apart: states go over as SGLang sends them, windows as those of any model. Sinks are computed
  again, one at a time, as each begins with the state for padding, which is cleared.
* Images: SGLang keeps states behind them as behind text, hands what it sees to its draft layers, and turns the tokens
  that are verified by the prompt's images. Windows and sinks come with states, so no image is seen again for them.
* Memory: SGLang's ratio of states to cache is made for 16 bits. The tokens per state are kept, not the bytes, so states
  take most of what is saved; ``--mamba-full-memory-ratio`` or ``--max-mamba-cache-size`` gives the cache more.
* SGLang 0.5.17 files states of a request with overlap scheduling under the wrong length with any cache; refused there.
"""
