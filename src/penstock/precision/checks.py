"""Checks by which `accelerate` refuses before it changes anything."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from penstock.config.convert import nearest
from penstock.errors import ConfigError
from penstock.models.anatomy import uncompiled
from penstock.optim.groups import parameters_of
from penstock.precision.forward import already, precision_on
from penstock.precision.scaler import LossScaler
from penstock.precision.settings import Precision
from penstock.precision.state_hooks import is_half


def check_kinds(models: list[Any], optimizers: list[Any]) -> None:
    """Refuse models that are no modules, and optimizers that are none."""
    for value, kind, expected in [(m, "model", nn.Module) for m in models] + [
        (o, "optimizer", Optimizer) for o in optimizers
    ]:
        if kind == "optimizer" and not isinstance(value, expected) and hasattr(value, "param_groups"):
            raise ConfigError(
                f"A {type(value).__name__} is no torch.optim.Optimizer, though it has param_groups: it wraps one, "
                "perhaps. Accelerate the optimizer inside, wrap that afterwards, and call "
                "penstock.precision.unscale_(optimizer) on the one inside before each step, so that the wrapper reads "
                "gradients without loss scale."
            )
        if not isinstance(value, expected):
            raise ConfigError(
                f"accelerate was given a {type(value).__name__} as {kind}; give it a {expected.__module__}."
                f"{expected.__name__}, or a list of them."
            )
    if not models:
        raise ConfigError("accelerate was given no model.")


def check_options(scaler: Any, agree: Any) -> None:
    """Refuse options of the loss scale that it does not have, and an `agree` that cannot be called."""
    options = [
        name
        for name in inspect.signature(LossScaler).parameters
        if name not in ("device", "agree", "dynamic")
    ]
    problems = []
    if scaler is not None and not isinstance(scaler, Mapping):
        problems.append(f"scaler is {scaler!r}, but must be a dict of {', '.join(options)}.")
    elif scaler:
        problems += [
            f"scaler has no option {name!r}.{nearest(str(name), options)} It takes {', '.join(options)}."
            for name in scaler
            if name not in options
        ]
    if agree is not None and agree != "auto" and not callable(agree):
        problems.append(
            f"agree is {agree!r}, but must be 'auto', None, or a function of the flag that ranks share."
        )
    if problems:
        raise ConfigError(problems)


def check(
    properties: Precision,
    models: list[nn.Module],
    bare: list[nn.Module],
    optimizers: list[Optimizer],
    losses: int,
) -> None:
    """Refuse models and optimizers that do not fit the properties; `bare` are the models without wrappers."""
    problems = []
    if not isinstance(losses, int) or losses < 1:
        problems.append(f"losses is {losses!r}, but must be a whole number of at least 1.")
    problems += [
        f"{properties.level} replaces weights, and DistributedDataParallel holds on to those it was given; "
        "accelerate the model first and wrap it afterwards."
        for model in models
        if properties.weights == "half" and isinstance(uncompiled(model), nn.parallel.DistributedDataParallel)
    ]
    for model in bare:
        before = precision_on(model)
        if before is not None and "half" in (before.weights, properties.weights):
            problems.append(already(model))
            continue
        halves = [name for name, p in model.named_parameters() if is_half(p)]
        if halves:
            problems.append(
                f"{halves[0]} and {len(halves) - 1} more weights are half, but accelerate starts from fp32 weights "
                "and makes the half ones itself; call model.float() before making the optimizer."
            )
    if properties.weights == "half" and properties.master != "none":
        problems += _shared_weights(properties.level, bare, optimizers)
    owned = {id(p) for model in bare for p in model.parameters()}
    for optimizer in optimizers:
        trained = set(map(id, parameters_of(optimizer)))
        if "_penstock" in optimizer.__dict__:
            problems.append(f"This {type(optimizer).__name__} is already accelerated; make a new one.")
        elif trained and trained.isdisjoint(owned):
            problems.append(
                f"This {type(optimizer).__name__} trains no weight of the model; make it over model.parameters() of "
                "this very model, after whatever replaces its weights."
            )
    if problems:
        raise ConfigError(problems)


def _shared_weights(level: str, models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[str]:
    """Weights of two optimizers: only one of them could have their masters."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            other = owners.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                yield (
                    f"{names.get(id(parameter), 'A weight')} is trained by a {type(other).__name__} and by a "
                    f"{type(optimizer).__name__}, and {level} keeps its fp32 weight with one of them; use O1, or give "
                    "each weight to one optimizer."
                )
                return
