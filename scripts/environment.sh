# Sourced by the other scripts: makes .venv with the pinned project, once, and activates it.
#
# PYTHON chooses the interpreter (3.10, 3.11 or 3.12); by default the first of python3.11, python3.12, python3.10,
# python3 that fits. The environment is made anew when dependencies, pins, its place or a chosen interpreter change.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${OSCAR_VENV:-$root/.venv}

fits() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate candidates=(python3.11 python3.12 python3.10 python3)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "error: need Python 3.10, 3.11 or 3.12; set PYTHON to one" >&2
  return 1
}

current() {  # current NAME SUM: whether the environment was made for this checksum
  [ "$(cat "$venv/.oscar-$1" 2>/dev/null)" = "$2" ]
}

make_environment() {
  local python version packages project
  packages=$({ grep -E '^(dependencies|plots|eval|dev) ' "$root/pyproject.toml" && cat "$root"/scripts/constraints/*.txt && echo "$root ${PYTHON:-}"; } | sha256sum)
  project=$(sha256sum <"$root/pyproject.toml")
  if ! current packages "$packages"; then
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "making $venv with Python $version and the pinned packages (about 9 GB, some minutes)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --progress-bar off "pip==25.3"
    "$venv/bin/python" -m pip install --quiet --progress-bar off \
      --constraint "$root/scripts/constraints/python$version.txt" --editable "$root[dev]"
    echo "$packages" >"$venv/.oscar-packages"
    echo "$project" >"$venv/.oscar-project"
  elif ! current project "$project"; then
    "$venv/bin/python" -m pip install --quiet --progress-bar off --no-deps --editable "$root"
    echo "$project" >"$venv/.oscar-project"
  fi
}

make_environment
export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1
cd "$root"
