"""Penstock: predict, apply and measure what makes Transformers fast.

The flat public API. Names are imported on first use, so `import penstock` is fast and needs no torch. Four
functions have the same name as their module and are imported from there: `penstock.build.build`,
`penstock.train.train`, `penstock.ladder.ladder` and `penstock.probe.probe`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.build import Built
    from penstock.config.decoding import Decoding
    from penstock.config.load import load
    from penstock.config.machine import Machine, known_machines, load_machine, save_machine
    from penstock.config.model import (
        PRESETS,
        DecoderConfig,
        EncoderConfig,
        ModelConfig,
        MultimodalConfig,
        Seq2SeqConfig,
        ViTConfig,
    )
    from penstock.config.plan import Plan
    from penstock.config.run import Augment, DataConfig, Recipe, RunConfig
    from penstock.config.sampling import Sampling
    from penstock.config.stack import Stack
    from penstock.data import Batch, Loader, image_loader, open_source
    from penstock.doctor import Finding, examine
    from penstock.errors import ConfigError, PenstockError
    from penstock.infer.captions import Captioner
    from penstock.infer.encode import Classified, Classifier, Embedder
    from penstock.infer.generator import Generated, Generator
    from penstock.infer.images import ImageGenerator
    from penstock.ladder import LadderConfig, LadderReport
    from penstock.models import create
    from penstock.models.anatomy import Anatomy, anatomy_of, enrol
    from penstock.models.convert import from_pretrained, load_weights, save_pretrained
    from penstock.models.fuse import fuse, unfuse
    from penstock.models.model import Model
    from penstock.optim import EMA, contiguous, make_optimizer, parameter_groups
    from penstock.planner import Prediction, Space, predict, search
    from penstock.planner.serve import Serving, predict_inference
    from penstock.precision import accelerate, clip_grad_norm_, scale_loss
    from penstock.probe import machine_for
    from penstock.step import StepResult, TrainStep
    from penstock.tasks import (
        Embedding,
        ImageClassification,
        MaskedWords,
        NextToken,
        Pairs,
        Sentences,
        SpanCorruption,
        Task,
        Translation,
        classification_loss,
        task_of,
    )
    from penstock.train import Callback, TrainResult

__version__ = "0.1.0"

_NAMES = {
    "build": "Built",
    "config.decoding": "Decoding",
    "config.load": "load",
    "config.machine": "Machine known_machines load_machine save_machine",
    "config.model": "PRESETS DecoderConfig EncoderConfig ModelConfig MultimodalConfig Seq2SeqConfig ViTConfig",
    "config.plan": "Plan",
    "config.run": "Augment DataConfig Recipe RunConfig",
    "config.sampling": "Sampling",
    "config.stack": "Stack",
    "data": "Batch Loader image_loader open_source",
    "doctor": "Finding examine",
    "errors": "ConfigError PenstockError",
    "infer.captions": "Captioner",
    "infer.encode": "Classified Classifier Embedder",
    "infer.generator": "Generated Generator",
    "infer.images": "ImageGenerator",
    "ladder": "LadderConfig LadderReport",
    "models": "create",
    "models.anatomy": "Anatomy anatomy_of enrol",
    "models.convert": "from_pretrained load_weights save_pretrained",
    "models.fuse": "fuse unfuse",
    "models.model": "Model",
    "optim": "EMA contiguous make_optimizer parameter_groups",
    "planner": "Prediction Space predict search",
    "planner.serve": "Serving predict_inference",
    "precision": "accelerate clip_grad_norm_ scale_loss",
    "probe": "machine_for",
    "step": "StepResult TrainStep",
    "tasks": "Embedding ImageClassification MaskedWords NextToken Pairs Sentences SpanCorruption Task Translation "
    "classification_loss task_of",
    "train": "Callback TrainResult",
}
"""Public names by the module that defines them."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "EMA", "PRESETS", "Anatomy", "Augment", "Batch", "Built", "Callback", "Captioner", "Classified",
    "Classifier", "ConfigError", "DataConfig", "DecoderConfig", "Decoding", "Embedder", "Embedding",
    "EncoderConfig", "Finding", "Generated", "Generator", "ImageClassification", "ImageGenerator",
    "LadderConfig", "LadderReport", "Loader", "Machine", "MaskedWords", "Model", "ModelConfig",
    "MultimodalConfig", "NextToken", "Pairs", "PenstockError", "Plan", "Prediction", "Recipe", "RunConfig",
    "Sampling", "Sentences", "Seq2SeqConfig", "Serving", "Space", "SpanCorruption", "Stack", "StepResult",
    "Task", "TrainResult", "TrainStep", "Translation", "ViTConfig", "__version__", "accelerate",
    "anatomy_of", "classification_loss", "clip_grad_norm_", "contiguous", "create", "enrol", "examine",
    "from_pretrained", "fuse", "image_loader", "known_machines", "load", "load_machine", "load_weights",
    "machine_for", "make_optimizer", "open_source", "parameter_groups", "predict", "predict_inference",
    "save_machine", "save_pretrained", "scale_loss", "search", "task_of", "unfuse",
]  # fmt: skip

_ROOMS = ("precision",)
"""Modules that are attributes of the package: `penstock.precision.report(…)`."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"penstock.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"penstock.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
