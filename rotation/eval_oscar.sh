#!/usr/bin/env bash
# Any benchmarks for any model: BENCHMARKS=paper, niah, or names with commas.
for argument in "$@"; do [[ "$argument" == MODEL=* ]] && MODEL="${argument#MODEL=}"; done
: "${MODEL:?set MODEL to a hub id, a path or a folder name of this directory}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/oscar.sh" eval "$MODEL" "$@"
