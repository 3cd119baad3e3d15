#!/usr/bin/env bash
# The tests of prefill and decode on servers of their own. They need Mooncake, which is installed into the environment, and
# system libraries that it loads even for TCP: on Debian and Ubuntu, apt-get install libibverbs1 libnl-3-200
# libnl-route-3-200 librdmacm1. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
pip install --quiet --progress-bar off --no-deps "mooncake-transfer-engine-non-cuda==0.3.13.post1"
python -c "import mooncake.engine" 2>/dev/null || {
  echo "error: $(python -c 'import mooncake.engine' 2>&1 | tail -1); install libibverbs1 libnl-3-200 libnl-route-3-200 librdmacm1" >&2
  exit 1
}
exec python -m pytest test/server/test_disaggregation.py "$@"
