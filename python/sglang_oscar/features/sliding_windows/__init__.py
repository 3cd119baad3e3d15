"""Models in which layers with a sliding window alternate with layers that attend to everything.

* Attention: the INT2 backend takes the layers without a window, SGLang's own the others. On GPUs that is Triton's
  unless ``--attention-backend`` says otherwise: with FlashAttention-3, exact rows differed more from SGLang's answers.
* Pools: SGLang's pair, of which one is the INT2 pool; also of models to which SGLang gives one pool (``two_pools``).
  SGLang would size the other as a share of it; here it is sized by what runs: for every request the window of its
  prompt and of its answer, as much for an idle conversation, and chunks in flight.
  ``--swa-full-tokens-ratio`` holds where it is given.
* Prefix hits need the windows in front of where they end, up to ``W`` tokens before the end of what is cached, so a
  request keeps ``W`` tokens and a page longer than SGLang would.
* Sink logits are a factor ``sigmoid(l - s)`` on the result by its log-sum-exp ``l``. They are absolute, so the recipes'
  centers, which shift all logits of a query, are added back to ``l``.
* Drafts: chains. SGLang's Triton counts a window from a token's place among the new ones, so what NGRAM hangs off the
  root to fill a step up sees some tokens less of it. A window is freed by what is committed, never by drafts.
* Host memory: SGLang's pair of host pools. A hit ends where either tier has the window before it. SGLang counts layers
  of a pair, which have no parts: files of some layers state codes for whole layers.
* Prefill and decode apart: SGLang sends the windows of a prompt as it does in 16 bits. Over nixl it sends values in
  steps of keys, so heads of two sizes go over Mooncake alone.
* Rotation files and dumps hold the layers with an INT2 cache only.
"""
