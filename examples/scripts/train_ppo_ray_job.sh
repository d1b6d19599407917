#!/usr/bin/env bash
# Sends one of the scripts here to a running Ray cluster as a job, and follows it to its end. Start the cluster on
# its nodes first:
#   ray start --head --num-gpus 8                  # first node; prints the address
#   ray start --address FIRST_NODE:6379 --num-gpus 8      # every other node
#   bash examples/scripts/train_ppo_ray_job.sh [script] [flags for it]
# The job runs in this checkout, which every node must see under the same path. Settings:
#   RAY_DASHBOARD   where jobs are sent (http://127.0.0.1:8265)
set -euo pipefail
cd "$(dirname "$0")/../.."
RAY=ray
if [ -x .venv/bin/ray ]; then RAY=.venv/bin/ray; fi
script=examples/scripts/train_ppo_ray_hybrid_engine.sh
if [ $# -gt 0 ] && [ -f "$1" ]; then
  script=$1
  shift
fi

# A job has an environment of its own: what the scripts read goes along.
settings=()
for name in SMALL EXPLAIN PYTHON OUT MODEL PROMPTS INPUT_KEY LABEL_KEY REWARD HF_HUB_OFFLINE OMP_NUM_THREADS \
  "${!NCCL_@}" "${!GLOO_@}"; do
  if [ -n "${!name:-}" ]; then settings+=("$name=${!name}"); fi
done
dashboard=${RAY_DASHBOARD:-http://127.0.0.1:8265}
if [[ $dashboard =~ ^http://([^/:]+):([0-9]+) ]] &&
  ! timeout 10 bash -c "exec 3<>/dev/tcp/${BASH_REMATCH[1]}/${BASH_REMATCH[2]}" 2>/dev/null; then
  echo "error: no Ray dashboard answers at $dashboard; start Ray first (ray start --head), or set RAY_DASHBOARD" >&2
  exit 1
fi
exec "$RAY" job submit --address "$dashboard" \
  -- env "${settings[@]}" bash "$PWD/$script" "$@"
