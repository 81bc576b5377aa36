#!/usr/bin/env bash
# A chat model tuned by LoRA, as with axolotl or transformers' Trainer: conversations in JSON lines.
#
#   examples/first_hour/chat.sh WEIGHTS CHATS.jsonl QUESTION
#
# WEIGHTS is a model in transformers' form, a folder or a name on the hub. Each line of CHATS.jsonl has `messages`.
set -euo pipefail
weights=$1 chats=$2 question=$3 output=${OUTPUT:-runs/chat}

penstock train --from "$weights" --task chat --data "text:$chats" --recipe.lora.rank "${RANK:-16}" \
    --epochs "${EPOCHS:-3}" --batch-size "${BATCH:-4}" --model.sequence "${LENGTH:-2048}" --output "$output"
penstock evaluate "$output" --data "text:$chats"
penstock generate "$output" "$question" --chat --max_tokens "${TOKENS:-32}"
# penstock serve "$output" answers OpenAI's clients on port 8000, until Ctrl-C.
