#!/usr/bin/env bash
# A ViT tuned on photographs, as with timm's train.py: one folder for each class.
#
#   examples/first_hour/photos.sh PHOTOS [WEIGHTS]
#
# PHOTOS has a folder of images for each class. WEIGHTS is a ViT in transformers' form, a folder or a name on the hub;
# without it the preset MODEL learns from random weights. MORE has further options of `penstock train`.
set -euo pipefail
photos=$1 weights=${2:-} output=${OUTPUT:-runs/photos}
if [ -n "$weights" ]; then model=(--from "$weights"); else model=("${MODEL:-vit-s16}"); fi

penstock doctor                                        # what works on this machine, and how to mend what does not
penstock train "${model[@]}" --data "imagefolder:$photos" --epochs "${EPOCHS:-10}" --batch-size "${BATCH:-64}" \
    --output "$output" ${MORE:-}                       # OUTPUT/train.html is a page that follows it
penstock evaluate "$output" --data "imagefolder:$photos"
penstock classify "$output" "$photos" --output "$output/predictions.csv"
penstock export "$output/export" "$output/onnx" --to onnx
