#!/usr/bin/env bash
# RLOO with rewards from servers of your own (see docs/rewards.md for the protocol). Start one first, for example
#   python examples/python/reward_server.py --port 5000
#   REWARD=http://127.0.0.1:5000/get_reward bash examples/scripts/train_ppo_remote_reward.sh [more flags]
# Several servers: commas between the addresses. SMALL=1 runs a tiny model on CPUs; EXPLAIN=1 only says what the
# flags come to.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
INPUT_KEY=${INPUT_KEY:-prompt}
LABEL_KEY=${LABEL_KEY:-label}
REWARD=${REWARD:-http://127.0.0.1:5000/get_reward}
TEMPLATE=(--apply_chat_template)
if [ "${SMALL:-0}" = 1 ]; then TEMPLATE=(); fi

run train_ppo_ray \
  --pretrain "$MODEL" \
  --prompt_data "$PROMPTS" \
  --input_key "$INPUT_KEY" \
  --label_key "$LABEL_KEY" \
  --remote_rm_url "$REWARD" \
  --actor_num_gpus_per_node 4 \
  --ref_num_gpus_per_node 4 \
  --colocate_actor_ref \
  --vllm_num_engines 4 \
  --vllm_tensor_parallel_size 1 \
  --advantage_estimator rloo \
  --n_samples_per_prompt 8 \
  --init_kl_coef 1e-3 \
  --rollout_batch_size 128 \
  --train_batch_size 1024 \
  --micro_train_batch_size 2 \
  --micro_rollout_batch_size 4 \
  --max_len 6144 \
  --max_new_tokens 4096 \
  --actor_learning_rate 5e-7 \
  --zero_stage 3 \
  --param_dtype bf16 \
  --gradient_checkpointing \
  --packing_samples \
  --save_path "$OUT/rloo" \
  --ckpt_path "$OUT/ckpt_rloo" \
  "${TEMPLATE[@]}" "${SMALL_PPO[@]}" "$@"
