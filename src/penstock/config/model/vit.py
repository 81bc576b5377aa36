"""Vision Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from penstock.config.convert import Positive, Probability, Range
from penstock.config.graph import ClassHead, Graph, ImagePool, PatchInput, Run, Stem
from penstock.config.model.family import ModelFamily, Pixels, PoolNorm, Words
from penstock.config.stack import Stack

Pool = Literal["token", "pooled", "both", "attention"]
_READS: dict[Pool, ImagePool] = {
    "token": "first", "pooled": "mean", "both": "both", "attention": "attention",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Stack, ModelFamily):
    """A Vision Transformer (Dosovitskiy et al., ICLR 2021, "An Image is Worth 16x16 Words", Table 1).

    Image and patch sizes count pixels.
    """

    RENAMED: ClassVar[dict[str, str]] = {"activation": "mlp"}
    """Old names of settings, mapped to their present names."""

    family: Literal["vit"] = "vit"
    image_size: Pixels = 224
    """Height and width of an image, in pixels."""
    patch_size: Pixels = 16
    """Height and width of a patch, in pixels: each is one token."""
    channels: Annotated[int, Range(1, 1 << 12)] = 3
    """Colours of a pixel: 3, or 1 in grey."""
    classes: Words = 1000
    """Number of classes."""
    classifier: Pool = "token"
    """Input of the head: a learned class token (`token`), the mean over patches (`pooled`), which means 196 tokens
    instead of 197, or `both` concatenated; or the attention of a learned query to all tokens (`attention`, as in
    SigLIP)."""
    class_token: bool | None = None
    """Whether a class token comes before the patches; none: if the head reads it."""
    registers: Annotated[int, Range(0, 1 << 12)] = 0
    """Number of learned tokens without positions between class token and patches, which no head reads (Darcet et al.,
    ICLR 2024, "Vision Transformers Need Registers"; those of DINOv2 have 4)."""
    stem: Stem = "patchify"
    """`patchify`: one linear map per patch. `conv`: 3×3 stride-2 convolutions (Xiao et al., NeurIPS 2021)."""
    stem_bias: bool = True
    """Whether the linear map of patches has a bias."""
    embedding_norm: bool = False
    """Whether a norm comes before the first block, as in CLIP."""
    pool_norm: PoolNorm = "before"
    """Whether the final norm acts on the tokens before pooling, or on the pooled vector (timm's `fc_norm`); `none`
    leaves it out."""
    distilled: bool = False
    """Whether a second token and a second head are trained by `recipe.teacher`, and logits are the mean of both heads'
    (Touvron et al., ICML 2021, "DeiT", section 4)."""
    norm_eps: Positive = 1e-6
    attention_dropout: Probability | None = 0.0
    mlp_dropout: Probability | None = None

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            yield (
                f"model.stem 'conv' halves the image with each layer, so model.patch_size must be a power of two "
                f"of at least 2, not {self.patch_size}; use stem 'patchify'."
            )
        if self.class_token is False and self.classifier in ("token", "both"):
            yield (
                f"model.classifier {self.classifier!r} reads the class token, but model.class_token is false; use "
                "classifier 'pooled', or leave class_token out."
            )
        if self.distilled and self.classifier != "token":
            yield (
                f"model.distilled puts a second token after the class token, but model.classifier is "
                f"{self.classifier!r}; use classifier 'token', or set model.distilled to false."
            )

    @property
    def has_class_token(self) -> bool:
        """Whether a class token comes before the patches."""
        return self.classifier in ("token", "both") if self.class_token is None else self.class_token

    @cached_property
    def graph(self) -> Graph:
        """Patches, one run, classes."""
        reads = _READS[self.classifier]
        images = PatchInput(
            image_size=self.image_size, patch_size=self.patch_size, channels=self.channels, stem=self.stem,
            class_token=self.has_class_token, distil_token=self.distilled, registers=self.registers,
            bias=self.stem_bias,
        )  # fmt: skip
        most = images.length
        run = Run(
            name="encoder", stack=self, reads="images", rows=most - self.registers, max_tokens=most, last_norm=False,
            embedding_norm=self.embedding_norm,
        )  # fmt: skip
        head = ClassHead(
            run="encoder", classes=self.classes, pool=reads, skipped=images.learned_tokens,
            norm_first=reads in ("both", "attention") or (reads == "mean" and self.pool_norm == "before"),
            before="none" if reads == "mean" and self.pool_norm == "none" else "norm",
            distilled=self.distilled,
        )  # fmt: skip
        return Graph(inputs=(images,), runs=(run,), heads=(head,))
