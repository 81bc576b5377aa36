"""A trained model in forms that other programs run: torch's exported program, and ONNX. Each is run once after it is
written, and must give what the model gives.

Exported programs take batches and lengths of any size that the model has, on inputs named as in `inputs_of`. A decoder
gives logits of all its tokens, without a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.model import Seq2SeqConfig, ViTConfig
from penstock.errors import EnvironmentProblem, NumericError
from penstock.infer.settings import ExportForm
from penstock.models.anatomy import set_attention
from penstock.models.convert import from_pretrained
from penstock.models.convert.hub import local_weights

CLOSE = 1e-4
"""The most by which an output may differ from the model's, relative to its largest."""
MOST_SAMPLES = 1 << 12
SAMPLES, TOKENS, TARGETS = 2, 7, 5
"""Of the example; other sizes work as well."""
CHECKED = 3, 11, 9
"""Of the run that checks, so that a size that was frozen shows."""
FILES: dict[str, str] = {"torch": "model.pt2", "onnx": "model.onnx"}


def export(model: str | Path, target: Path, form: ExportForm) -> tuple[Path, float]:
    """Write the model in a folder in another form into the folder `target`; gives what was written, and by how much its
    outputs differ from the model's, relative to their largest.

    Raises ConfigError for a folder without a model, EnvironmentProblem without the packages that it needs,
    and NumericError where outputs differ.
    """
    folder = local_weights(model)
    module = from_pretrained(folder).eval()
    set_attention(module, "sdpa")
    target.mkdir(parents=True, exist_ok=True)
    path = target / FILES[form]
    wanted = inputs_of(module, *CHECKED)
    with torch.inference_mode():
        expected = module(*wanted.values())
    if form == "onnx":
        found = _onnx(module, path, wanted)
    else:
        program = exported(module)
        torch.export.save(program, path)
        found = torch.export.load(path).module()(*wanted.values())
    return path, _difference(found.detach(), expected, path)


def inputs_of(module: nn.Module, samples: int, tokens: int, targets: int) -> dict[str, Tensor]:
    """Drawn inputs of a model, by name and in their order: `images`; `tokens` and of an encoder `lengths`; or `source`,
    `target` and `lengths` of the source."""
    config: Any = module.config
    draw = torch.Generator().manual_seed(0)
    if isinstance(config, ViTConfig):
        size = config.image_size
        return {"images": torch.randn(samples, config.channels, size, size, generator=draw)}

    def words(count: int) -> Tensor:
        return torch.randint(0, config.vocabulary, (samples, count), generator=draw)

    lengths = tokens - torch.arange(samples) % 3
    if isinstance(config, Seq2SeqConfig):
        return {"source": words(tokens), "target": words(targets), "lengths": lengths}
    return {"tokens": words(tokens)} | ({} if config.family == "decoder" else {"lengths": lengths})


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    """The model's forward pass as torch's exported program."""
    example = inputs_of(module, SAMPLES, TOKENS, TARGETS)
    with torch.no_grad():
        return torch.export.export(
            module, tuple(example.values()), dynamic_shapes=_sizes(module, example), strict=False
        )


def _sizes(module: nn.Module, example: dict[str, Tensor]) -> tuple[dict[int, Any], ...]:
    """Which sizes of each input may be others."""
    config: Any = module.config
    samples = torch.export.Dim("samples", min=1, max=MOST_SAMPLES)
    most = {"tokens": getattr(config, "sequence", 2), "source": getattr(config, "sequence", 2)}
    most["target"] = getattr(config, "decoder_sequence", 2)
    found = []
    for name in example:
        sizes: dict[int, Any] = {0: samples}
        if name in most:
            sizes[1] = torch.export.Dim(name, min=2, max=most[name])
        found.append(sizes)
    return tuple(found)


def _onnx(module: nn.Module, path: Path, wanted: dict[str, Tensor]) -> Tensor:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch's exporter needs it)
    except ImportError:
        raise EnvironmentProblem(
            "ONNX needs onnx, onnxscript and onnxruntime. Install them with: pip install 'penstock[export]'."
        ) from None
    made = torch.onnx.export(
        exported(module), dynamo=True, verbose=False, input_names=[*wanted], output_names=["outputs"]
    )
    assert made is not None
    made.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {name: value.numpy() for name, value in wanted.items()}
    return torch.from_numpy(session.run(None, feeds)[0])


def _difference(found: Tensor, expected: Tensor, path: Path) -> float:
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= CLOSE:
        raise NumericError(
            f"{path} gives other outputs than the model, by {difference:.2g} of their largest."
        )
    return difference
