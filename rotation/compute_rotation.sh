#!/usr/bin/env bash
# Phase 2 for any model: MODEL is a hub id or path.
for argument in "$@"; do [[ "$argument" == MODEL=* ]] && MODEL="${argument#MODEL=}"; done
: "${MODEL:?set MODEL to a hub id, a path or a folder name of this directory}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/oscar.sh" rotate "$MODEL" "$@"
