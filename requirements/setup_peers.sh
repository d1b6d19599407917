#!/usr/bin/env bash
# Makes .venv-peers: the packages of .venv, seen through a path file, and those of peers.lock. `make test-peers` calls
# it; a second call finds the stamp of the first and returns at once. Nothing of it is needed by openrlhf itself.
set -euo pipefail
cd "$(dirname "$0")/.."

LOCK=requirements/peers.lock
stamp=.venv-peers/.setup-$(cat "$LOCK" requirements/setup_peers.sh requirements/cpu.lock | sha256sum | cut -c1-16)
if [ -e "$stamp" ] && .venv-peers/bin/python -c 'import trl' 2>/dev/null; then
  exit 0
fi
rm -rf .venv-peers
.venv/bin/python -m venv .venv-peers
# addsitedir also reads the path files over there, among them the one that leads to this checkout.
site=lib/$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')/site-packages
echo "import site; site.addsitedir('$PWD/.venv/$site')" >".venv-peers/$site/shared.pth"
.venv-peers/bin/python -m pip install -q --no-deps -r "$LOCK"
touch "$stamp"
