#!/usr/bin/env bash
# All checks on a fresh machine: formatting and types, then the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
