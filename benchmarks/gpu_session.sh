#!/usr/bin/env bash
# Runs the GPU tests and the hybrid step, one after the other, whatever fails; full logs in $OUT, the ends on stdout.
# Usage: benchmarks/gpu_session.sh GPUS [hybrid_step.py flags]
set -u
cd "$(dirname "$0")/.."
gpus=$1
shift
OUT=${OUT:-/tmp/gpu_session}
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
python3 benchmarks/hybrid_step.py --gpus "$gpus" --json "$OUT/hybrid_step.json" "$@" >"$OUT/hybrid_step.log" 2>&1
echo "hybrid_step: exit $?"
tail -n 45 "$OUT/hybrid_step.log"
mkdir -p "$OUT/logs"
for log in /tmp/openrlhf_bench/run_*/ckpt/run/logs/*.log; do
  tail -c 60000 "$log" >>"$OUT/logs_$(basename "$log")"
done
