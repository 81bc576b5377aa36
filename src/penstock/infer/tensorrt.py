"""TensorRT through ONNX: whether its parser knows every operator of a graph, and the command that builds an engine.

The table of operators is that of onnx-tensorrt, `docs/operators.md` for TensorRT 10.15, as far as exported models may
come across them: those that it lists as supported and which are no part of other kinds of networks.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.boundary.files import write_text
from penstock.config.model import ViTConfig, positions
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.infer.onnx_file import packages

OPSETS = range(9, 25)
"""Versions of ONNX's operators that the parser reads."""
_WORDS = """
Abs Add And ArgMax ArgMin Attention AveragePool BatchNormalization Cast CastLike Ceil Clip Concat Constant
ConstantOfShape Conv Cos CumSum DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor
Gather GatherElements GatherND Gelu Gemm GlobalAveragePool Greater GreaterOrEqual GroupNormalization HardSigmoid
HardSwish Identity If InstanceNormalization IsInf IsNaN LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax
MatMul Max MaxPool Mean Min Mish Mod Mul Neg NonZero Not OneHot Or Pad Pow QuantizeLinear RMSNormalization Range
Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum
ReduceSumSquare Relu Reshape Resize RotaryEmbedding Round ScatterElements ScatterND Shape Sigmoid Sign Sin Size
Slice Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor
"""
KNOWN = frozenset(_WORDS.split())
"""Operators that the parser knows. `Loop` is left out: what it carries must keep its shape there."""
DOMAINS = ("", "ai.onnx")
BUILD = "build_engine.sh"
_LEAST, _USUAL, _MOST = (1, 2), (8, 128), (32, 512)
"""Samples and tokens for which an engine is built; it is fastest for the second."""


def unknown(path: Path) -> list[str]:
    """Operators of a graph that TensorRT's parser does not know, each once, and what else it cannot read."""
    onnx, _ = packages()
    model = onnx.load(str(path), load_external_data=False)
    found = [
        f"opset {one.version}"
        for one in model.opset_import
        if one.domain in DOMAINS and one.version not in OPSETS
    ]
    names = (
        node.op_type if node.domain in DOMAINS else f"{node.domain}.{node.op_type}"
        for node in _nodes(model.graph)
    )
    return list(dict.fromkeys([*found, *(name for name in names if name not in KNOWN)]))


def _nodes(graph: Any) -> Iterator[Any]:
    """All nodes of a graph, and of the graphs inside it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def command(path: Path, module: Any, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """What builds an engine beside an ONNX file, for the least, the usual and the largest sizes of its inputs."""
    config = module.config
    most = min(_MOST[1], *positions(config)) if not isinstance(config, ViTConfig) else 0
    profiles = {
        name: ",".join(
            f"{key}:{'x'.join(map(str, _shape(tensor, samples, min(tokens, most))))}"
            for key, tensor in inputs.items()
        )
        for name, (samples, tokens) in {"min": _LEAST, "opt": _USUAL, "max": _MOST}.items()
    }
    words = ["trtexec", f"--onnx={path.name}", f"--saveEngine={path.stem}.engine", "--skipInference"]
    return [*words, *(f"--{name}Shapes={shapes}" for name, shapes in profiles.items())]


def _shape(tensor: torch.Tensor, samples: int, tokens: int) -> tuple[int, ...]:
    """Of an input: images (B, C, H, W), tokens (B, N) or lengths (B,)."""
    return (samples, tokens) if tensor.dim() == 2 else (samples, *tensor.shape[1:])


def write_command(path: Path, module: Any, inputs: Mapping[str, torch.Tensor]) -> Path:
    """Write the script that builds the engine of an ONNX file beside it.

    Raises ConfigError for a graph with an operator that the parser does not know.
    """
    if names := unknown(path):
        raise ConfigError(
            f"TensorRT's parser does not know {', '.join(names)}, which this model's graph has; use ONNX Runtime."
        )
    script = path.with_name(BUILD)
    line = shlex.join(command(path, module, inputs))
    about = f"# Builds a TensorRT engine from {path.name}; add --bf16 or --fp16 for half precision."
    write_text(script, f'#!/bin/sh\n{about}\ncd "$(dirname "$0")" && exec {line} "$@"\n')
    return script


def build(script: Path) -> bool:
    """Build the engine where TensorRT's `trtexec` and a GPU are; gives whether they are.

    Raises EnvironmentProblem where it fails.
    """
    if shutil.which("trtexec") is None or not torch.cuda.is_available():
        return False
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        raise EnvironmentProblem(f"trtexec has not built an engine: {' '.join(last)}")
    return True
