# Sourced by the other scripts: makes an environment with the pinned project, once, and activates it.
#
# SGLANG chooses the release of SGLang: one that scripts/constraints has pins for. Its environment is .venv for the
# default and .venv-RELEASE for another, or where OSCAR_VENV says.
# PYTHON chooses the interpreter; by default the first of python3.11, python3.12, python3.10, python3 that the release
# takes. An environment is made anew when dependencies, pins, its place, its release or a chosen interpreter change.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
default_sglang=0.5.23
sglang=${SGLANG:-$default_sglang}
venv=${OSCAR_VENV:-$root/.venv}
if [ -z "${OSCAR_VENV:-}" ] && [ "$sglang" != "$default_sglang" ]; then venv=$root/.venv-$sglang; fi

pins() {  # pins [RELEASE]: names of the files with pins, of all releases or of one
  (cd "$root/scripts/constraints" && ls | grep -E "^sglang${1:-.*}-python3\.[0-9]+\.txt$")
}

check_release() {
  if [[ ! $sglang =~ ^[0-9.]+$ ]] || ! pins "${sglang//./\\.}" >/dev/null; then
    echo "error: SGLANG=$sglang has no pins; choose one of: $(pins | sed -E 's/^sglang(.*)-python.*/\1/' | sort -uV | paste -sd ' ')" >&2
    return 1
  fi
}

version_of() {  # version_of PYTHON: its major and minor version, nothing where it does not run
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() {
  local candidate candidates=(python3.11 python3.12 python3.10 python3)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if [ -f "$root/scripts/constraints/sglang$sglang-python$(version_of "$candidate").txt" ]; then
      echo "$candidate"
      return
    fi
  done
  echo "error: SGLang $sglang needs Python $(pins "${sglang//./\\.}" | sed -E 's/.*-python(.*)\.txt/\1/' | sort -V | paste -sd ' ' | sed 's/ / or /g')${PYTHON:+, and $PYTHON is not}; set PYTHON to one" >&2
  return 1
}

current() {  # current NAME SUM: whether the environment was made for this checksum
  [ "$(cat "$venv/.oscar-$1" 2>/dev/null)" = "$2" ]
}

check_place() {  # what is there must be an environment of this script's, finished or not: it is removed
  if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -e "$venv/.oscar-begun" ] && [ ! -e "$venv/.oscar-packages" ]; then
    echo "error: $venv is not empty and no environment that this script made; remove it, or set OSCAR_VENV to a new folder" >&2
    return 1
  fi
}

check_room() {
  local folder free
  folder=$(dirname "$venv")
  while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
  free=$(df --output=avail --block-size=1G "$folder" | tail -1)
  if [ "$free" -lt 12 ]; then
    echo "error: $venv takes 9 to 11 GB, and its disk has $((free)) GB left; make room, or set OSCAR_VENV to another place" >&2
    return 1
  fi
}

make_environment() {
  local python version packages project
  packages=$({ grep -E '^(dependencies|plots|eval|dev) ' "$root/pyproject.toml" && cat "$root/scripts/constraints/sglang$sglang"-*.txt && echo "$root ${PYTHON:-}"; } | sha256sum)
  project=$(sha256sum <"$root/pyproject.toml")
  if ! current packages "$packages"; then
    check_place
    python=$(find_python)
    version=$(version_of "$python")
    [ -d "$venv" ] || check_room
    echo "making $venv with Python $version, SGLang $sglang and the pinned packages (9 to 11 GB, some minutes)"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.oscar-begun"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --progress-bar off "pip==25.3"
    "$venv/bin/python" -m pip install --quiet --progress-bar off --no-compile \
      --constraint "$root/scripts/constraints/sglang$sglang-python$version.txt" --editable "$root[dev]"
    # pip would compile with one core. Templates among the files cannot be compiled, and need not be.
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
    echo "$packages" >"$venv/.oscar-packages"
    echo "$project" >"$venv/.oscar-project"
  elif ! current project "$project"; then
    "$venv/bin/python" -m pip install --quiet --progress-bar off --no-deps --editable "$root"
    echo "$project" >"$venv/.oscar-project"
  fi
}

check_release
make_environment
export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1
# Every process of every server would compile this project anew.
unset PYTHONDONTWRITEBYTECODE
