#!/usr/bin/env bash
# Phase 3: GPQA, BF16 against OSCAR.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../oscar.sh" eval qwen3-4B-thinking-2507 --benchmarks gpqa "$@"
