"""Mixed precision in three lines, on any model and any optimizer.

model, optimizer = penstock.accelerate(model, optimizer, precision="O1")
with penstock.scale_loss(loss, optimizer) as scaled:
    scaled.backward()
optimizer.step()
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from penstock.apply import SCRIPT, Setup, apply
from penstock.config.convert import nearest
from penstock.config.numerics import Numerics
from penstock.errors import ConfigError
from penstock.models.anatomy import uncompiled
from penstock.models.balance_loss import weighed
from penstock.optim.clip import loses_updates
from penstock.optim.contiguous import Contiguous
from penstock.optim.tensors import parameters_of
from penstock.precision import scaling
from penstock.precision.copies import is_half, strip, widen
from penstock.precision.forward import already, precision_on, unwrapped
from penstock.precision.scaler import Agree, LossScaler, agree_over
from penstock.precision.scaling import Gradients
from penstock.precision.session import Session, device_of
from penstock.precision.settings import properties_of
from penstock.precision.stepping import attend, gradients_beside, release

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
"""One model, or a list or tuple of models; the same type is returned."""
O = TypeVar("O", bound=Optimizer | Sequence[Optimizer])  # noqa: E741
Target = Optimizer | nn.Module | Tensor
_log = logging.getLogger(__name__)


@overload
def accelerate(
    model: M, optimizer: None = None, *, precision: str = ..., dtype: str | torch.dtype = ..., losses: int = ...,
    scaler: Mapping[str, Any] | None = ..., agree: Agree | Literal["auto"] | None = ..., **overrides: Any,
) -> M: ...  # fmt: skip
@overload
def accelerate(
    model: M, optimizer: O, *, precision: str = ..., dtype: str | torch.dtype = ..., losses: int = ...,
    scaler: Mapping[str, Any] | None = ..., agree: Agree | Literal["auto"] | None = ..., **overrides: Any,
) -> tuple[M, O]: ...  # fmt: skip


def accelerate(
    model: Any, optimizer: Any = None, *, precision: str = "O1", dtype: str | torch.dtype = "auto", losses: int = 1,
    scaler: Mapping[str, Any] | None = None, agree: Agree | Literal["auto"] | None = "auto", **overrides: Any,
) -> Any:  # fmt: skip
    """Train a model in mixed precision: returns its arguments, changed in place.

    `model` is any module, or a list of modules; `optimizer` any optimizer over their parameters, a list, or None for
    inference; then only the model is returned. `precision` is a level: O0 fp32; O1 each operation in the type that the
    op lists assign, over fp32 weights; O2 half weights with fp32 master weights and norms; O3 half throughout. `dtype`
    is bf16, fp16 or auto. `losses` is the number of losses with a scale of their own (see `scale_loss`). `overrides`
    are single properties of the level (see `penstock.precision.properties_of`); `scaler` holds options of the loss
    scale (see `LossScaler`).

    With a loss scale, all ranks make the same decision about each step: `agree` makes it, by default over the default
    process group if there is one. An overflowed step is skipped on the device if the optimizer's kernels can do that
    (fused, contiguous), so that the host never waits; otherwise the host waits once a step.

    Accelerate after the model is on its device and the optimizer is made, and before DistributedDataParallel.
    torch.compile may come before or after.

    Raises:
        ConfigError: the level is unknown, properties contradict each other, or model and optimizer do not fit them.
    """
    models = _listed(model)
    optimizers = _listed(optimizer)
    check_kinds(models, optimizers)
    check_options(scaler, agree)
    device = device_of(models)
    numerics = properties_of(precision, dtype=dtype, device=device, **overrides)
    bare = [unwrapped(m) for m in models]
    check(numerics, models, bare, optimizers, losses)
    setup = Setup(purpose=SCRIPT, device=device, numerics=numerics, cast_together=bare)
    for module in bare:
        apply(module, setup, "products")
    agree = agree_over() if agree == "auto" else agree
    session = Session(numerics, bare, optimizers, losses=losses, scaler=scaler or {}, agree=agree)
    apply(bare[0], setup, "cast")
    if numerics.weights != "fp32" and numerics.masters == "none":
        for each in optimizers:
            _follow_weights(each, numerics)
    for module in bare:
        apply(module, setup, "precision")
    for each in optimizers:
        gradients = Gradients(each, session)
        session.gradients.append(gradients)
        gradients.optimizer.__dict__["_penstock"] = gradients
        if session.masters is not None or numerics.scales:
            attend(gradients)
    _log.info("%s", numerics.describe())
    return model if optimizer is None else (model, optimizer)


def restore(model: Any, optimizer: Any = None) -> None:
    """Undo `accelerate`, in place: the model has its exact fp32 weights and computes in fp32, and the optimizer, over
    these weights, is torch's again. Both arguments are as for `accelerate`. For a second phase of training, make the
    new optimizer over `model.parameters()` afterwards, and accelerate again at any level.

    Raises:
        ConfigError: the optimizer was not accelerated.
    """
    optimizers = _listed(optimizer)
    for each in optimizers:
        gradients_beside(each)
    for module in map(unwrapped, _listed(model)):
        widen(module)
        strip(module)
    for each in optimizers:
        release(each)
        _state_follows(each)


@contextmanager
def scale_loss(
    loss: Tensor, optimizer: Optimizer | Sequence[Optimizer], *, loss_id: int = 0
) -> Iterator[Tensor]:
    """Yield the loss on which to call `backward()`: multiplied by the loss scale, if there is one.

    `optimizer` is every optimizer that will step on these gradients. Calls add up until the step, as gradients do. A
    loss with its own `loss_id` has its own scale; pass the number of losses to `accelerate`. Afterwards the gradients
    stay scaled until `penstock.clip_grad_norm_`, `penstock.precision.unscale_` or the step.

    Raises:
        ConfigError: an optimizer was not accelerated, or there is no such loss.
        NumericError: gradients overflow at the lowest scale; names the layer where the overflow begins.
    """
    all_of = [gradients_beside(o) for o in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    session = all_of[0].session
    if any(gradients.session is not session for gradients in all_of):
        raise ConfigError(
            "scale_loss was given optimizers of different accelerate calls; accelerate them in one call, as lists."
        )
    if not session.numerics.scales:
        if session.masters is not None:
            for gradients in all_of:
                gradients.prepare(None)
        yield loss
        return
    if not 0 <= loss_id < len(session.scalers):
        raise ConfigError(
            f"scale_loss was given loss_id={loss_id}, but accelerate was called for {len(session.scalers)} "
            f"loss{'es' if len(session.scalers) > 1 else ''}; call accelerate(…, losses={loss_id + 1})."
        )
    scaler = session.scalers[loss_id]
    if any(gradients.yielded is not None and gradients.yielded() is loss for gradients in all_of):
        raise ConfigError(
            "scale_loss was given a loss that it has scaled already; open it once for each loss, on the loss itself."
        )
    if not any(gradients.prepared and gradients.scaler is scaler for gradients in all_of):
        session.move_scale(scaler)  # never between the micro-batches of one step
    scaled = scaler.scaled(weighed(loss))
    for gradients in all_of:
        gradients.prepare(scaler)
        gradients.yielded = weakref.ref(scaled)
    yield scaled
    for gradients in all_of:
        gradients.remember()


def clip_grad_norm_(target: Target | Iterable[Target], max_norm: float) -> Tensor:
    """Scale gradients so that their global 2-norm is at most `max_norm`; returns the norm before, 0-d, on the device,
    without loss scale.

    `target` is the accelerated optimizer, the model, its parameters, or several of one kind, clipped together. For
    parameters, the optimizer that was accelerated for them is found, with its loss scale and master weights; parameters
    without one are clipped unchanged. Gradients are unscaled once, here or in the step, in the same pass. Raises
    ConfigError for an optimizer that was not accelerated: use `penstock.optim.clip_grad_norm_` for it.
    """
    if not max_norm > 0.0:
        raise ConfigError(f"max_norm is {max_norm}, but must be above 0.")
    listed = [target] if isinstance(target, Optimizer | nn.Module | Tensor) else list(target)
    if any(isinstance(item, Optimizer) for item in listed):
        return scaling.clip([gradients_beside(item) for item in listed], max_norm)  # type: ignore[arg-type]
    parameters = [
        p for item in listed for p in (item.parameters() if isinstance(item, nn.Module) else [item])
    ]
    if wrong := next((p for p in parameters if not isinstance(p, Tensor)), None):
        raise ConfigError(
            f"clip_grad_norm_ was given {type(wrong).__name__}; give it the optimizer, the model, or "
            "model.parameters()."
        )
    return scaling.clip_parameters([p for p in parameters if isinstance(p, Tensor)], max_norm)


def unscale_(optimizer: Optimizer) -> None:
    """Divide the gradients by their loss scale now, once, to read or change them before the step.

    With master weights the gradients are then those of the optimizer's parameters (`optimizer.param_groups`), in fp32.
    """
    gradients_beside(optimizer).unscale()


def scalers_of(optimizer: Optimizer) -> list[LossScaler]:
    """The loss scalers of an accelerated optimizer, one per loss, up to date; empty without a loss scale."""
    session = gradients_beside(optimizer).session
    session.move_scales()
    return session.scalers


def master_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The fp32 weights of an accelerated model by name; the masters, if there are any."""
    masters = gradients_beside(optimizer).session.masters
    inner = unwrapped(model)
    return dict(inner.named_parameters()) if masters is None else masters.named(inner)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _follow_weights(optimizer: Optimizer, numerics: Numerics) -> None:
    """For O3: parameters keep their identity, so that the optimizer keeps working; its state changes type with them."""
    _state_follows(optimizer)
    if loses_updates(optimizer):
        _log.warning(
            "torch's fused SGD does not update %s weights on a CPU (pytorch issue 191763), so this optimizer goes on "
            "unfused.",
            numerics.weights,
        )
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = False, False
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _state_follows(optimizer: Optimizer) -> None:
    """Cast an optimizer's state to the types that its weights have now."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                state[key] = value.to(parameter.dtype)
    if isinstance(optimizer, Contiguous):
        optimizer.lay_out_again()


# -- checks with which `accelerate` refuses arguments before it changes anything


def check_kinds(models: list[Any], optimizers: list[Any]) -> None:
    """Refuse models that are not modules, and optimizers that are not optimizers."""
    if not models:
        raise ConfigError("accelerate was given no model.")
    for value in optimizers:
        if not isinstance(value, Optimizer) and hasattr(value, "param_groups"):
            raise ConfigError(
                f"A {type(value).__name__} is not a torch.optim.Optimizer, but has param_groups: perhaps it wraps "
                "one. Accelerate the optimizer inside, wrap that afterwards, and call "
                "penstock.precision.unscale_(optimizer) on the one inside before each step, so that the wrapper reads "
                "gradients without loss scale."
            )
    for kind, expected, values in (("model", nn.Module, models), ("optimizer", Optimizer, optimizers)):
        for value in values:
            if not isinstance(value, expected):
                raise ConfigError(
                    f"accelerate was given a {type(value).__name__} as {kind}; give it a {expected.__module__}."
                    f"{expected.__name__}, or a list of them."
                )


def check_options(scaler: Any, agree: Any) -> None:
    """Refuse options that a loss scale does not have, and an `agree` that cannot be called."""
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
    numerics: Numerics,
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
        f"{numerics.level} replaces weights, and DistributedDataParallel holds on to those it was given; "
        "accelerate the model first and wrap it afterwards."
        for model in models
        if numerics.weights != "fp32" and isinstance(uncompiled(model), nn.parallel.DistributedDataParallel)
    ]
    for model in bare:
        before = precision_on(model)
        if before is not None and not before.weights == numerics.weights == "fp32":
            problems.append(already(model))
            continue
        lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            problems.append(f"{lazy} has no shape yet; call the model once before accelerate.")
            continue
        halves = [name for name, p in model.named_parameters() if is_half(p)]
        if halves:
            problems.append(
                f"{halves[0]} and {len(halves) - 1} more weights are half, but accelerate starts from fp32 weights "
                "and makes the half ones itself; call model.float() before making the optimizer."
            )
    if numerics.masters != "none":
        problems += _shared_weights(numerics.level, bare, optimizers)
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
    """Errors for weights of two optimizers: only one of the two could have their masters."""
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
