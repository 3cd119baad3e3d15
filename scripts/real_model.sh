#!/usr/bin/env bash
# Fetches a real language model, small SmolLM2-135M-Instruct or the one that --model names, and writes it in BF16 to
# results. Arguments go to scripts/real_model.py (--help lists them).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/real_model.py" "$@"
