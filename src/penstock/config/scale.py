"""The configuration of `penstock scale`; the names are the same in a file and on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from penstock.config.convert import Checked, Count, NotNegative, Range, Seed
from penstock.config.model import PRESETS, ModelConfig
from penstock.config.run import DataConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig(Checked):
    """One measurement of the gradients of a model on its data."""

    model: ModelConfig = PRESETS["vit-s16"]
    """Name of a preset (`vit-s16`), or `package.module:factory`: a function that returns (model, batch, loss)."""
    factory: str | None = None
    """`package.module:function` that returns a model, an example batch, and loss(model, batch); replaces `model`."""
    data: DataConfig = field(default_factory=DataConfig)
    """Images: `digits`, `imagefolder:PATH` or `pack:PATH`."""
    init_from: str | None = None
    """Folder or safetensors file of weights to start from, such as a run's export (Hugging Face, timm or Penstock)."""
    batches: Count = 16
    """Number of batches whose gradients are measured."""
    batch: Count | None = None
    """Samples per batch; none: 8 on a CPU and 64 on a GPU. A factory's batch is used as it is."""
    lr: NotNegative = 3e-4
    """Learning rate of the fp32 AdamW step after each batch, so that not only the initial weights are
    measured; 0 leaves the weights unchanged."""
    headroom: Annotated[float, Range(1)] = 2.0
    """Factor by which gradients of other batches may be larger than the largest that was measured."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    seed: Seed = 0
    """Determines weights and sample order."""
    output: str = "runs/scale"
    """Folder of the report: scale.html, scale.svg and scale.json."""

    def _problems(self) -> Iterator[str]:
        if self.factory is not None and ":" not in self.factory:
            yield f"factory is {self.factory!r}; write package.module:function."
        if self.factory is not None and self.init_from is not None:
            yield "init_from is for presets; let the factory load its weights."
