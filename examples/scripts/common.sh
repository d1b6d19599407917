# Sourced by the scripts of this folder. Gives them
#   PYTHON     the interpreter: .venv of this checkout if there is one, else python
#   run        runs a command of openrlhf; with EXPLAIN=1 it only says what the flags come to
#   SMALL=1    swaps models, data and sizes for a tiny run on CPUs that takes a minute or two
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python
  if [ -x .venv/bin/python ]; then PYTHON=$PWD/.venv/bin/python; fi
fi

run() { # COMMAND flags...
  if [ "${EXPLAIN:-0}" = 1 ]; then
    "$PYTHON" -m openrlhf.cli.main config explain "$@"
  else
    "$PYTHON" -m "openrlhf.cli.$1" "${@:2}"
  fi
}

# Flags of the small form; they come last, and later flags win.
SMALL_SFT=() SMALL_PPO=()
if [ "${SMALL:-0}" = 1 ]; then
  OUT=${OUT:-runs/small}
  MODEL=$OUT/model DATASET=$OUT/data/sft.jsonl PROMPTS=$OUT/data/rl.jsonl EVAL_PROMPTS=$OUT/data/held_out.jsonl
  REWARD=${REWARD:-examples/demo/reward_func.py}
  INPUT_KEY=input LABEL_KEY=answer OUTPUT_KEY=output
  # Without a cluster named, one of its own rather than any that happens to run on this machine.
  export HF_HUB_OFFLINE=1 RAY_ADDRESS=${RAY_ADDRESS:-local} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  "$PYTHON" examples/scripts/make_small.py "$OUT"
  SMALL_SFT=(--param_dtype fp32 --zero_stage 1 --train_batch_size 16 --micro_train_batch_size 8 --max_len 16
    --learning_rate 1e-3 --max_samples 256 --input_template '{}')
  SMALL_PPO=(--param_dtype fp32 --actor_num_gpus_per_node 1 --critic_num_gpus_per_node 1 --ref_num_gpus_per_node 1
    --reward_num_gpus_per_node 1 --vllm_num_engines 1 --vllm_tensor_parallel_size 1 --vllm_kv_cache_gib 0.125
    --rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 32 --micro_train_batch_size 8
    --micro_rollout_batch_size 8 --max_len 16 --max_new_tokens 4 --max_steps 2 --eval_steps -1 --save_steps -1
    --actor_learning_rate 1e-4 --input_template '{}')
  case "${EXPLAIN:-0}" in 1) ;; *) echo "small run in $OUT" ;; esac
else
  OUT=${OUT:-runs/$(basename "$0" .sh)}
fi
