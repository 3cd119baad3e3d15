#!/usr/bin/env bash
# Runs `oscar COMMAND ...` for the scripts below this folder. Arguments of the form NAME=value become environment
# variables, so `save_qkv_qwen3-8B.sh DUMP_KVCACHE_TOKENS=8000` and `DUMP_KVCACHE_TOKENS=8000 save_qkv_qwen3-8B.sh` are
# the same. The word behind an option is its value, whatever its form: `--dataset-path GPQA=copy.csv`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# Options without a value.
flags=" --covariances --report --no-report --file-clips --trust-remote-code --help "
arguments=()
value=false
for argument in "$@"; do
    if ! $value && [[ "$argument" =~ ^[A-Z][A-Z0-9_]*= ]]; then
        export "$argument"
        continue
    fi
    arguments+=("$argument")
    if ! $value && [[ "$argument" == --* && "$argument" != *=* && "$flags" != *" $argument "* ]]; then
        value=true
    else
        value=false
    fi
done
export OSCAR_ROOT="${OSCAR_ROOT:-$here}"
# DUMP_KVCACHE=1 and friends belong to the dump's own server.
unset DUMP_KVCACHE DUMP_KVCACHE_DIR
exec "${PYTHON:-python}" -m oscar_tools "${arguments[@]}"
