#!/usr/bin/env bash
# Runs what needs a GPU, with the python on PATH (or PYTHON): bash tests/gpu/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "error: torch sees no GPU here" >&2; exit 1; }
# The entry point that brings our weight transfer into vLLM's processes exists only where openrlhf is installed.
"$python" -c 'from importlib.metadata import entry_points as e; import sys; sys.exit(not e(group="vllm.general_plugins", name="openrlhf_weight_sync"))' ||
  echo "note: openrlhf is not installed in this environment; pip install --no-deps -e . makes vLLM load its plugin"
exec "$python" -m pytest -m gpu "$@"
