"""ONNX files: torch's exported programs written as ONNX, also in int8, and run in ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.boundary.packages import package
from penstock.config.formats import PRODUCTS, StoredFormat
from penstock.config.graph import PatchInput
from penstock.config.theirs.read import read_json
from penstock.cpu import this_cpu
from penstock.models.rounded import MOST, RoundedWeight

Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
"""A function from inputs by name to outputs in their order."""


def packages() -> tuple[Any, Any]:
    """The packages onnx and onnxruntime. Raises EnvironmentProblem unless these and torch's exporter are installed."""
    names = ("onnx", "onnxruntime", "onnxscript")  # torch's exporter needs the last
    onnx, onnxruntime, _ = (package(name, f"ONNX needs the package {name}", "export") for name in names)
    return onnx, onnxruntime


PROCESSOR = "preprocessor_config.json"


def processor_of(folder: Path, source: PatchInput, white: float = 255) -> dict[str, Any]:
    """Preprocessing of images in the form of transformers' preprocessor_config.json: the model folder's own, or that of
    training here."""
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
    """Metadata of an ONNX file of images, each as JSON: `image_size`, `image_mean` and `image_std` of inputs that were
    in [0, 1], and `labels`, from `names` in the form of id2label."""
    facts = {
        "image_size": source.image_size,
        **{name: processor.get(name) for name in ("image_mean", "image_std")},
    }
    if isinstance(names, dict):
        facts["labels"] = [str(names[number]) for number in sorted(names, key=int)]
    return {name: json.dumps(fact, ensure_ascii=False) for name, fact in facts.items() if fact is not None}


def open_session(path: Path) -> Any:
    """The file in ONNX Runtime on the CPU. Without VNNI its int8 kernels add pairs of products in 16 bits, where they
    saturate (its documentation, "Quantize ONNX models"), so without it the same integers are multiplied in fp32."""
    _, onnxruntime = packages()
    options = onnxruntime.SessionOptions()
    if not this_cpu().vnni:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, inputs: Sequence[str], outputs: Sequence[str],
    facts: Mapping[str, str] | None = None,
) -> Run:  # fmt: skip
    """Write a program with these input and output names and `facts` as metadata, check its graph, and open it in ONNX
    Runtime."""
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


_OPSET = 19
"""Version of ONNX's operators; later versions have these as well."""


class QuantisedLinear(nn.Module):
    """A linear as ONNX's integer operators, which torch can export but not run."""

    def __init__(self, rounded: RoundedWeight, bias: Tensor | None, *, rounds_inputs: bool) -> None:
        super().__init__()
        self.bias, self.rounds_inputs, self.static = bias, rounds_inputs, rounded.input_scale is not None
        scale = torch.tensor(1.0) if rounded.input_scale is None else rounded.input_scale
        tensors = {"numbers": rounded.numbers, "scales": rounded.scales[:, 0].clone(), "one": scale.clone()}
        zeros = torch.zeros(len(rounded.scales), dtype=torch.int8)
        for name, tensor in {**tensors, "zeros": zeros, "zero": zeros[0].clone()}.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor | None = None
        if self.rounds_inputs:
            if not self.static:
                rows = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / MOST
                x = x / rows
            x = _operator("QuantizeLinear", x, self.one, self.zero, torch.int8)
            x = _dequantised(x, self.one, self.zero)
        weight = _dequantised(self.numbers, self.scales, self.zeros, axis=0)
        if rows is None:
            return F.linear(x, weight, self.bias)
        product = F.linear(x, weight) * rows
        return product if self.bias is None else product + self.bias


def _operator(
    name: str, x: Tensor, scale: Any, zero: Any, dtype: torch.dtype, axis: int | None = None
) -> Tensor:
    how: Any = {} if axis is None else {"axis": axis}
    return torch.onnx.ops.symbolic(name, (x, scale, zero), how, dtype=dtype, shape=x.shape, version=_OPSET)


def _dequantised(numbers: Any, scale: Any, zero: Any, axis: int | None = None) -> Tensor:
    return _operator("DequantizeLinear", numbers, scale, zero, torch.float32, axis)


def quantise_graph(model: nn.Module, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]]) -> None:
    """Replace the named linears by ONNX's integer operators, in place."""
    for name, (form, weight) in rounded.items():
        parent, _, child = name.rpartition(".")
        holder = model.get_submodule(parent)
        old_bias: Tensor | None = cast(Any, holder.get_submodule(child)).bias
        bias = None if old_bias is None else old_bias.detach().float()
        if PRODUCTS[form].group:
            plain = nn.Linear(weight.numbers.shape[1], len(weight.numbers), bias=False)
            plain.weight = nn.Parameter(weight.values())
            plain.register_parameter("bias", None if bias is None else nn.Parameter(bias))
            setattr(holder, child, plain)
        else:
            setattr(holder, child, QuantisedLinear(weight, bias, rounds_inputs=form == "int8"))
