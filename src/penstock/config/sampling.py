"""How images are sampled from a model that denoises. No torch is needed to make or check these settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from penstock.config.convert import Checked, Count, Natural, Range, Share, WordFactor
from penstock.config.decoding import InferConfig

SamplerName = Literal["ddim", "dpm", "euler"]


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked, where="sampling"):
    """How images are generated from noise."""

    sampler: SamplerName = "dpm"
    """`ddim` (Song et al., ICLR 2021), `dpm`: DPM-Solver++ of second order (Lu et al., 2022), or `euler` along the
    probability flow."""
    steps: Annotated[int, Range(1, 10_000)] = 20
    """Steps from noise to image; each runs the model once, with guidance on twice the number of images."""
    guidance: Annotated[float, Range(0, 100)] = 1.0
    """Scale of classifier-free guidance (Ho & Salimans, 2022): 1 samples from the label's distribution; above 1 images
    are more typical and vary less."""
    eta: Share = 0.0
    """Share of the noise of DDPM's sampler that `ddim` adds in each step."""
    clip: Annotated[float, Range(0, 1e6)] = 1.0
    """Clamp of a denoised image in each step; 1 is for pixels in [−1, 1], 0: no clamp, as for latents."""
    seed: Natural = 0
    """Determines the noise. An image depends on the seed and its number, not on the rest of the batch."""
    word_weights: tuple[WordFactor, ...] = ()
    """Words of labels that are texts, each with a factor of the attention to its tokens, like the run's
    `data.word_weights`: `seven=2,red=1.5`."""

    def _problems(self) -> Iterator[str]:
        if self.eta and self.sampler != "ddim":
            yield f"sampling.eta is {self.eta:g}, but only sampler ddim draws noise again; use it, or leave eta at 0."


@dataclass(frozen=True, kw_only=True)
class SampleConfig(InferConfig, where=""):
    """Settings of `penstock sample`."""

    batch: Count = 64
    """Images that are computed together."""
    sampling: Sampling = field(default_factory=Sampling)
    label: tuple[str, ...] = ()
    """Classes of the images, by name or number, as in `3` or `3,5`; none: all that the model was trained on."""
    count: Annotated[int, Range(1, 1_000_000)] = 8
    """Images of each class."""
