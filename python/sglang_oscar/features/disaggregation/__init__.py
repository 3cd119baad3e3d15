"""Prefill and decode on servers of their own: what goes over, who may take it, and the seats that wait for it.

* Pages of rows go over as SGLang sends any page, and the recent window as a component of a request's state that SGLang
  has for rings. Sinks are computed again on the decode server, once for all requests that begin alike.
* What both servers must have in common (formats, windows, ranks) is part of the type that SGLang compares first.
* A request has a seat before its prompt arrives, with ring and sink blocks (``--disaggregation-decode-extra-slots``).
* Retraction keeps rows and recent window of a request in tensors of the host.
* Embeddings in place of token ids are turned away: the decode server could not compute their sink.
"""
