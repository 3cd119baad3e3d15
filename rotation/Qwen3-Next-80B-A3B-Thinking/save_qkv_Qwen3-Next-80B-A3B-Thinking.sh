#!/usr/bin/env bash
# Phase 1: dump queries, keys and values. Variables: docs/calibrate.md.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../oscar.sh" dump Qwen3-Next-80B-A3B-Thinking "$@"
