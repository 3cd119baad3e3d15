"""Tiers below the GPU: rows in host memory and in storage, moved in pages.

* Pages: all rows of a page by layer and side, and a trailer with a digest of key and rows (against damage, not forgers).
  A damaged page is a miss, and its file is removed. A page with a number that is not finite is not stored.
* Keys: SGLang's say neither dtype nor rotation, so they are salted with formats, weights (samples of the loaded files),
  the rank's heads and page size. Weights cannot be updated while storage is attached.
* Waiting: rows of a layer may be on their way when its attention begins; the backend waits for them first.
* Files are moved by two processes of their own: a thread of the scheduler is slow (it has the interpreter back only 5 ms
  after each call of the operating system), many threads are in its way. They are sent lines and share 128 MB of memory.
* Unfinished files are locked while they are written; whoever begins to write removes those that nobody has locked.
* nixl, Mooncake and hf3fs get the halves of a page, each a multiple of 4,096 bytes.
* A hit is as long as that of the rank that has least of it.
"""
