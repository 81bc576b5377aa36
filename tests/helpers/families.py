"""One small model of every family, with batches and a loss: what the tests that all families share run on.

A family is enrolled by a line in `ENROLLED`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.config.layer import Latent, LayerSizes, Rotary
from penstock.config.model import (
    DecoderConfig,
    DiffusionConfig,
    EncoderConfig,
    ModelConfig,
    MultimodalConfig,
    Seq2SeqConfig,
    UniversalConfig,
    ViTConfig,
    preset,
    with_stacks,
)
from penstock.config.stack import Stack
from penstock.kernels.cross_entropy import IGNORED
from penstock.tasks import ImageClassification
from penstock.tasks.denoise import NoisyBatch

WORDS, TOKENS, OTHERS = 13, 6, 5
"""Vocabulary, tokens of a sample, and tokens of what it is turned into. Neither 2 nor 4 ranks can share them evenly."""


class Enrolled(NamedTuple):
    """A small model, and the transformers class that its export is read by; none where transformers has none."""

    config: ModelConfig
    reader: str | None


def small(name: str, *, dropout: float = 0.0, **changes: Any) -> ModelConfig:
    """A text preset at 16 features and two blocks, or four where blocks differ by a pattern over depth; its routers
    choose without chance."""
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "dropout": dropout}
    sizes |= {"router_jitter": 0.0, "expert_dropout": 0.0}
    config: Any = preset(name)
    if isinstance(config, UniversalConfig):
        config, sizes = with_stacks(config, lambda stack: replace(stack, **sizes)), {}
    elif isinstance(config, Seq2SeqConfig):
        features: dict[str, Any] = {"head_features": 8} if config.encoder.head_features else {}
        sides = (replace(stack, **sizes, **features) for stack in (config.encoder, config.decoder))
        sizes = {**dict(zip(("encoder", "decoder"), sides)), "decoder_sequence": 16}
    else:
        sizes |= {"kv_heads": 1} if config.kv_heads else {}
        sizes |= {"depth": 4} if len(config.kinds) > 1 else {}
    made: ModelConfig = replace(config, **{"vocabulary": WORDS, "sequence": 16, **sizes, **changes})
    return made


_VIT = ViTConfig(
    image_size=8, patch_size=2, channels=1, width=16, depth=2, heads=2, mlp_width=32, classes=10
)  # fmt: skip
_DIFFUSION = DiffusionConfig(
    image_size=8, patch_size=2, channels=2, width=16, depth=2, heads=2, mlp_width=32, classes=10
)
_WIDE = Stack(width=24, depth=1, heads=2, mlp_width=32)
"""A run of another width than those that attend to it."""
_LAYERS = (
    LayerSizes(heads=4, kv=2, hidden=32), LayerSizes(heads=2, kv=2, hidden=16), LayerSizes(heads=4, kv=2, hidden=32),
    LayerSizes(heads=8, kv=4, hidden=24),
)  # fmt: skip
_SMALL = Stack(width=16, depth=1, heads=2, mlp_width=32)
PRUNED = small("llama-tiny", depth=4, heads=4, kv_heads=2, head_features=4, unequal=_LAYERS)
"""A decoder with unequal layers. 2 divides all their sizes."""
LATENT = Latent(kv_rank=12, query_rank=10, plain_width=6, rotary_width=4, value_width=8)
ENROLLED = {
    "vit": Enrolled(_VIT, "AutoModelForImageClassification"),
    "gpt": Enrolled(small("gpt-tiny"), "AutoModelForCausalLM"),
    "llama": Enrolled(small("llama-tiny"), "AutoModelForCausalLM"),
    "qwen": Enrolled(small("qwen-tiny"), "AutoModelForCausalLM"),
    "phi": Enrolled(
        small("phi-tiny", rotary=Rotary(
            share=0.75, scaling="longrope", factor=4.0, trained=4, short=(1.0, 1.1, 1.3), long=(1.5, 3.0, 7.0)
        )),
        "AutoModelForCausalLM",
    ),
    "olmo": Enrolled(small("olmo2-tiny"), "AutoModelForCausalLM"),
    "smollm": Enrolled(small("smollm3-tiny", unturned_every=2), "AutoModelForCausalLM"),
    "glm": Enrolled(small("glm-tiny"), "AutoModelForCausalLM"),
    "gemma 2": Enrolled(small("gemma2-tiny"), "AutoModelForCausalLM"),
    "gemma": Enrolled(small("gemma3-tiny"), "AutoModelForCausalLM"),
    "gpt-oss": Enrolled(small("gpt-oss-tiny"), "AutoModelForCausalLM"),
    # Where a rounding sends a token to another expert, biases that follow the loads would move by whole steps.
    "deepseek": Enrolled(
        small("deepseek-tiny", expert_width=16, latent=LATENT, bias_rate=0.0), "AutoModelForCausalLM"
    ),
    "bert": Enrolled(small("bert-tiny"), "AutoModelForMaskedLM"),
    "bert of classes": Enrolled(
        small("bert-tiny", head="classes", classes=3), "AutoModelForSequenceClassification"
    ),
    "modernbert": Enrolled(small("modernbert-tiny"), "AutoModelForMaskedLM"),
    "modernbert of classes": Enrolled(
        small("modernbert-tiny", head="classes", classes=3), "AutoModelForSequenceClassification"
    ),
    "mixtral": Enrolled(small("mixtral-tiny"), "AutoModelForCausalLM"),
    "qwen moe": Enrolled(small("qwen3-moe-tiny", head_features=8, expert_width=16), "AutoModelForCausalLM"),
    "pruned": Enrolled(PRUNED, None),
    "t5": Enrolled(small("t5-tiny"), "AutoModelForSeq2SeqLM"),
    "marian": Enrolled(small("marian-tiny"), "AutoModelForSeq2SeqLM"),
    "bart": Enrolled(small("bart-tiny"), "AutoModelForSeq2SeqLM"),
    "switch": Enrolled(small("switch-tiny"), "AutoModelForSeq2SeqLM"),
    "universal": Enrolled(small("universal-tiny", head="words"), None),
    "nllb moe": Enrolled(small("nllb-moe-tiny"), None),
    "marian moe": Enrolled(small("marian-moe-tiny"), None),
    "diffusion of texts": Enrolled(replace(_DIFFUSION, classes=0, text=_WIDE, vocabulary=WORDS), None),
    "diffusion moe": Enrolled(replace(_DIFFUSION, experts=2, expert_every=2), None),
    "multimodal": Enrolled(
        MultimodalConfig(
            image_size=8, patch_size=4, channels=1, vision=_WIDE, text=_SMALL, writer=_SMALL, features=8,
            vocabulary=WORDS, sequence=16, writer_sequence=16, contrast="sigmoid",
        ),
        None,
    ),
    "dinov2": Enrolled(
        replace(_VIT, layer_scale=0.5, registers=3, classifier="both", mlp="swiglu", mlp_width=48),
        "AutoModelForImageClassification",
    ),
    "dinov3": Enrolled(
        replace(_VIT, layer_scale=0.5, registers=3, class_token=True, positions="axial", rotary=Rotary(base=100.0),
                key_bias=False, norm_eps=1e-5),
        None,
    ),
    "siglip": Enrolled(replace(_VIT, classifier="attention", mlp="gelu_tanh"), None),
    "clip tower": Enrolled(
        replace(_VIT, stem_bias=False, embedding_norm=True, mlp="gelu_quick", norm_eps=1e-5, class_token=True,
                classifier="pooled", pool_norm="none"),
        "AutoModelForImageClassification",
    ),
    # Distilled too, so that a second token and a second head meet every layout.
    "vit moe": Enrolled(replace(_VIT, experts=4, distilled=True), None),
    "experts of blocks": Enrolled(replace(_DIFFUSION, experts=2, experts_in="block", expert_every=2), None),
}  # fmt: skip


WITH_EXPERTS = {"t5 moe": small("t5-moe-tiny")}
"""A model with experts that any layout splits, for the tests of these layouts alone."""


def batches(config: ModelConfig, step: int, samples: int) -> tuple[Any, ...]:
    """The model's arguments, then its targets: the same for the same step, on every rank. Samples differ in how many
    targets they have; of words every fourth has none.
    """
    generator = torch.Generator().manual_seed(step)

    def numbers(count: int, *shape: int) -> Tensor:
        return torch.randint(0, count, shape, generator=generator)

    def words(count: int, ends: Tensor) -> Tensor:
        """Targets, of which those from a sample's end on count nothing."""
        ends = ends * (torch.arange(samples) % 4 != 3)
        return numbers(WORDS, samples, count).where(torch.arange(count) < ends[:, None], IGNORED)

    if isinstance(config, ViTConfig):
        shape = (samples, config.channels, config.image_size, config.image_size)
        return torch.randn(shape, generator=generator), numbers(config.classes, samples)
    images: tuple[Tensor, ...] = ()
    if isinstance(config, MultimodalConfig):
        size = config.image_size
        images = (torch.randn(samples, config.channels, size, size, generator=generator),)
    tokens = numbers(WORDS, samples, TOKENS)
    if isinstance(config, DiffusionConfig):
        shape = (samples, config.channels, config.image_size, config.image_size)
        noise, target = torch.randn(2, *shape, generator=generator)
        times = torch.rand(samples, generator=generator, dtype=torch.float64)
        more = {"tokens": tokens, "lengths": numbers(TOKENS, samples) + 1, "times": times}
        more |= {
            "images": noise,
            "classes": numbers(config.classes + 1, samples),
            "routes": (times * 2).long(),
        }
        return *NoisyBatch.of(config.graph, target, **more).inputs, target
    if isinstance(config, DecoderConfig):
        return tokens, words(TOKENS, numbers(TOKENS, samples) + 1)
    lengths = numbers(TOKENS, samples) + 1
    if isinstance(config, Seq2SeqConfig | MultimodalConfig):
        targets = words(OTHERS, numbers(OTHERS, samples) + 1)
        return *images, tokens, numbers(WORDS, samples, OTHERS), lengths, targets
    if isinstance(config, UniversalConfig):
        ends = numbers(TOKENS, samples) + 1
        targets = torch.stack([words(TOKENS, lengths), words(TOKENS, ends)], dim=1)
        return tokens, numbers(WORDS, samples, TOKENS), lengths, targets
    assert isinstance(config, EncoderConfig)
    targets = numbers(config.classes, samples) if config.head == "classes" else words(TOKENS, lengths)
    return tokens, lengths, targets


def flat(outputs: Any) -> Tensor:
    """A model's outputs for each sample in a row, (B, …); of several heads one after the other."""
    every = outputs.values() if isinstance(outputs, dict) else (outputs,)
    return torch.cat([one.flatten(1) for one in every], dim=1)


class Given(ImageClassification):
    """Mean cross entropy of a batch of `batches`, or mean squared error of its images."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return tuple(batch[:-1])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if batch[-1].is_floating_point():
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            return nn.functional.mse_loss(outputs, batch[-1])
        more = 0.0
        if isinstance(outputs, dict) and batch[-1].dim() == 3:
            outputs = torch.stack(list(outputs.values()), dim=1)
        elif isinstance(outputs, dict):  # vectors, and words
            *vectors, outputs = outputs.values()
            counted = (batch[-1] != IGNORED).any(1, keepdim=True)
            more = (vectors[0] * vectors[1] * counted).sum() / 16
        logits, targets = outputs.reshape(-1, outputs.shape[-1]), batch[-1].flatten()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return (total - more) / max(1, self.targets(batch))

    def targets(self, batch: Any) -> int:
        return len(batch[-1]) if batch[-1].is_floating_point() else int((batch[-1] != IGNORED).sum())


loss = Given()
