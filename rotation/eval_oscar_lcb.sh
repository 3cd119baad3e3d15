#!/usr/bin/env bash
# LiveCodeBench v6 at 128K generated tokens for any model.
for argument in "$@"; do [[ "$argument" == MODEL=* ]] && MODEL="${argument#MODEL=}"; done
: "${MODEL:?set MODEL to a hub id, a path or a folder name of this directory}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/oscar.sh" eval "$MODEL" --benchmarks lcb_v6_128k "$@"
