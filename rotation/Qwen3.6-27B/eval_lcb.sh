#!/usr/bin/env bash
# Phase 3: LiveCodeBench v6 at 128K generated tokens, BF16 against OSCAR.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../oscar.sh" eval Qwen3.6-27B --benchmarks lcb_v6_128k "$@"
