#!/usr/bin/env bash
# Phase 3: GPQA, BF16 against OSCAR.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../oscar.sh" eval Qwen3.6-27B --benchmarks gpqa "$@"
