#!/usr/bin/env bash
# Fetches a small real language model, SmolLM2-135M-Instruct, and writes it in BF16 to results/real_model. Arguments go
# to scripts/real_model.py (--help lists them).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/real_model.py" "$@"
