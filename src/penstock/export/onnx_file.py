"""ONNX files: torch's exported programs written as such, and run in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.boundary.packages import package

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""A function from inputs by name to outputs in their order."""


def packages() -> tuple[Any, Any]:
    """onnx and onnxruntime. Raises EnvironmentProblem unless these and what writes ONNX are there."""
    names = ("onnx", "onnxruntime", "onnxscript")  # torch's exporter needs the last
    onnx, onnxruntime, _ = (package(name, f"ONNX needs the package {name}", "export") for name in names)
    return onnx, onnxruntime


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> Run:
    """Write a program with these names of its inputs and outputs, check its graph, and open it in ONNX Runtime."""
    onnx, onnxruntime = packages()
    onnx_program = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=[*inputs], output_names=[*outputs]
    )
    assert onnx_program is not None
    onnx_program.save(str(path))
    onnx.checker.check_model(str(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: value.contiguous().numpy() for name, value in feeds.items()})
        return [torch.from_numpy(value) for value in outputs]

    return run
