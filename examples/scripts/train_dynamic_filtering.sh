#!/usr/bin/env bash
# DAPO-style training: groups that are all right or all wrong teach nothing and are replaced by new prompts, the
# upper clip radius is larger, and a penalty grows towards the length limit.
#   MODEL=... PROMPTS=... bash examples/scripts/train_dynamic_filtering.sh [more flags]
# SMALL=1 runs a tiny model on CPUs; EXPLAIN=1 only says what the flags come to.
set -euo pipefail
# A random model gets no sum right; how many digits it writes differs from sample to sample.
if [ "${SMALL:-0}" = 1 ]; then REWARD=${REWARD:-examples/scripts/small_reward.py}; fi
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-Qwen/Qwen2.5-7B}
PROMPTS=${PROMPTS:-zhuzilin/dapo-math-17k}
INPUT_KEY=${INPUT_KEY:-prompt}
LABEL_KEY=${LABEL_KEY:-label}
REWARD=${REWARD:-examples/python/math_reward_func.py}
TEMPLATE=(--apply_chat_template)
OVERLONG=(--overlong_buffer_len 1024 --overlong_penalty_factor 1.0)
if [ "${SMALL:-0}" = 1 ]; then TEMPLATE=() OVERLONG=(); fi

run train_ppo_ray \
  --pretrain "$MODEL" \
  --prompt_data "$PROMPTS" \
  --input_key "$INPUT_KEY" \
  --label_key "$LABEL_KEY" \
  --remote_rm_url "$REWARD" \
  --actor_num_gpus_per_node 8 \
  --vllm_tensor_parallel_size 1 \
  --colocate_all_models \
  --vllm_enable_sleep \
  --deepspeed_enable_sleep \
  --vllm_gpu_memory_utilization 0.6 \
  --advantage_estimator group_norm \
  --n_samples_per_prompt 8 \
  --dynamic_filtering \
  --dynamic_filtering_reward_range 0.0 1.0 \
  --eps_clip_low_high 0.2 0.28 \
  --init_kl_coef 0 \
  --rollout_batch_size 128 \
  --train_batch_size 256 \
  --micro_train_batch_size 2 \
  --micro_rollout_batch_size 4 \
  --max_len 6144 \
  --max_new_tokens 4096 \
  --actor_learning_rate 1e-6 \
  --zero_stage 3 \
  --param_dtype bf16 \
  --gradient_checkpointing \
  --packing_samples \
  --save_path "$OUT/dapo" \
  --ckpt_path "$OUT/ckpt_dapo" \
  "${OVERLONG[@]}" "${TEMPLATE[@]}" "${SMALL_PPO[@]}" "$@"
