#!/usr/bin/env bash
# The main job on a fresh machine: make an environment, calibrate the shipped model (with --real a real one, in chat),
# serve it with a 2-bit KV cache and compare. Arguments go to scripts/quickstart.py (--help lists them).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/quickstart.py" "$@"
