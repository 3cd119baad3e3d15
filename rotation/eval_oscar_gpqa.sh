#!/usr/bin/env bash
# GPQA for any model.
for argument in "$@"; do [[ "$argument" == MODEL=* ]] && MODEL="${argument#MODEL=}"; done
: "${MODEL:?set MODEL to a hub id, a path or a folder name of this directory}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/oscar.sh" eval "$MODEL" --benchmarks gpqa "$@"
