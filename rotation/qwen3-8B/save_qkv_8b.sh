#!/usr/bin/env bash
# The name that the public release uses for save_qkv_qwen3-8B.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/save_qkv_qwen3-8B.sh" "$@"
