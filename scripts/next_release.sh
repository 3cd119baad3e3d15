#!/usr/bin/env bash
# What a release of SGLang that is not supported yet would change for this plugin.
#
#     bash scripts/next_release.sh 0.5.24                       # from the package index; candidates (0.5.24rc1), too
#     bash scripts/next_release.sh sglang-0.5.24rc1-....whl     # a wheel
#     SOURCES=1 bash scripts/next_release.sh 0.5.24             # its sources only, with the dependencies at hand: minutes
#
# Makes an environment of the release with its own dependencies (.venv-next, or where OSCAR_VENV says; 9 to 11 GB), runs
# the contract tests and those of served releases on it, on a CPU, and prints what moved: touch points, arguments
# without a row, classes. The exit status is 0 where nothing did.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# != 1 ]; then
  echo "usage: bash scripts/next_release.sh VERSION or WHEEL.whl" >&2
  exit 2
fi
if [ -n "${SOURCES:-}" ]; then
  source "$scripts/environment.sh"
else
  root=$(dirname "$scripts")
  venv=${OSCAR_VENV:-$root/.venv-next}
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/.oscar-next" ]; then
    echo "error: $venv is not empty and no environment that this script made; remove it, or set OSCAR_VENV to a new folder" >&2
    exit 1
  fi
  what=$1
  case $what in *.whl) what=$(realpath "$what") ;; *) what="sglang==$what" ;; esac
  if [ "$(cat "$venv/.oscar-next" 2>/dev/null)" != "$what" ]; then
    echo "making $venv with $what and its dependencies (9 to 11 GB, some minutes)"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.oscar-next"
    "${PYTHON:-python3.11}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --progress-bar off "pip==25.3"
    # The plugin without what it needs: pip would take a supported SGLang.
    "$venv/bin/python" -m pip install --quiet --progress-bar off "$what" "typer>=0.20" pytest pytest-timeout \
      pytest-xdist hypothesis requests
    "$venv/bin/python" -m pip install --quiet --progress-bar off --no-deps --editable "$root"
    echo "$what" >"$venv/.oscar-next"
  fi
  export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1
fi
exec python "$scripts/next_release.py" "$1"
