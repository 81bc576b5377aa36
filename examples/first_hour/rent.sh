#!/usr/bin/env bash
# GPUs to be rented for a large model: which, how many, for how long, in which layout, and what they cost.
#
#   examples/first_hour/rent.sh CONFIG
#
# CONFIG is a model's config.json as it is on the Hugging Face hub, or a preset's name. Nothing is downloaded or run.
set -euo pipefail
model=$1 gpus=${GPUS:-64} batch=${BATCH:-256} price=${PRICE:-2.5}

penstock plan "$model" --machine h100 --gpus "$gpus" --global-batch "$batch" --tokens "${TOKENS:-1e11}" --price "$price"
penstock plan "$model" --machine h100 --gpus "$gpus" --global-batch "$batch" --explain "tp=8"   # why not tp=8?
penstock plan "$model" --machine h100 --against a100-80g --gpus "$gpus" --global-batch "$batch" --tokens "${TOKENS:-1e11}"
penstock deploy "$model" --machine h100 --gpus 1..8 --requests "rate=2 in=512 out=128" --p95-latency 30s --price "$price"
