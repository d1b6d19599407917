#!/usr/bin/env bash
# Installs SLURM for the test of the sbatch script, where that is possible: on Debian and Ubuntu, as root. Elsewhere
# the test is skipped and says so.
set -euo pipefail
if command -v slurmctld >/dev/null && command -v munged >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "[setup] no SLURM here, and it can't be installed (needs root and apt-get): its test will be skipped"
  exit 0
fi
echo "[setup] installing SLURM for one test"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
if ! { apt-get update -q && apt-get install -q -y --no-install-recommends slurm-wlm munge; } >"$log" 2>&1; then
  tail -5 "$log"
  echo "[setup] SLURM could not be installed: its test will be skipped"
fi
rm -f "$log"
