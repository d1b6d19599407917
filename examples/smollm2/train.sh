#!/usr/bin/env bash
# Reinforcement learning of a real pretrained model, SmolLM2-135M-Instruct, on two CPU cores.
#   make smollm2-setup && bash examples/smollm2/train.sh [more flags]
# fp32, since CPUs without bf16 units train twice as fast in it. OUT names the folder (runs/smollm2). Once model and data
# are there, EXPLAIN=1 only says what the flags come to.
set -euo pipefail
OUT=${OUT:-runs/smollm2}
source "$(dirname "$0")/../scripts/common.sh"
export HF_HUB_OFFLINE=1 RAY_ADDRESS=${RAY_ADDRESS:-local}

if [ "${EXPLAIN:-0}" != 1 ]; then
  [ -e "$OUT/model/config.json" ] || "$PYTHON" examples/smollm2/convert.py "$OUT/model" --dtype float32
  [ -e "$OUT/data/held_out.jsonl" ] || "$PYTHON" examples/smollm2/make_data.py "$OUT/data"
fi

run train_ppo_ray \
  --pretrain "$OUT/model" \
  --prompt_data "$OUT/data/train.jsonl" \
  --eval_dataset "$OUT/data/held_out.jsonl" \
  --input_key prompt \
  --label_key answer \
  --apply_chat_template \
  --remote_rm_url examples/smollm2/reward_func.py \
  --advantage_estimator group_norm \
  --n_samples_per_prompt 8 \
  --init_kl_coef 0 \
  --rollout_batch_size 8 \
  --train_batch_size 64 \
  --micro_train_batch_size 16 \
  --micro_rollout_batch_size 16 \
  --num_episodes 1 \
  --max_steps 30 \
  --max_len 128 \
  --max_new_tokens 12 \
  --actor_learning_rate 2e-5 \
  --eval_before_train \
  --eval_steps 15 \
  --eval_n_samples_per_prompt 4 \
  --actor_num_gpus_per_node 1 \
  --vllm_num_engines 1 \
  --colocate_all_models \
  --enforce_eager \
  --zero_stage 2 \
  --param_dtype fp32 \
  --packing_samples \
  --save_path "$OUT/rl" \
  --ckpt_path "$OUT/ckpt" \
  --run_dir "$OUT/run" \
  "$@"
