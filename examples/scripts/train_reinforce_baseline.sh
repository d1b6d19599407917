#!/usr/bin/env bash
# REINFORCE++-baseline: the mean of a group as baseline, advantages normalised over the batch, KL in the loss.
#   MODEL=... PROMPTS=... bash examples/scripts/train_reinforce_baseline.sh [more flags]
# SMALL=1 runs a tiny model on CPUs; EXPLAIN=1 only says what the flags come to.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
INPUT_KEY=${INPUT_KEY:-prompt}
LABEL_KEY=${LABEL_KEY:-label}
REWARD=${REWARD:-examples/python/math_reward_func.py}
TEMPLATE=(--apply_chat_template)
if [ "${SMALL:-0}" = 1 ]; then TEMPLATE=(); fi

run train_ppo_ray \
  --pretrain "$MODEL" \
  --prompt_data "$PROMPTS" \
  --input_key "$INPUT_KEY" \
  --label_key "$LABEL_KEY" \
  --remote_rm_url "$REWARD" \
  --actor_num_gpus_per_node 8 \
  --ref_num_gpus_per_node 8 \
  --vllm_tensor_parallel_size 1 \
  --colocate_all_models \
  --vllm_enable_sleep \
  --deepspeed_enable_sleep \
  --vllm_gpu_memory_utilization 0.6 \
  --advantage_estimator reinforce_baseline \
  --n_samples_per_prompt 8 \
  --init_kl_coef 1e-5 \
  --use_kl_loss \
  --kl_estimator k2 \
  --rollout_batch_size 128 \
  --train_batch_size 1024 \
  --use_dynamic_batch \
  --train_max_tokens_per_gpu 16384 \
  --max_len 6144 \
  --max_new_tokens 4096 \
  --actor_learning_rate 5e-7 \
  --zero_stage 3 \
  --param_dtype bf16 \
  --gradient_checkpointing \
  --save_path "$OUT/reinforce" \
  --ckpt_path "$OUT/ckpt_reinforce" \
  "${TEMPLATE[@]}" "${SMALL_PPO[@]}" "$@"
