#!/usr/bin/env bash
# Measures and tests on a machine with GPUs, side by side where a part takes one GPU, whatever fails.
# Full logs are in $OUT (default /tmp/gpu_session); the end of each is printed when all are done.
# Usage: benchmarks/gpu_session.sh PART GPU [PART GPU ...], for example: hybrid 0 tests 1
#        GPU is an index, or several: 0,1
set -u
cd "$(dirname "$0")/.."
export OUT=${OUT:-/tmp/gpu_session} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} RAY_ADDRESS=local HF_HUB_OFFLINE=1
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

part() {
  local work=/tmp/openrlhf_bench_$1
  case $1 in
    hybrid) python3 benchmarks/hybrid_step.py --work "$work" --zero_stage 3 --steps 4 --json "$OUT/hybrid.json" ;;
    hybrid_plain) # without gradient checkpointing
      python3 benchmarks/hybrid_step.py --work "$work" --zero_stage 3 --steps 4 --no_checkpointing \
        --json "$OUT/hybrid_plain.json" ;;
    hybrid_7b) python3 benchmarks/hybrid_step.py --work "$work" --size 7b --gpus 4 --zero_stage 3 --steps 3 \
      --json "$OUT/hybrid_7b.json" -- --check_weight_sync ;;
    generation) python3 benchmarks/generation.py --work "$work" --json "$OUT/generation.json" ;;
    training) python3 benchmarks/training.py --work "$work" --stages 2 --checkpointing on off --json "$OUT/training.json" ;;
    logprobs) python3 benchmarks/logprobs.py ;;
    parallel) bash tests/gpu/run.sh -q --timeout 200 tests/gpu/test_parallel_on_gpu.py ;;
    tests) bash tests/gpu/run.sh -q -x --timeout 500 ;;
    e2e) python3 -m pytest -q --timeout 500 tests/e2e/test_ppo_command.py ;;
    placements*) # placements, placements:CASE:CASE
      python3 benchmarks/placements.py --gpus "$(tr ',' '\n' <<<"$2" | wc -l)" --steps "${STEPS:-40}" \
        --out /tmp/openrlhf_bench_placements $(tr ':' ' ' <<<"${1#placements}") ;;
    *) echo "unknown part $1" ;;
  esac
}

names=() pids=()
while (($# > 1)); do
  (CUDA_VISIBLE_DEVICES=$2 part "$1" "$2" >"$OUT/$1.log" 2>&1; echo "$1: exit $? after $SECONDS s" >>"$OUT/$1.log") &
  names+=("$1") pids+=($!)
  shift 2
done
wait "${pids[@]}"
for name in "${names[@]}"; do
  printf '\n=== %s\n' "$name"
  tail -n "${LINES_EACH:-22}" "$OUT/$name.log" | cut -c1-200
done
# The logs of the processes of each run, their ends.
for log in /tmp/openrlhf_bench_*/run_*/ckpt/run/logs/*.log /tmp/openrlhf_bench_*/*/run/logs/*.log; do
  [ -f "$log" ] && tail -c 30000 "$log" >"$OUT/logs_$(tr '/' '_' <<<"${log#/tmp/openrlhf_bench_}")"
done
true
