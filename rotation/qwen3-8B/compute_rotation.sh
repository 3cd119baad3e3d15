#!/usr/bin/env bash
# Phase 2: fit the rotations of the newest dump.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../oscar.sh" rotate qwen3-8B "$@"
