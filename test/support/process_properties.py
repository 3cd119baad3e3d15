"""Prints as JSON what a program can ask of the interpreter that runs it."""

import gc
import json
import multiprocessing.process
import os
import resource
import signal
import sys
import threading

main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "flags": repr(sys.flags),
            "argv": sys.argv,
            "orig_argv": sys.orig_argv,
            "path": sys.path,
            "executable": [sys.executable, sys.prefix],
            "xoptions": [sys._xoptions, sys.warnoptions],
            "environment": dict(os.environ),
            "cwd": os.getcwd(),
            "original": multiprocessing.process.ORIGINAL_DIR,
            "main": {
                name: repr(value).partition(" at 0x")[0] for name, value in vars(main).items() if name.startswith("__")
            },
            "is main": main.__dict__ is globals(),
            "signals": {number: repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())},
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "limits": [resource.getrlimit(kind) for kind in range(resource.RLIM_NLIMITS)]
            if hasattr(resource, "RLIM_NLIMITS")
            else resource.getrlimit(resource.RLIMIT_NOFILE),
            "cores": sorted(os.sched_getaffinity(0)),
            "umask": os.umask(0o22),
            "parent": os.getppid(),
            "files": sorted(number for number in range(100) if os.path.exists(f"/proc/self/fd/{number}")),
            "streams": [
                [s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.isatty()]
                for s in (sys.stdin, sys.stdout, sys.stderr)
            ],
            "threads": threading.active_count(),
            "thread": threading.current_thread().name,
            "gc": [gc.isenabled(), gc.get_threshold()],
            "recursion": sys.getrecursionlimit(),
            "group": os.getpgrp() == os.getpid(),
            "session": os.getsid(0) == os.getpid(),
            "tested": [
                name for name in sys.modules if name.startswith(("sglang", "sgl_", "oscar", "support", "reference"))
            ],
            "meta path": [repr(finder) for finder in sys.meta_path][:3],
        }
    ),
    flush=True,
)
os._exit(0)  # clearing thousands of modules takes a second
