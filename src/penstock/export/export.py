"""A trained model in forms that other programs run: torch's exported program, the same compiled by AOTInductor, ONNX
with or without a cache, and folders of CTranslate2 and compressed-tensors. Each is run once after it is written, and
must reproduce the model's outputs.

For a quantised model, ONNX and compressed-tensors hold the same integers and scales, the other forms the dequantised
values.

Exported programs accept any batch size and any length that the model allows, for inputs named as in `inputs_of`.
Without a cache a decoder returns logits of all its tokens. A model with several heads returns an output for each head,
or each chosen head, by name, and needs only the inputs of these heads.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.boundary.files import printable, quoted, shown
from penstock.boundary.hub import local_weights
from penstock.config.formats import StoredFormat
from penstock.config.graph import Graph, PatchInput, TokenInput
from penstock.config.model import ModelConfig, stacks, vocabulary_of
from penstock.errors import ConfigError, DataError, EnvironmentProblem, NumericError
from penstock.export import ExportForm, ExportType
from penstock.export.ctranslate import write_ctranslate
from penstock.export.gguf_file import write_gguf
from penstock.export.onnx_cache import write_cached
from penstock.export.onnx_file import (
    PROCESSOR,
    image_facts,
    packages,
    processor_of,
    quantise_graph,
    write_onnx,
)
from penstock.infer.usual import usual_in
from penstock.models.anatomy import set_switch
from penstock.models.convert import from_pretrained, model_in
from penstock.models.convert.files import settings_in
from penstock.models.convert.pretrained import rounded_weights, save_compressed, save_values
from penstock.models.model import Model
from penstock.models.rounded import RoundedWeight
from penstock.products.rounded import store_rounded

_log = logging.getLogger(__name__)
CLOSE: dict[ExportType, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 1e-1}
"""Largest allowed difference of an output from the model's, relative to the largest output, by the type of weights."""
MOST_SAMPLES = 1 << 12
SAMPLES, TOKENS, TARGETS = 2, 7, 5
"""Sizes of the example; other sizes work as well."""
CHECKED = 3, 11, 9
"""Sizes of the checking run; they differ from the example's, so that a fixed size is detected."""
PROGRAM, COMPILED, ONNX = "model.pt2", "compiled.pt2", "model.onnx"


def export(
    model: str | Path, target: Path, form: ExportForm, kind: ExportType = "fp32", *, heads: Sequence[str] = ()
) -> tuple[Path, float]:  # fmt: skip
    """Write the model of a folder in another form, with its weights in a type, into the folder `target`; returns the
    written path, and the difference of its outputs from the model's, relative to the largest output. `heads` selects
    the outputs of a model with several heads; empty: all.

    Raises ConfigError for a folder without a model, for an unknown head, and for a model that has no such form,
    EnvironmentProblem without the required packages or compiler, and NumericError if outputs differ.
    """
    if form not in ("ctranslate2", "gguf") and kind != "fp32":
        raise ConfigError(
            f"Only --to ctranslate2 and gguf have weights in {kind}; leave --type out for {form}."
        )
    if heads and form in ("onnx-cache", "ctranslate2", "compressed-tensors", "gguf"):
        raise ConfigError(f"--to {form} knows no heads; leave --head out, or choose --to onnx.")
    folder = local_weights(model)
    rounded = rounded_weights(folder)
    config = model_in(folder)
    if config is not None and any(stack.experts for stack in stacks(config)):
        raise ConfigError(
            f"The model has mixtures of experts, which --to {form} cannot hold: an expert has other tokens each time. "
            "Serve the folder with penstock serve."
        )
    _report_uncarried(folder, config, form)
    if form == "ctranslate2":
        with tempfile.TemporaryDirectory() as values:
            if rounded:  # its converter reads transformers' format
                save_values(from_pretrained(folder), values, source=folder)
                folder = Path(values)
            outputs, expected = write_ctranslate(
                folder, target, kind, lambda module: inputs_of(module, *CHECKED)
            )
        return target, _difference(outputs, expected, target, kind)
    module = from_pretrained(folder).eval()
    if form == "gguf":
        return write_gguf(folder, module, target, kind)
    if form == "compressed-tensors":
        return target, _write_compressed(folder, module, target, rounded)
    set_switch(module, "attention", "sdpa")
    if form == "onnx-cache":
        packages()
        path, outputs, expected = write_cached(module, target)
        return path, _difference(outputs, expected, path)
    written = _of_heads(module, heads)
    inputs = inputs_of(written, *CHECKED)
    rounds = form == "onnx" and bool(rounded)
    if rounds:
        store_rounded(module, rounded)
    with torch.inference_mode():
        by_model = _all_outputs(written(*inputs.values()))
    if rounds:
        quantise_graph(module, rounded)
    path, by_program = _write_form(
        written, target, form, inputs, _facts(folder, module, target, inputs, form)
    )
    pairs = zip(by_program, by_model, strict=True)
    return path, max(_difference(*pair, path, "int8" if rounds else kind) for pair in pairs)


def _report_uncarried(folder: Path, config: ModelConfig | None, form: ExportForm) -> None:
    """Warn of settings of transformers' generation that the form cannot hold."""
    if config is None or not config.graph.generates or form == "compressed-tensors":
        return
    usual = usual_in(folder, vocabulary_of(config))
    pieces = any(" " in word for word in usual.fields.get("bias", ()))
    held = {"suppress_tokens", *(() if pieces else ("bad_words_ids",))} if form == "ctranslate2" else set()
    unmet = () if form == "ctranslate2" else usual.unmet  # opening the model names these
    if names := [*(name for name in usual.met if name not in held), *unmet]:
        _log.warning(
            "--to %s does not hold what generation_config.json asks for; ask for it where you generate: %s.",
            form, quoted("; ".join(names), 600),
        )  # fmt: skip


def _facts(
    folder: Path, module: Model, target: Path, inputs: Mapping[str, Tensor], form: ExportForm
) -> dict[str, str]:
    """Metadata of an ONNX file of images; their preprocessing is written next to it."""
    graph = module.graph
    images = [source for source in graph.inputs_of(PatchInput) if source.name in inputs]
    if form != "onnx" or not images or graph.condition is not None:
        return {}
    settings = settings_in(folder)
    processor = processor_of(folder, images[0], settings.get("image_range", 255))
    target.mkdir(parents=True, exist_ok=True)
    (target / PROCESSOR).write_text(json.dumps(processor, indent=2) + "\n")
    return image_facts(processor, images[0], settings.get("id2label"))


def _write_compressed(
    folder: Path, module: Model, target: Path, rounded: Mapping[str, tuple[StoredFormat, RoundedWeight]]
) -> float:
    """Write a quantised model for compressed-tensors, read its weights again and compare their values."""
    if not rounded:
        raise ConfigError(
            f"{shown(folder)} has no weights in few bits, as --to compressed-tensors writes; quantise it first with "
            "penstock compress --quantise, or choose --to transformers."
        )
    save_compressed(module, target, rounded, source=folder)
    inputs = inputs_of(module, *CHECKED).values()
    with torch.inference_mode():
        return _difference(from_pretrained(target).eval()(*inputs), module(*inputs), target)


def load_package(path: str | Path) -> Any:
    """A package compiled by AOTInductor, as a function of the model's inputs in their order (see `inputs_of`). It runs
    machine code from the file, so open only files from people you trust.

    Raises ConfigError if there is no such file, and DataError for another kind of file.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{shown(Path(path))} is not a file; give a {COMPILED} that penstock export wrote.")
    try:
        return torch._inductor.aoti_load_package(str(path))
    except RuntimeError as error:
        why = " ".join(printable(str(error)).split())[:300].rstrip(".")
        raise DataError(f"{shown(Path(path))} is not a package of AOTInductor: {why}.") from None


class SomeHeads(nn.Module):
    """A model with several heads as a function of positional inputs that returns the outputs of some heads."""

    def __init__(self, model: Model, heads: Sequence[str]) -> None:
        super().__init__()
        self.model, self.heads = model, tuple(heads)
        self.graph = model.graph
        self.names = (*inputs_of(self, 1, 1, 1),)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        outputs = self.model(**dict(zip(self.names, args, strict=True)))
        return tuple(outputs[name] for name in self.heads)


def _of_heads(module: nn.Module, heads: Sequence[str]) -> nn.Module:
    """The model with some of its heads (by default all); itself if it has one head. Raises ConfigError for others."""
    assert isinstance(module, Model)
    known = [head.name for head in module.graph.heads]
    if wrong := [name for name in heads if name not in known]:
        raise ConfigError(f"The model has no head {quoted(wrong[0])}; its heads are {', '.join(known)}.")
    return module if len(known) == 1 else SomeHeads(module, list(dict.fromkeys(heads)) or known)


def _all_outputs(outputs: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _write_form(
    module: nn.Module, target: Path, form: ExportForm, inputs: dict[str, Tensor], facts: Mapping[str, str]
) -> tuple[Path, tuple[Tensor, ...]]:
    """Write a form's file; returns the file, and its program's outputs for the inputs."""
    if form == "onnx":
        packages()
    if form == "aoti":
        _require_compiler()
    target.mkdir(parents=True, exist_ok=True)
    program = export_program(module)
    if form == "onnx":
        path = target / ONNX
        names = module.heads if isinstance(module, SomeHeads) else ("outputs",)
        return path, tuple(write_onnx(program, path, [*inputs], names, facts)(inputs))
    if form == "aoti":
        path = target / COMPILED
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        with torch.inference_mode():
            return path, _all_outputs(load_package(path)(*inputs.values()))
    path = target / PROGRAM
    torch.export.save(program, path)
    return path, _all_outputs(torch.export.load(path).module()(*inputs.values()))


def _require_compiler() -> None:
    names = (os.environ.get("CXX"), "g++", "clang++")
    if not any(name and shutil.which(name) for name in names):
        raise EnvironmentProblem(
            "AOTInductor needs a C++ compiler, and there is none here. Install one, as with apt-get install g++, or "
            "set CXX; penstock doctor tries it."
        )


def inputs_of(module: nn.Module, samples: int, tokens: int, targets: int) -> dict[str, Tensor]:
    """Random inputs of a model, by name and in order: `images`, and `times` and `classes` if they are noisy; `tokens`,
    and for an encoder `lengths`; or `source`, `target` and `lengths` of the source. For `SomeHeads`, the inputs of its
    heads, and `memory_index` if one of them reads a run that attends to one of several memories."""
    graph: Graph = module.graph  # type: ignore[assignment]
    runs = graph.runs if not isinstance(module, SomeHeads) else graph.runs_of(module.heads)
    wanted = {one.name for run in runs for one in graph.inputs_through(run)}
    draw = torch.Generator().manual_seed(0)
    decoder_inputs = {graph.text.name} if graph.remembered and graph.text is not None else set()
    inputs: dict[str, Tensor] = {}
    for source in (one for one in graph.inputs if one.name in wanted):
        if isinstance(source, PatchInput):
            size = source.image_size
            inputs[source.name] = torch.randn(samples, source.channels, size, size, generator=draw)
        else:
            shape = samples, targets if source.name in decoder_inputs else tokens
            inputs[source.name] = torch.randint(0, source.vocabulary, shape, generator=draw)
    if graph.condition is not None:
        inputs["times"] = torch.rand(samples, generator=draw, dtype=torch.float64)
        if graph.condition.classes:
            inputs["classes"] = torch.randint(0, graph.condition.classes + 1, (samples,), generator=draw)
    if graph.padded in wanted:
        inputs["lengths"] = (tokens - torch.arange(samples) % 3).clamp(min=1)
    memories = max(len(run.memories) for run in runs)
    if isinstance(module, SomeHeads) and memories > 1:
        inputs["memory_index"] = torch.arange(samples) % memories
    return inputs


def export_program(module: nn.Module) -> torch.export.ExportedProgram:
    """The model's forward pass as torch's exported program."""
    example = inputs_of(module, SAMPLES, TOKENS, TARGETS)
    with torch.no_grad():
        return torch.export.export(
            module, tuple(example.values()), dynamic_shapes={"args": _sizes(module, example)}, strict=False
        )


def _sizes(module: nn.Module, example: dict[str, Tensor]) -> tuple[dict[int, Any], ...]:
    """The sizes of each input that can vary."""
    graph: Graph = module.graph  # type: ignore[assignment]
    samples = torch.export.Dim("samples", min=1, max=MOST_SAMPLES)
    most = {source.name: source.length for source in graph.inputs_of(TokenInput)}
    # Samples of several inputs in one run are equally long.
    beside = {name: run.reads for run in graph.runs for name in run.more_inputs if run.reads in example}
    lengths = {name: torch.export.Dim(name, min=2, max=most[name]) for name in example if name in most}
    return tuple(
        {0: samples} | ({1: lengths[beside.get(name, name)]} if name in lengths else {}) for name in example
    )


def _difference(outputs: Tensor, expected: Tensor, path: Path, kind: ExportType = "fp32") -> float:
    difference = float((outputs.detach() - expected).abs().max() / expected.abs().max())
    if not difference <= CLOSE[kind]:
        raise NumericError(f"{path} has other outputs than the model, by {difference:.2g} of their largest.")
    return difference
