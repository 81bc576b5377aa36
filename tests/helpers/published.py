"""Folders in the forms in which DeepSeek-V3 and gpt-oss are published: linears in fp8 by blocks, experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def in_fp8(folder: Path, published: Path) -> None:
    """Copy a folder with linears in fp8, and a scale for each block of 128 × 128 weights, of which the last are
    smaller. The folder gets the values that these weights have."""
    plain, stored = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    for name, weight in plain.items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        scales = torch.rand([-(-side // 128) for side in weight.shape]) + 0.5
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: len(weight), : weight.shape[1]]
        stored |= {name: (weight / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        plain[name] = (stored[name].float() * spread).bfloat16().float()
    _save(folder, plain, published, stored, quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])


def in_mxfp4(folder: Path, published: Path) -> None:
    """Copy a folder with other experts, drawn in MXFP4. The folder gets their values, in bf16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = load_file(folder / "model.safetensors")
    stored = dict(plain)
    for name, weight in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(119, 124, blocks.shape[:3], dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del stored[name]
            plain[name] = convert_moe_packed_tensors(blocks, scales).to(weight.dtype)
    _save(folder, plain, published, stored, quant_method="mxfp4")


def _save(
    folder: Path, plain: dict[str, Tensor], published: Path, stored: dict[str, Tensor], **form: Any
) -> None:
    shutil.copytree(folder, published)
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, published / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": form}
    (published / "config.json").write_text(json.dumps(values))
