"""Penstock: predict, apply and measure what makes Transformers fast.

The flat public API. Names are imported when first used, so that `import penstock` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.config.load import load as load
    from penstock.config.machine import Machine as Machine
    from penstock.config.machine import known_machines as known_machines
    from penstock.config.machine import load_machine as load_machine
    from penstock.config.machine import save_machine as save_machine
    from penstock.config.model import PRESETS as PRESETS
    from penstock.config.model import ModelConfig as ModelConfig
    from penstock.config.model import ViTConfig as ViTConfig
    from penstock.config.plan import Plan as Plan
    from penstock.config.run import Augment as Augment
    from penstock.config.run import DataConfig as DataConfig
    from penstock.config.run import Recipe as Recipe
    from penstock.config.run import RunConfig as RunConfig
    from penstock.config.transformer import TRANSFORMERS as TRANSFORMERS
    from penstock.config.transformer import TransformerConfig as TransformerConfig
    from penstock.errors import ConfigError as ConfigError
    from penstock.errors import PenstockError as PenstockError
    from penstock.planner.outcome import Prediction as Prediction
    from penstock.planner.prediction import predict as predict
    from penstock.planner.search import search as search

__version__ = "0.1.0"

_HOME = {
    "Augment": "penstock.config.run",
    "ConfigError": "penstock.errors",
    "DataConfig": "penstock.config.run",
    "Machine": "penstock.config.machine",
    "ModelConfig": "penstock.config.model",
    "PRESETS": "penstock.config.model",
    "PenstockError": "penstock.errors",
    "Plan": "penstock.config.plan",
    "Prediction": "penstock.planner.outcome",
    "Recipe": "penstock.config.run",
    "RunConfig": "penstock.config.run",
    "TRANSFORMERS": "penstock.config.transformer",
    "TransformerConfig": "penstock.config.transformer",
    "ViTConfig": "penstock.config.model",
    "known_machines": "penstock.config.machine",
    "load": "penstock.config.load",
    "load_machine": "penstock.config.machine",
    "predict": "penstock.planner.prediction",
    "save_machine": "penstock.config.machine",
    "search": "penstock.planner.search",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
