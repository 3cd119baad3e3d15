#!/usr/bin/env bash
# All checks on a fresh machine: formatting and types, then the tests. Arguments go to pytest.
#
# `scripts/test.sh core` starts no server and leaves out what is marked slow: kernels against the reference, rotation files
# and fits, the life of requests, and the contract with SGLang, in six minutes on two idle cores.
#
# Sources of the supported releases of SGLang are fetched first (OSCAR_RELEASES says where to). One int2 server of each is
# started, and the oldest and the newest are tested further; OSCAR_TEST_RELEASES says which releases instead ("all", or
# versions with commas between).
#
# Test files run two at a time, which takes 14 GB or so: servers spend much of their start waiting. OSCAR_TEST_WORKERS
# says how many.
#
# Without a GPU, servers and other Python processes that tests start are forked from a process that has imported the
# third-party libraries and most of SGLang already (test/support/warm); OSCAR_TEST_WARM=0 starts every process anew. A
# file named by OSCAR_TEST_WARM_LOG lists what was forked, why the rest was not, and why one more such process was made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
ruff check .
ruff format --check .
mypy
python scripts/releases.py
tests=()
if [ "${1:-}" = core ]; then
  shift
  tests=(-m "not server and not slow" test/contract test/kernels test/model test/rotation test/unit)
fi
exec python -m pytest --numprocesses "${OSCAR_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "${tests[@]}" "$@"
