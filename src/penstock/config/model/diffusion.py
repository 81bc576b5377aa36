"""Diffusion Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from penstock.config.activations import Mlp
from penstock.config.convert import Positive, Probability, Range
from penstock.config.graph import Condition, Graph, NoiseKind, PatchInput, PixelHead, Run, Target, TokenInput
from penstock.config.layer import Router
from penstock.config.model.family import ModelFamily, Pixels, Tokens, Words
from penstock.config.stack import Stack


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(Stack, ModelFamily):
    """A diffusion Transformer (Peebles & Xie, ICCV 2023, "Scalable Diffusion Models with Transformers"): from noisy
    images or latents, their times, and classes or texts, it predicts the noise or the image.

    Image and patch sizes count pixels, or positions of a latent. With experts, which are MLPs or whole blocks, times
    are divided into equal ranges, one for each expert, as in ERNIE-ViLG 2.0 (Feng et al., CVPR 2023, section 2.3,
    "mixture of denoising experts").
    """

    family: Literal["diffusion"] = "diffusion"
    image_size: Pixels = 32
    """Height and width of an image, in pixels."""
    patch_size: Pixels = 2
    """Height and width of a patch, in pixels: each is one token."""
    channels: Annotated[int, Range(1, 1 << 12)] = 4
    """Channels of an image, or of a latent."""
    classes: Annotated[int, Range(0, 1 << 24)] = 1000
    """Number of image classes that condition the model; 0: none."""
    condition_dropout: Probability = 0.1
    """Share of training images whose class or text is left out, as classifier-free guidance needs (Ho & Salimans,
    2022)."""
    predicts: Target = "v"
    """Target of the loss: the noise (`eps`), the image (`x0`), or a mix of both that is well conditioned at either end
    of time (`v`, Salimans & Ho, ICLR 2022)."""
    schedule: NoiseKind = "cosine"
    """How noise grows with time: `cosine`, `linear` (DDPM) or `flow` (rectified flow): see `penstock.tasks.noise`."""
    min_snr: Positive | None = None
    """Largest weight of an image's loss, a signal-to-noise ratio (Hang et al., ICCV 2023; 5 is usual); none: all images
    have the same weight."""
    text: Stack | None = None
    """Encoder of texts, to which the blocks over images attend; none: there are no texts."""
    vocabulary: Words = 368
    """Rows in the table of the texts' tokens."""
    sequence: Tokens = 32
    """Tokens of a text."""
    text_norm: bool = False
    """Whether a norm follows the embeddings of texts, as in BERT."""
    text_causal: bool = False
    """Whether a text's tokens attend to no later ones, as in CLIP."""
    mlp: Mlp = "gelu_tanh"
    norm_eps: Positive = 1e-6
    router: Router = "given"

    @cached_property
    def graph(self) -> Graph:
        """Noisy images, a modulated run over their patches, and a head for images; first, texts and their run."""
        images = PatchInput(image_size=self.image_size, patch_size=self.patch_size, channels=self.channels)
        denoiser = Run(
            name="denoiser", stack=self, reads="images", rows=images.length, max_tokens=images.length, last_norm=False,
            modulated=True, memories=() if self.text is None else ("text",),
        )  # fmt: skip
        head = PixelHead(run="denoiser", predicts=self.predicts, schedule=self.schedule, min_snr=self.min_snr)
        condition = Condition(classes=self.classes, dropout=self.condition_dropout)
        if self.text is None:
            return Graph(inputs=(images,), runs=(denoiser,), heads=(head,), condition=condition)
        tokens = TokenInput(vocabulary=self.vocabulary, length=self.sequence)
        text = Run(
            name="text", stack=self.text, reads="tokens", rows=self.sequence, max_tokens=self.sequence,
            setting="model.text", embedding_norm=self.text_norm, causal=self.text_causal,
        )  # fmt: skip
        return Graph(inputs=(images, tokens), runs=(text, denoiser), heads=(head,), condition=condition)
