#!/usr/bin/env bash
# The tests of prefill and decode on servers of their own, and of storage through Mooncake and nixl. Both are installed
# into the environment. Mooncake loads system libraries even for TCP: on Debian and Ubuntu, apt-get install libibverbs1
# libnl-3-200 libnl-route-3-200 librdmacm1. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
# nixl itself chooses between builds for CUDA 12 and 13; both send host memory, too. Mooncake's build without CUDA answers
# every request for a GPU's memory with an error.
mooncake=mooncake-transfer-engine-non-cuda
if command -v nvidia-smi >/dev/null; then mooncake=mooncake-transfer-engine-cuda13; fi
pip install --quiet --progress-bar off --no-deps "$mooncake==0.3.13.post1" "nixl==1.5.1" "nixl-cu13==1.5.1"
for module in mooncake.engine nixl; do
  python -c "import $module" 2>/dev/null || {
    echo "error: $(python -c "import $module" 2>&1 | tail -1); install libibverbs1 libnl-3-200 libnl-route-3-200 librdmacm1" >&2
    exit 1
  }
done
cd "$root"
exec python -m pytest test/server/test_disaggregation.py test/server/test_draft_disaggregation.py \
  test/server/test_hybrid_disaggregation.py test/server/test_window_disaggregation.py \
  test/server/test_vision_disaggregation.py test/server/test_storage_backends.py "$@"
