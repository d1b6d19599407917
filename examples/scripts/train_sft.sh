#!/usr/bin/env bash
# Supervised fine-tuning of an 8B model on one node with 8 GPUs.
#   MODEL=... DATASET=... bash examples/scripts/train_sft.sh [more flags]
# SMALL=1 trains a tiny model on CPUs; EXPLAIN=1 only says what the flags come to.
set -euo pipefail
source "$(dirname "$0")/common.sh"

MODEL=${MODEL:-meta-llama/Llama-3.1-8B}
DATASET=${DATASET:-Open-Orca/OpenOrca}
INPUT_KEY=${INPUT_KEY:-question}
OUTPUT_KEY=${OUTPUT_KEY:-response}

sft() {
  if [ "${SMALL:-0}" = 1 ] || [ "${EXPLAIN:-0}" = 1 ]; then
    run train_sft "$@"
  else
    "$(dirname "$PYTHON")/deepspeed" --module openrlhf.cli.train_sft "$@"
  fi
}

sft \
  --pretrain "$MODEL" \
  --dataset "$DATASET" \
  --input_key "$INPUT_KEY" \
  --output_key "$OUTPUT_KEY" \
  --max_len 4096 \
  --train_batch_size 256 \
  --micro_train_batch_size 2 \
  --max_epochs 1 \
  --learning_rate 5e-6 \
  --zero_stage 3 \
  --param_dtype bf16 \
  --gradient_checkpointing \
  --packing_samples \
  --save_path "$OUT/sft" \
  --ckpt_path "$OUT/ckpt_sft" \
  --save_steps -1 \
  --logging_steps 1 \
  "${SMALL_SFT[@]}" "$@"
