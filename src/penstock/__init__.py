"""Penstock: predict, apply and measure what makes Transformers fast.

The flat public API. Names are imported on first use, so `import penstock` is fast and needs no torch. Four
functions have the same name as their module and are imported from there: `penstock.build.build`,
`penstock.train.train`, `penstock.ladder.ladder` and `penstock.probe.probe`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.build import Built as Built
    from penstock.config.decoding import Decoding as Decoding
    from penstock.config.load import load as load
    from penstock.config.machine import Machine as Machine
    from penstock.config.machine import known_machines as known_machines
    from penstock.config.machine import load_machine as load_machine
    from penstock.config.machine import save_machine as save_machine
    from penstock.config.model import PRESETS as PRESETS
    from penstock.config.model import DecoderConfig as DecoderConfig
    from penstock.config.model import EncoderConfig as EncoderConfig
    from penstock.config.model import ModelConfig as ModelConfig
    from penstock.config.model import MultimodalConfig as MultimodalConfig
    from penstock.config.model import Seq2SeqConfig as Seq2SeqConfig
    from penstock.config.model import ViTConfig as ViTConfig
    from penstock.config.plan import Plan as Plan
    from penstock.config.run import Augment as Augment
    from penstock.config.run import DataConfig as DataConfig
    from penstock.config.run import Recipe as Recipe
    from penstock.config.run import RunConfig as RunConfig
    from penstock.config.sampling import Sampling as Sampling
    from penstock.config.stack import Stack as Stack
    from penstock.data import Batch as Batch
    from penstock.data import Loader as Loader
    from penstock.data import image_loader as image_loader
    from penstock.data import open_source as open_source
    from penstock.doctor import Finding as Finding
    from penstock.doctor import examine as examine
    from penstock.errors import ConfigError as ConfigError
    from penstock.errors import PenstockError as PenstockError
    from penstock.infer.captions import Captioner as Captioner
    from penstock.infer.encode import Classified as Classified
    from penstock.infer.encode import Classifier as Classifier
    from penstock.infer.encode import Embedder as Embedder
    from penstock.infer.generator import Generated as Generated
    from penstock.infer.generator import Generator as Generator
    from penstock.infer.images import ImageGenerator as ImageGenerator
    from penstock.ladder import LadderConfig as LadderConfig
    from penstock.ladder import LadderReport as LadderReport
    from penstock.models import create as create
    from penstock.models.anatomy import Anatomy as Anatomy
    from penstock.models.anatomy import anatomy_of as anatomy_of
    from penstock.models.anatomy import enrol as enrol
    from penstock.models.convert import from_pretrained as from_pretrained
    from penstock.models.convert import load_weights as load_weights
    from penstock.models.convert import save_pretrained as save_pretrained
    from penstock.models.fuse import fuse as fuse
    from penstock.models.fuse import unfuse as unfuse
    from penstock.models.model import Model as Model
    from penstock.optim import EMA as EMA
    from penstock.optim import contiguous as contiguous
    from penstock.optim import make_optimizer as make_optimizer
    from penstock.optim import parameter_groups as parameter_groups
    from penstock.planner import Prediction as Prediction
    from penstock.planner import Space as Space
    from penstock.planner import predict as predict
    from penstock.planner import search as search
    from penstock.planner.serve import Serving as Serving
    from penstock.planner.serve import predict_inference as predict_inference
    from penstock.precision import accelerate as accelerate
    from penstock.precision import clip_grad_norm_ as clip_grad_norm_
    from penstock.precision import scale_loss as scale_loss
    from penstock.probe import machine_for as machine_for
    from penstock.step import StepResult as StepResult
    from penstock.step import TrainStep as TrainStep
    from penstock.tasks import Embedding as Embedding
    from penstock.tasks import ImageClassification as ImageClassification
    from penstock.tasks import MaskedWords as MaskedWords
    from penstock.tasks import NextToken as NextToken
    from penstock.tasks import Pairs as Pairs
    from penstock.tasks import Sentences as Sentences
    from penstock.tasks import SpanCorruption as SpanCorruption
    from penstock.tasks import Task as Task
    from penstock.tasks import Translation as Translation
    from penstock.tasks import classification_loss as classification_loss
    from penstock.tasks import task_of as task_of
    from penstock.train import Callback as Callback
    from penstock.train import TrainResult as TrainResult

__version__ = "0.1.0"

_NAMES = {
    "build": ("Built",),
    "config.decoding": ("Decoding",),
    "config.load": ("load",),
    "config.machine": ("Machine", "known_machines", "load_machine", "save_machine"),
    "config.model": (
        "DecoderConfig",
        "EncoderConfig",
        "ModelConfig",
        "MultimodalConfig",
        "PRESETS",
        "Seq2SeqConfig",
        "ViTConfig",
    ),
    "config.plan": ("Plan",),
    "config.run": ("Augment", "DataConfig", "Recipe", "RunConfig"),
    "config.sampling": ("Sampling",),
    "config.stack": ("Stack",),
    "data": ("Batch", "Loader", "image_loader", "open_source"),
    "doctor": ("Finding", "examine"),
    "errors": ("ConfigError", "PenstockError"),
    "infer.captions": ("Captioner",),
    "infer.encode": ("Classified", "Classifier", "Embedder"),
    "infer.generator": ("Generated", "Generator"),
    "infer.images": ("ImageGenerator",),
    "ladder": ("LadderConfig", "LadderReport"),
    "models": ("create",),
    "models.anatomy": ("Anatomy", "anatomy_of", "enrol"),
    "models.convert": ("from_pretrained", "load_weights", "save_pretrained"),
    "models.fuse": ("fuse", "unfuse"),
    "models.model": ("Model",),
    "optim": ("EMA", "contiguous", "make_optimizer", "parameter_groups"),
    "planner": ("Prediction", "Space", "predict", "search"),
    "planner.serve": ("Serving", "predict_inference"),
    "precision": ("accelerate", "clip_grad_norm_", "scale_loss"),
    "probe": ("machine_for",),
    "step": ("StepResult", "TrainStep"),
    "tasks": (
        "Embedding",
        "ImageClassification",
        "MaskedWords",
        "NextToken",
        "Pairs",
        "Sentences",
        "SpanCorruption",
        "Task",
        "Translation",
        "classification_loss",
        "task_of",
    ),
    "train": ("Callback", "TrainResult"),
}
"""Public names by the module that defines them."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])


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
