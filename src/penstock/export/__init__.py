"""Export: trained models in forms that other programs run."""

from __future__ import annotations

from typing import Literal

ExportForm = Literal["onnx", "onnx-cache", "torch", "aoti", "ctranslate2", "compressed-tensors", "gguf"]
ExportType = Literal["fp32", "bf16", "fp16", "int8"]
"""Types of the weights in `ctranslate2` and `gguf`; the other forms have fp32."""
