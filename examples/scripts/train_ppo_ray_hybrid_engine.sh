#!/usr/bin/env bash
# PPO with the hybrid engine: actor, critic, reference and vLLM share the same 8 GPUs, and each sleeps while the
# others work. Rewards come from a Python function. There are as many engines as fill the GPUs: --actor_num_nodes 2 is
# all that a second node takes.
#   MODEL=... PROMPTS=... REWARD=... bash examples/scripts/train_ppo_ray_hybrid_engine.sh [more flags]
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
  --critic_num_gpus_per_node 8 \
  --ref_num_gpus_per_node 8 \
  --reward_num_gpus_per_node 8 \
  --vllm_tensor_parallel_size 2 \
  --colocate_all_models \
  --vllm_enable_sleep \
  --deepspeed_enable_sleep \
  --vllm_gpu_memory_utilization 0.5 \
  --advantage_estimator gae \
  --init_kl_coef 0.01 \
  --rollout_batch_size 128 \
  --n_samples_per_prompt 8 \
  --train_batch_size 1024 \
  --micro_train_batch_size 2 \
  --micro_rollout_batch_size 4 \
  --max_len 10240 \
  --max_new_tokens 8192 \
  --actor_learning_rate 5e-7 \
  --critic_learning_rate 9e-6 \
  --zero_stage 3 \
  --param_dtype bf16 \
  --gradient_checkpointing \
  --packing_samples \
  --save_path "$OUT/ppo" \
  --ckpt_path "$OUT/ckpt_ppo" \
  --save_steps 20 \
  "${TEMPLATE[@]}" "${SMALL_PPO[@]}" "$@"
