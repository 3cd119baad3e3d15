"""Python processes that start warm: forked from a process that has imported the third-party libraries already.

Half of a test run used to be imports: a server is three processes or more, and each of them imports PyTorch,
Transformers and some forty others. ``client`` stands in for the function of the standard library that starts processes
(``subprocess`` and ``multiprocessing`` share it). A launch of this interpreter becomes a request to a ``fork_server``,
which has imported what ``preload`` lists and nothing else: of SGLang what a worker has imported before its
plugins are loaded, and never a package of this project. ``rule`` says which launches have to start anew.
"""
