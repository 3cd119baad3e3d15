"""Tiers below the GPU: rows in host memory and in storage, moved in pages.

* Pages: rows by layer and side, and a trailer with a digest of key and rows (against damage, not forgery).
  A damaged page is a miss, and its file is removed. A page with a number that is not finite is not stored.
* Keys: SGLang's say neither dtype nor rotation, so they are salted with formats, weights (samples of the loaded files),
  the rank's heads and page size. Weights cannot be updated while storage is attached.
* Waiting: rows of a layer may be on their way when its attention begins; the backend waits for them first.
* Files are moved by two processes of their own, which get lines and share 128 MB of memory. One thread of the scheduler
  would be slow (it has the interpreter back only 5 ms after a call of the operating system), many would be in its way.
* Unfinished files are locked while they are written; whoever begins to write removes those that nobody has locked.
* nixl, Mooncake and hf3fs get the halves of a page, each a multiple of 4,096 bytes.
* A draft model's rows have a host pool and files of their own, of the same kind; keys then name its weights, too. A
  page without them is none.
* A hit is as long as that of the rank that has least of it.
"""
