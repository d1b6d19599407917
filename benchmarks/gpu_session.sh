#!/usr/bin/env bash
# Measures and tests on a machine with GPUs, side by side where a part takes one GPU, whatever fails.
# Full logs are in $OUT (default /tmp/gpu_session); the end of each is printed when all are done.
# Usage: benchmarks/gpu_session.sh PART GPU [PART GPU ...] [then PART GPU ...], for example: hybrid 0 tests 1
#        GPU is an index, or several: 0,1; a part is ended after $LIMIT seconds (default 500)
#        SHARED_GPU=2 lets one GPU stand for two (tests/gpu/shared), for example: SHARED_GPU=2 ... tests 0,1
# Models and runs are in $WORK (default /tmp; a folder in memory saves reading and writing of large models).
set -u
cd "$(dirname "$0")/.."
export OUT=${OUT:-/tmp/gpu_session} WORK=${WORK:-/tmp} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} RAY_ADDRESS=local HF_HUB_OFFLINE=1
[ -n "${SHARED_GPU:-}" ] && export PYTHONPATH=$PWD/tests/gpu/shared:$PYTHONPATH
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
python3 - <<'END' || exit 3
import sys
from importlib.util import find_spec
missing = [name for name in ("torch", "transformers", "vllm", "deepspeed", "ray", "datasets") if not find_spec(name)]
sys.exit(f"this Python ({sys.executable}) lacks {', '.join(missing)}" if missing else 0)
END

# Twice a second, the share of time in which a GPU was at work.
nvidia-smi --query-gpu=timestamp,index,utilization.gpu --format=csv,noheader -lms 500 >"$OUT/utilization.csv" &
watching=$!
trap 'kill $watching' EXIT

run() { timeout --kill-after=20 "${LIMIT:-500}" "$@"; }

hybrid() { # hybrid WORK JSON FLAGS...: a short run of benchmarks/hybrid_step.py
  run python3 benchmarks/hybrid_step.py --work "$1" --json "$OUT/$2.json" "${@:3}"
}

part() {
  local work=$WORK/openrlhf_bench gpus offload=
  gpus=$(tr ',' '\n' <<<"$2" | wc -l)
  case $1 in
    # All 512 sequences of the reference work at once need 9 GiB of cache.
    hybrid) hybrid "$work" "$1" --zero_stage 3 --steps 4 -- --vllm_kv_cache_gib 24 ;;
    hybrid_plain) hybrid "$work" "$1" --zero_stage 3 --steps 4 --no_checkpointing -- --vllm_kv_cache_gib 24 ;;
    hybrid_fp32_head) hybrid "$work" "$1" --zero_stage 3 --steps 4 --no_checkpointing -- --vllm_kv_cache_gib 24 \
      --fp32_lm_head ;;
    hybrid_half) hybrid "$work" "$1" --zero_stage 3 --steps 4 -- --vllm_kv_cache_gib 24 \
      --gradient_checkpointing_every 2 ;;
    hybrid_7b) # the optimizer of 7B fits onto two cards only if these are large
      (($(nvidia-smi -i 0 --query-gpu=memory.total --format=csv,noheader,nounits) * gpus < 220000)) && offload=--adam_offload
      hybrid "$work" "$1" --size 7b --gpus "$gpus" --zero_stage 3 --steps 2 --prompts 32 \
        -- --check_weight_sync $offload ;;
    lora_7b) hybrid "$work" "$1" --size 7b --zero_stage 2 --steps 3 --prompts 16 \
      -- --check_weight_sync --lora_rank 16 --actor_learning_rate 1e-4 ;;
    moe) hybrid "$work" "$1" --size moe_3b --zero_stage 3 --steps 3 --prompts 16 -- --check_weight_sync --vllm_kv_cache_gib 8 ;;
    long_32k) hybrid "$work" "$1" --zero_stage 2 --steps 3 --prompts 4 --samples 2 --prompt_tokens 32000 \
      --new_tokens 512 --max_tokens 32768 ;;
    generation) run python3 benchmarks/generation.py --work "$work" --steps "${STEPS:-5}" --json "$OUT/$1.json" ;;
    generation_logprobs)
      run python3 benchmarks/generation.py --work "$work" --steps "${STEPS:-5}" --logprobs --json "$OUT/$1.json" ;;
    start) # a start with cold caches, and one each with kept ones
      run python3 benchmarks/engine_start.py --size 1.5b --work "$work" --rounds 1 --json "$OUT/start.json" ;;
    training) run python3 benchmarks/training.py --work "$work" --stages 2 --checkpointing on half off \
      --json "$OUT/training.json" ;;
    bare) # forward, and forward with backward, of as many tokens as the reference work, for its experience phase
      run python3 benchmarks/training.py --work "$work" --micro_batches 20 --checkpointing on off --stages \
        --json "$OUT/bare.json" ;;
    logprobs) run python3 benchmarks/logprobs.py ;;
    weight_sync*) # weight_sync, weight_sync:CASE:CASE
      run python3 benchmarks/weight_sync.py --work "$work" --gpus "$gpus" --json "$OUT/weight_sync.json" --check \
        $(tr ':' ' ' <<<"${1#weight_sync}") ;;
    parallel) run bash tests/gpu/run.sh -q --timeout 200 tests/gpu/test_{parallel,weight_check}_on_gpu.py ;;
    tests) run bash tests/gpu/run.sh -v --timeout 400 --durations 10 tests/gpu ;;
    e2e) run python3 -m pytest -q --timeout 500 tests/e2e/test_ppo_command.py ;;
    placements*) # placements, placements:CASE:CASE
      run python3 benchmarks/placements.py --gpus "$gpus" --per_gpu "${PER_GPU:-1}" --steps "${STEPS:-40}" \
        --out "${work}_placements" $(tr ':' ' ' <<<"${1#placements}") ;;
    *) echo "unknown part $1" ;;
  esac
}

names=() pids=()
while (($#)); do
  if [ "$1" = then ]; then
    wait "${pids[@]}"
    shift
    continue
  fi
  name=${1%%:*}
  (from=$SECONDS; CUDA_VISIBLE_DEVICES=$2 part "$1" "$2" >"$OUT/$name.log" 2>&1
   echo "$name: exit $? after $((SECONDS - from)) s" >>"$OUT/$name.log") &
  names+=("$name") pids+=($!)
  shift 2
done
wait "${pids[@]}"
for name in "${names[@]}"; do
  printf '\n=== %s\n' "$name"
  tail -n "${LINES_EACH:-22}" "$OUT/$name.log" | cut -c1-200
done
# The logs of the processes of each run, their ends.
for log in "$WORK"/openrlhf_bench*/*/{ckpt/run,run}/{metrics.jsonl,logs/*.log}; do
  [ -f "$log" ] && (echo "== $log"; tail -c 20000 "$log") >>"$OUT/processes.log"
done
true
