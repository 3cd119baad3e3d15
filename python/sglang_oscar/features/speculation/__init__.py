"""Speculative decoding: what is served, and what it adds to the life of a token.

A step verifies ``n`` new tokens of a request at once, the last accepted one and drafts: trees and chains without a
model (NGRAM), chains from a draft model (EAGLE, EAGLE3, NEXTN).

* Ring: new tokens are stored first and attended to afterwards, one behind the other whatever their depth in the tree:
  token ``i`` of a step behind ``L`` accepted ones at slot ``(L + i) mod R``. With ``R = W + n`` rows the next step
  overwrites rejected tokens only; a token less would cost the oldest token of the window.
* Mask: which new tokens a new token sees is a word of 64 bits (``oscar_kernels/visible.py``).
* Commit: SGLang moves the rows of an accepted path to the front; ring and sink follow, all read before any is written.
  Sinks are published by the committed length, so a shared block holds no rejected token. Rows of rejected tokens need
  nothing: no read goes past ``L``.
* Draft models: SGLang's own classes, pool and backend, on the same slots. A token costs what it takes in both caches.
  Chains only, because tokens of a chain lie where their positions are. The tables of verification are written by a
  kernel inside the recorded step, so no step waits for lengths on the host.
* Answers may differ from those of decoding by as little as ``n - 1`` tokens more in 16 bits.
"""
