"""Prefill and decode on servers of their own: what goes over, who may take it, and the seats that wait for it.

* Pages of rows go over as SGLang sends any page, and the recent window as a component of a request's state that SGLang
  has for rings. Sinks are computed again on the decode server, once for all requests that begin alike.
* What both servers must have in common (formats, windows, ranks, drafts) is part of the type that SGLang compares
  first.
* Rows of a draft model go over behind those of the model, and what it has to begin with in SGLang's metadata. The first
  step of a request that was retracted drafts from an older token.
* A request has a seat before its prompt arrives, with ring and sink blocks (``--disaggregation-decode-extra-slots``).
* Retraction keeps rows, those of drafts too, and the recent window of a request in tensors of the host.
* Embeddings in place of token ids are turned away: the decode server could not compute their sink.
"""
