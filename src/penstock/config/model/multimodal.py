"""Models of images and texts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from penstock.config.convert import NotNegative, Range
from penstock.config.graph import Graph, PatchInput, Run, VectorHead
from penstock.config.model.family import Classifier, Pixels, Tokens, Words
from penstock.config.model.text import TextFamily
from penstock.config.stack import Stack


@dataclass(frozen=True, kw_only=True)
class MultimodalConfig(TextFamily):
    """Images and texts in one embedding space, and a decoder that attends to either (Yu et al., TMLR 2022, "CoCa"; Shan
    et al., 2022, "ERNIE-UniX2")."""

    family: Literal["multimodal"] = "multimodal"
    image_size: Pixels = 224
    """Height and width of an image, in pixels."""
    patch_size: Pixels = 16
    """Height and width of a patch, in pixels: each is one token."""
    channels: Annotated[int, Range(1, 1 << 12)] = 3
    """Colours of a pixel: 3, or 1 in grey."""
    classifier: Classifier = "pooled"
    """Source of an image's vector: the mean over patches, or a learned class token (`token`)."""
    vision_norm: bool = False
    """Whether a norm comes before the first block over images, as in CLIP."""
    text_causal: bool = False
    """Whether a text's tokens attend to no later ones, so that the last one becomes its vector, as in CLIP."""
    vision: Stack = field(default_factory=Stack)
    text: Stack = field(default_factory=Stack)
    writer: Stack = field(default_factory=Stack)
    writer_sequence: Tokens = 1024
    """Tokens of a generated text."""
    features: Words = 512
    """Features of the vectors by which images and texts are compared."""
    contrast: Literal["softmax", "sigmoid"] = "softmax"
    """How vectors are compared: each must find its partner in the batch (`softmax`; Radford et al., ICML 2021, "CLIP"),
    or each pair is classified as belonging together or not (`sigmoid`; Zhai et al., ICCV 2023, "SigLIP")."""
    contrast_weight: NotNegative = 1.0
    """Factor of the contrast in the loss."""
    words_weight: NotNegative = 0.25
    """Factor of the loss of a generated text, the sum over its tokens."""

    @cached_property
    def graph(self) -> Graph:
        """Images and a run; a source and a run; a target and a causal run over either; heads for vectors and words."""
        token = self.classifier == "token"
        images = PatchInput(
            image_size=self.image_size, patch_size=self.patch_size, channels=self.channels, class_token=token
        )
        vision = Run(
            name="vision", stack=self.vision, reads="images", setting="model.vision", rows=images.length,
            max_tokens=images.length, embedding_norm=self.vision_norm,
        )  # fmt: skip
        text = self._run(
            "text", self.text, "source", self.sequence, setting="model.text", causal=self.text_causal
        )
        writer = self._run(
            "writer", self.writer, "target", self.writer_sequence, setting="model.writer", causal=True,
            memories=("vision", "text"),
        )  # fmt: skip
        scale, offset = (1 / 0.07, None) if self.contrast == "softmax" else (10.0, -10.0)
        vectors: dict[str, Any] = {"features": self.features, "offset": offset}
        heads = (
            VectorHead(
                name="image_vector", run="vision", scale=scale, pool="first" if token else "mean", **vectors
            ),
            VectorHead(
                name="text_vector", run="text", pool="last" if self.text_causal else "mean", **vectors
            ),
            self._words("writer"),
        )
        source, target = self._input("source", self.sequence), self._input("target", self.writer_sequence)
        return Graph(
            inputs=(images, source, target), runs=(vision, text, writer), heads=heads, init=self.init
        )

    def _run(self, name: str, stack: Stack, reads: str, length: int, **changes: Any) -> Run:
        rows = self.max_positions or max(self.sequence, self.writer_sequence)
        return replace(super()._run(name, stack, reads, length, **changes), rows=rows)

    def with_lengths(self, *lengths: int) -> Any:
        return replace(self, sequence=lengths[1], writer_sequence=lengths[2])
