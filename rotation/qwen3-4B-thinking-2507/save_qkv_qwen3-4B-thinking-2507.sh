#!/usr/bin/env bash
# Phase 1: dump queries, keys and values. Variables: docs/calibrate.md.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../oscar.sh" dump qwen3-4B-thinking-2507 "$@"
