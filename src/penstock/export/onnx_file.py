"""ONNX files: torch's exported programs written as such, and run in ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.boundary.packages import package
from penstock.config.graph import PatchInput
from penstock.config.theirs.read import read_json
from penstock.cpu import this_cpu

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""A function from inputs by name to outputs in their order."""


def packages() -> tuple[Any, Any]:
    """onnx and onnxruntime. Raises EnvironmentProblem unless these and what writes ONNX are there."""
    names = ("onnx", "onnxruntime", "onnxscript")  # torch's exporter needs the last
    onnx, onnxruntime, _ = (package(name, f"ONNX needs the package {name}", "export") for name in names)
    return onnx, onnxruntime


PROCESSOR = "preprocessor_config.json"


def processor_of(folder: Path, source: PatchInput, white: float = 255) -> dict[str, Any]:
    """How images become inputs, in the form of transformers' preprocessor_config.json: that of a model's folder, or
    what training here does."""
    if (folder / PROCESSOR).is_file():
        return read_json(folder / PROCESSOR)
    side = {"height": source.image_size, "width": source.image_size}
    middle = [0.5] * source.channels
    return {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": source.image_size},
        "do_center_crop": True, "crop_size": side, "resample": 2, "do_rescale": True, "rescale_factor": 1 / white,
        "do_normalize": True, "image_mean": middle, "image_std": middle, "do_convert_rgb": source.channels == 3,
    }  # fmt: skip


def image_facts(processor: Mapping[str, Any], source: PatchInput, names: Any) -> dict[str, str]:
    """Metadata of an ONNX file of images, each as JSON: `image_size`, `image_mean` and `image_std` of
    inputs that were in [0, 1], and `labels`, where `names`, as of id2label, says them."""
    facts = {
        "image_size": source.image_size,
        **{name: processor.get(name) for name in ("image_mean", "image_std")},
    }
    if isinstance(names, dict):
        facts["labels"] = [str(names[number]) for number in sorted(names, key=int)]
    return {name: json.dumps(fact, ensure_ascii=False) for name, fact in facts.items() if fact is not None}


def open_session(path: Path) -> Any:
    """The file in ONNX Runtime on the CPU. Without VNNI its int8 kernels add pairs of products in 16 bits, where they
    saturate (its documentation, "Quantize ONNX models"), so that there the same numbers are multiplied in fp32."""
    _, onnxruntime = packages()
    options = onnxruntime.SessionOptions()
    if not this_cpu().vnni:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def write_onnx(
    program: torch.export.ExportedProgram,
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    facts: Mapping[str, str] | None = None,
) -> Run:
    """Write a program with these names of its inputs and outputs and these `facts` as metadata, check its graph, and
    open it in ONNX Runtime."""
    onnx, _ = packages()
    onnx_program = torch.onnx.export(
        program, dynamo=True, verbose=False, input_names=[*inputs], output_names=[*outputs]
    )
    assert onnx_program is not None
    onnx_program.model.metadata_props.update(facts or {})
    onnx_program.save(str(path))
    onnx.checker.check_model(str(path), full_check=True)
    session = open_session(path)

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: value.contiguous().numpy() for name, value in feeds.items()})
        return [torch.from_numpy(value) for value in outputs]

    return run
