"""Defaults of `penstock train NAME`: settings that suit a preset, or what it is trained for.

Each table is a layer of a configuration, above the general defaults and below a file and the command line. A setting
that is not in it has its general default.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]
"""Values by dotted key."""

_TINY: Settings = {
    "recipe.steps": 340,
    "recipe.lr": 2e-3,
    "recipe.warmup_share": 0.1,
    "recipe.weight_decay": 0.01,
    "recipe.beta2": 0.98,
    "recipe.eval_every_epochs": 1000.0,
    "plan.optimizer": "fused",
    "plan.micro_batch": 32,
}
"""Models of less than a million weights, which are to learn something in two minutes on two cores. They are evaluated
at the end only."""
_TINY_DECODER: Settings = {**_TINY, "recipe.lr": 3e-3}

_TRANSLATION: Settings = {
    "task": "translation",
    "data.group_by_length": True,
    "recipe.augment.label_smoothing": 0.1,
    "recipe.beta2": 0.98,
}
"""Settings of Vaswani et al. (NeurIPS 2017, sections 5.1, 5.3 and 5.4) train."""

_DDIGITS: Settings = {
    "recipe.steps": 1500,
    "recipe.lr": 2e-3,
    "recipe.warmup_share": 0.05,
    "recipe.weight_decay": 0.0,
    "recipe.ema_decay": 0.995,
    "recipe.eval_every_epochs": 50.0,
    "recipe.augment.flip": 0.0,
    "plan.optimizer": "fused",
    "plan.micro_batch": 128,
}
"""Diffusion models of the embedded digits. Nothing is flipped: a mirrored digit is another sign."""

JOBS: dict[str, Settings] = {
    **dict.fromkeys(
        ("bert-tiny", "modernbert-tiny", "t5-tiny", "t5-moe-tiny", "switch-tiny", "bart-tiny"), _TINY
    ),
    **dict.fromkeys(("gpt-tiny", "llama-tiny", "qwen-tiny", "mixtral-tiny", "qwen3-moe-tiny"), _TINY_DECODER),
    **dict.fromkeys(("marian-base", "transformer-base", "transformer-big"), _TRANSLATION),
    **dict.fromkeys(("ddigits-tiny", "ddigits-moe-tiny"), _DDIGITS),
    # About 1,440 images are used 60 times. A mirrored digit is another sign, so nothing is flipped. Crops are
    # mild, because one of eight pixels already moves a stroke.
    "vit-digits": {
        "recipe.epochs": 60.0,
        "recipe.lr": 5e-4,
        "recipe.warmup_share": 0.015,
        "recipe.eval_every_epochs": 10.0,
        "recipe.augment.flip": 0.0,
        "recipe.augment.crop_scale_min": 0.7,
        "plan.micro_batch": 64,
    },
    "universal-tiny": {**_TINY_DECODER, "plan.micro_batch": 16},
    "marian-tiny": {
        **_TINY,
        "task": "translation",
        "data.source": "numbers:en,de",
        "recipe.steps": 900,
        "plan.micro_batch": 64,
    },
    # As of vit-digits, a mirrored digit is another sign.
    "multimodal-tiny": {
        **_TINY,
        "recipe.steps": 2000,
        "recipe.augment.flip": 0.0,
        "recipe.augment.crop_scale_min": 0.7,
        "plan.micro_batch": 64,
    },
    "marian-moe-tiny": {
        **_TINY,
        "task": "translation",
        "data.source": "names",
        "data.group_by_length": True,
        "recipe.steps": 600,
        "plan.micro_batch": 64,
    },
}
"""Settings by preset."""

_TUNED: Settings = {
    "recipe.epochs": 3.0,
    "recipe.lr": 5e-5,
    "recipe.warmup_share": 0.1,
    "recipe.weight_decay": 0.01,
    "model.sequence": 128,
    "plan.micro_batch": 32,
    "plan.optimizer": "fused",
}
"""Fine-tuning of BERT (Devlin et al., NAACL 2019, section 4 and appendix A.3; XNLI's recipe has these values)."""

_PREFERENCES: Settings = {
    "recipe.epochs": 1.0,
    "recipe.lr": 1e-6,
    "recipe.warmup_share": 0.1,
    "recipe.weight_decay": 0.0,
}
"""The learning rate of Rafailov et al. (NeurIPS 2023, appendix B); more epochs make rejected answers unlikely, and not
chosen ones likelier."""

TUNING: dict[str, Settings] = {"pairs": _TUNED, "sentences": _TUNED, "preferences": _PREFERENCES}
"""Settings by task, for models that start from weights. They override those of the preset."""
