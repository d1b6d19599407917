#!/usr/bin/env bash
# Makes .venv with everything openrlhf needs on a machine without a GPU. `make setup` calls it; a second call finds
# the stamp of the first and returns at once. Settings, all optional:
#   PYTHON       the Python 3.11 to use (default: python3.11, then python3)
#   TORCH_INDEX  address of a package index with CPU builds of torch, where the configured ones have none
set -euo pipefail
cd "$(dirname "$0")/.."

UV_VERSION=0.13.9
LOCK=requirements/cpu.lock
TORCH=$(grep '^torch==' "$LOCK")
stamp=.venv/.setup-$(cat "$LOCK" setup.py requirements.txt requirements/*.txt "requirements/setup_cpu.sh" | sha256sum | cut -c1-16)
if [ -e "$stamp" ] && .venv/bin/python -c 'import sys' 2>/dev/null; then
  exit 0
fi

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 found (the pins of $LOCK are for it). Install it, or name it: make setup PYTHON=/path/to/python3.11"
}

if ! [ -x .venv/bin/python ]; then
  python=$(find_python)
  say "making .venv with $python"
  "$python" -m venv .venv || fail "$python -m venv failed; Debian and Ubuntu have it in the package python3.11-venv"
fi
.venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  fail ".venv has $(.venv/bin/python -V), but the pins are for Python 3.11. Remove .venv and run this again"
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null

# uv installs the 3 GB in about 40 s, pip in about two minutes; the result is the same.
if .venv/bin/python -m pip install -q "uv==$UV_VERSION" 2>/dev/null; then
  # uv doesn't read pip's find-links setting, and a machine may have its torch builds there.
  export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(.venv/bin/python -m pip config get global.find-links 2>/dev/null | tr '\n' ' ' || true)}}
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
  install() { .venv/bin/uv pip install -q --python .venv/bin/python --compile-bytecode "$@"; }
  index() { install --index "$1" "${@:2}"; }
else
  say "uv $UV_VERSION isn't available here; installing with pip"
  install() { .venv/bin/python -m pip install -q "$@"; }
  index() { install --extra-index-url "$1" "${@:2}"; }
fi

say "installing $TORCH"
if [ -n "${TORCH_INDEX:-}" ]; then
  index "$TORCH_INDEX" --no-deps "$TORCH" || fail "$TORCH isn't in TORCH_INDEX=$TORCH_INDEX"
elif ! install --no-deps "$TORCH"; then
  say "no CPU build of torch in the configured package indexes: installing ${TORCH%+cpu} with its GPU libraries"
  say "(about 3 GB more; set TORCH_INDEX to an index that has CPU builds to avoid that)"
  install "${TORCH%+cpu}" || fail "neither $TORCH nor ${TORCH%+cpu} can be installed; see docs/installation.md"
fi

say "installing $(grep -c '==' "$LOCK") pinned packages (40 s to 2 min)"
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
grep -v '^torch==' "$LOCK" >"$rest"
install --no-deps -r "$rest"
install --no-deps --no-build-isolation -e .
rm -f .venv/.setup-*
touch "$stamp"
say "done"
