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
    from penstock.config.load import load as load
    from penstock.config.machine import Machine as Machine
    from penstock.config.machine import known_machines as known_machines
    from penstock.config.machine import load_machine as load_machine
    from penstock.config.machine import save_machine as save_machine
    from penstock.config.model import PRESETS as PRESETS
    from penstock.config.model import DecoderConfig as DecoderConfig
    from penstock.config.model import EncoderConfig as EncoderConfig
    from penstock.config.model import ModelConfig as ModelConfig
    from penstock.config.model import Seq2SeqConfig as Seq2SeqConfig
    from penstock.config.model import ViTConfig as ViTConfig
    from penstock.config.plan import Plan as Plan
    from penstock.config.run import Augment as Augment
    from penstock.config.run import DataConfig as DataConfig
    from penstock.config.run import Recipe as Recipe
    from penstock.config.run import RunConfig as RunConfig
    from penstock.config.stack import Stack as Stack
    from penstock.data import Batch as Batch
    from penstock.data import Loader as Loader
    from penstock.data import image_loader as image_loader
    from penstock.data import open_source as open_source
    from penstock.doctor import Finding as Finding
    from penstock.doctor import examine as examine
    from penstock.errors import ConfigError as ConfigError
    from penstock.errors import PenstockError as PenstockError
    from penstock.ladder import LadderConfig as LadderConfig
    from penstock.ladder import LadderReport as LadderReport
    from penstock.models import create as create
    from penstock.models.anatomy import Anatomy as Anatomy
    from penstock.models.anatomy import anatomy_of as anatomy_of
    from penstock.models.anatomy import enrol as enrol
    from penstock.models.convert import from_pretrained as from_pretrained
    from penstock.models.convert import load_weights as load_weights
    from penstock.models.convert import save_pretrained as save_pretrained
    from penstock.models.vit import ViT as ViT
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
    from penstock.tasks import ImageClassification as ImageClassification
    from penstock.tasks import Task as Task
    from penstock.tasks import classification_loss as classification_loss
    from penstock.train import TrainResult as TrainResult

__version__ = "0.1.0"

_HOME = {
    "Anatomy": "penstock.models.anatomy",
    "Augment": "penstock.config.run",
    "Batch": "penstock.data",
    "Built": "penstock.build",
    "ConfigError": "penstock.errors",
    "DataConfig": "penstock.config.run",
    "EMA": "penstock.optim",
    "Finding": "penstock.doctor",
    "ImageClassification": "penstock.tasks",
    "LadderConfig": "penstock.ladder",
    "LadderReport": "penstock.ladder",
    "Loader": "penstock.data",
    "Machine": "penstock.config.machine",
    "ModelConfig": "penstock.config.model",
    "PRESETS": "penstock.config.model",
    "PenstockError": "penstock.errors",
    "Plan": "penstock.config.plan",
    "Prediction": "penstock.planner",
    "Recipe": "penstock.config.run",
    "RunConfig": "penstock.config.run",
    "Serving": "penstock.planner.serve",
    "DecoderConfig": "penstock.config.model",
    "EncoderConfig": "penstock.config.model",
    "Seq2SeqConfig": "penstock.config.model",
    "Stack": "penstock.config.stack",
    "StepResult": "penstock.step",
    "Task": "penstock.tasks",
    "TrainResult": "penstock.train",
    "TrainStep": "penstock.step",
    "ViT": "penstock.models.vit",
    "ViTConfig": "penstock.config.model",
    "accelerate": "penstock.precision",
    "anatomy_of": "penstock.models.anatomy",
    "classification_loss": "penstock.tasks",
    "clip_grad_norm_": "penstock.precision",
    "contiguous": "penstock.optim",
    "create": "penstock.models",
    "enrol": "penstock.models.anatomy",
    "examine": "penstock.doctor",
    "from_pretrained": "penstock.models.convert",
    "image_loader": "penstock.data",
    "known_machines": "penstock.config.machine",
    "load": "penstock.config.load",
    "load_machine": "penstock.config.machine",
    "load_weights": "penstock.models.convert",
    "machine_for": "penstock.probe",
    "make_optimizer": "penstock.optim",
    "open_source": "penstock.data",
    "parameter_groups": "penstock.optim",
    "predict": "penstock.planner",
    "predict_inference": "penstock.planner.serve",
    "save_machine": "penstock.config.machine",
    "save_pretrained": "penstock.models.convert",
    "scale_loss": "penstock.precision",
    "search": "penstock.planner",
    "Space": "penstock.planner",
}

__all__ = sorted([*_HOME, "__version__"])


_ROOMS = ("precision",)
"""Modules that are attributes of the package: `penstock.precision.report(…)`."""


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"penstock.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
