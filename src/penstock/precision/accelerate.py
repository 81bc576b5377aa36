"""Mixed precision in three lines, on any model and any optimizer.

model, optimizer = penstock.accelerate(model, optimizer, precision="O1")
with penstock.scale_loss(loss, optimizer) as scaled:
    scaled.backward()
optimizer.step()
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.config.convert import nearest
from penstock.errors import CheckpointError, ConfigError, NumericError
from penstock.optim.contiguous import Contiguous
from penstock.optim.remainder import RemainderAdamW
from penstock.optim.traps import loses_updates
from penstock.precision import scaling
from penstock.precision.forward import unwrapped, wrap_forward
from penstock.precision.fp8_linear import convert_to_fp8
from penstock.precision.lists import apply_modules, default_lists
from penstock.precision.master import MasterWeights
from penstock.precision.overflow import OverflowTrace
from penstock.precision.remainders import complete
from penstock.precision.scaler import PATIENCE, Agree, LossScaler, agree_over
from penstock.precision.scaling import Gradients, Skip
from penstock.precision.settings import Precision, resolve

M = TypeVar("M", nn.Module, Sequence[nn.Module])
O = TypeVar("O", Optimizer, Sequence[Optimizer])  # noqa: E741
_KEY = "penstock"
_LATE = 4
"""Steps."""
_log = logging.getLogger(__name__)
_CLASSES: dict[type[Optimizer], type[Optimizer]] = {}


class Session:
    """What the models, optimizers and losses of one `accelerate` call share."""

    def __init__(
        self,
        precision: Precision,
        models: list[nn.Module],
        optimizers: list[Optimizer],
        *,
        losses: int,
        scaler: Mapping[str, Any],
        agree: Agree | None,
        skip: Skip,
    ) -> None:
        self.precision = precision
        self.models = models
        self.agree = agree
        self.masters: MasterWeights | None = None
        if precision.weights == "half":
            assert precision.dtype is not None
            if precision.master == "copy":
                self.masters = MasterWeights(
                    models, optimizers, precision.dtype, norms=precision.norms, lists=precision.lists
                )
        device = _device_of(models)
        self.scalers = [_scaler(precision, device, scaler) for _ in range(losses)] if precision.scales else []
        self._noted: dict[int, tuple[Tensor, bool]] = {}
        self._polls = [_Poll() for _ in self.scalers]
        self._search: _Search | None = None
        self.gradients = [Gradients(optimizer, self, skip=skip) for optimizer in optimizers]

    def note(self, scaler: LossScaler, found_inf: Tensor, *, stepped: bool = True) -> None:
        """An optimizer has used gradients under this scaler, or thrown them away without having `stepped`; the scale
        moves before the next backward pass.
        """
        before, earlier = self._noted.get(id(scaler), (None, False))
        found_inf = found_inf if before is None else torch.maximum(before, found_inf)
        self._noted[id(scaler)] = (found_inf, stepped or earlier)

    def start_again(self) -> None:
        """Forget what belongs to the run before a state was loaded: noted overflows, and gradients."""
        self._noted.clear()
        self._polls = [_Poll() for _ in self.scalers]
        if self._search is not None:
            self._search.trace.detach()
            self._search = None
        for own in self.gradients:
            own.forget()

    def settle(self, scaler: LossScaler) -> None:
        """Move the scale by what was noted since it last moved.

        Raises:
            NumericError: gradients have overflowed at the lowest scale for some steps.
        """
        noted = self._noted.pop(id(scaler), None)
        if noted is None:
            return
        found_inf, stepped = noted
        scaler.update(found_inf.to(scaler.scale.device, non_blocking=True), stepped=stepped)
        if self._search is None:
            lost = self._polls[self.scalers.index(scaler)].look(scaler.lost)
            if lost is not None and lost >= PATIENCE:
                # The run is lost. The next whole step shows where; of the present one the forward pass is over.
                self._search = _Search(scaler, OverflowTrace(self.models).attach())
        elif self._search.scaler is scaler:
            self._search.turns += 1
            if self._search.turns == 2:
                self._end(self._search)

    def _end(self, search: _Search) -> None:
        self._search = None
        search.trace.detach()
        scaler = search.scaler
        if scaler.lost.item() < PATIENCE:
            return
        first = search.trace.first(self._named_gradients())
        where = f"it begins in {first}" if first else "it begins on another rank"
        raise NumericError(
            f"The loss scale has fallen to {scaler.scale.item():g} and gradients still overflow in "
            f"{self.precision.dtype_name}; {where}. Use dtype='bf16', which has the range of fp32, keep that layer in "
            "fp32 (fp32_modules of the op lists), or lower the learning rate."
        )

    def _named_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for model in self.models:
            for name, parameter in model.named_parameters():
                held = parameter if self.masters is None else self.masters.master_of(parameter)
                yield name, held.grad

    def settle_all(self) -> None:
        """Move every scale; none is in use."""
        for scaler in self.scalers:
            self.settle(scaler)


@dataclass(slots=True)
class _Search:
    """A lost run's look for the layer where gradients overflow."""

    scaler: LossScaler
    trace: OverflowTrace
    turns: int = 0
    """How often the scale has moved since it began."""


class _Poll:
    """Reads a number off the device `_LATE` steps late, when it is there: the host does not wait. All ranks read the
    number of the same step, for they must act in the same step too.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def look(self, value: Tensor) -> float | None:
        if value.device.type != "cuda":
            return float(value)
        seen = None
        if len(self._under_way) == _LATE:
            host, event = self._under_way.popleft()
            event.synchronize()
            seen = float(host)
        else:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host.copy_(value, non_blocking=True)
        event.record()
        self._under_way.append((host, event))
        return seen


@overload
def accelerate(model: M, optimizer: None = None, *, precision: str = "O1", **properties: Any) -> M: ...
@overload
def accelerate(model: M, optimizer: O, *, precision: str = "O1", **properties: Any) -> tuple[M, O]: ...


def accelerate(
    model: Any,
    optimizer: Any = None,
    *,
    precision: str = "O1",
    dtype: str | torch.dtype = "auto",
    losses: int = 1,
    scaler: Mapping[str, Any] | None = None,
    agree: Agree | Literal["auto"] | None = "auto",
    skip: Skip = "auto",
    **overrides: Any,
) -> Any:
    """Train a model in mixed precision: returns what was given, changed in place.

    `model` is any module, or a list of them; `optimizer` any optimizer over their parameters, a list, or None for
    inference, where the model alone is returned. `precision` is a level: O0 fp32; O1 each operation in the type that
    the op lists give it, over fp32 weights; O2 half weights with fp32 master weights and norms; O3 half throughout.
    `dtype` is bf16, fp16 or auto. `losses` is how many losses have a scale of their own (see `scale_loss`).
    `overrides` are single properties of the level (see `Precision`); `scaler` options of the loss scale (see
    `LossScaler`).

    With a loss scale, ranks take one decision about each step: `agree` makes it, by default over the default process
    group if there is one. `skip` says who skips an overflowed step: the `device`, so that the host never waits, the
    `host`, or `auto`: the device where the optimizer's kernels can (fused, contiguous), else the host. For optimizers
    that cannot, `device` keeps a copy of weights and state during each step.

    Accelerate after the model is on its device and the optimizer is made, and before DistributedDataParallel.
    torch.compile may come before or after.

    Raises:
        ConfigError: the level is unknown, properties contradict each other, or model and optimizer do not fit them.
    """
    models = _listed(model)
    optimizers = _listed(optimizer)
    _check_kinds(models, optimizers)
    _check_options(scaler, agree, skip)
    properties = resolve(precision, dtype=dtype, device=_device_of(models), **overrides)
    bare = [unwrapped(m) for m in models]
    _check(properties, models, bare, optimizers, losses)
    if properties.fp8 != "none":
        for module in bare:
            convert_to_fp8(module, properties.fp8)
    if properties.master == "remainder":
        optimizers = list(complete(optimizers, bare, norms=properties.norms, lists=properties.lists))
        if optimizer is not None:
            optimizer = optimizers[0] if isinstance(optimizer, Optimizer) else type(optimizer)(optimizers)
    session = Session(
        properties,
        bare,
        optimizers,
        losses=losses,
        scaler=scaler or {},
        agree=agree_over() if agree == "auto" else agree,
        skip=skip,
    )
    if properties.weights == "half" and properties.master == "none":
        _cast_in_place(bare, optimizers, properties)
    if properties.autocast and properties.dtype is not None:
        lists = properties.lists or default_lists(properties.dtype, _device_of(models).type)
        properties = replace(properties, lists=lists)
        for module in bare:
            apply_modules(module, lists)
    if properties.dtype is not None:
        for module in bare:
            wrap_forward(module, properties)
    for own in session.gradients:
        own.optimizer.__dict__["_penstock"] = own
        if session.masters is not None or properties.scales:
            _attend(own)
    _log.info("%s", properties.describe())
    return model if optimizer is None else (model, optimizer)


@contextmanager
def scale_loss(
    loss: Tensor, optimizer: Optimizer | Sequence[Optimizer], *, loss_id: int = 0
) -> Iterator[Tensor]:
    """Yields the loss to call `backward()` on: multiplied by the loss scale where there is one.

    `optimizer` is every optimizer that will step on these gradients. Calls add up until the step, as gradients do.
    Losses with a `loss_id` of their own have a scale of their own: name their number to `accelerate`. Afterwards the
    gradients are scaled until `penstock.clip_grad_norm_`, `penstock.precision.unscale_` or the step.

    Raises:
        ConfigError: an optimizer was not accelerated, or there is no such loss.
        NumericError: gradients overflow at the lowest scale; names the layer where they begin to.
    """
    all_of = [gradients_beside(o) for o in ([optimizer] if isinstance(optimizer, Optimizer) else optimizer)]
    session = all_of[0].session
    if any(own.session is not session for own in all_of):
        raise ConfigError(
            "scale_loss was given optimizers of different accelerate calls; accelerate them in one call, as lists."
        )
    if not session.precision.scales:
        if session.masters is not None:
            for own in all_of:
                own.prepare(None)
        yield loss
        return
    if not 0 <= loss_id < len(session.scalers):
        raise ConfigError(
            f"scale_loss was given loss_id={loss_id}, but accelerate was told of {len(session.scalers)} "
            f"loss{'es' if len(session.scalers) > 1 else ''}; call accelerate(…, losses={loss_id + 1})."
        )
    scaler = session.scalers[loss_id]
    if any(own.yielded is not None and own.yielded() is loss for own in all_of):
        raise ConfigError(
            "scale_loss was given a loss that it has scaled already; open it once for each loss, on the loss itself."
        )
    if not any(own.prepared and own.scaler is scaler for own in all_of):
        session.settle(scaler)  # never between the micro-batches of one step
    scaled = scaler.scaled(loss)
    for own in all_of:
        own.prepare(scaler)
        own.yielded = weakref.ref(scaled)
    yield scaled


def clip_grad_norm_(optimizer: Optimizer | Sequence[Optimizer], max_norm: float) -> Tensor:
    """Scale the gradients of an accelerated optimizer, or of several taken together, so that their global 2-norm is at
    most `max_norm`; returns the norm before, 0-d, on the device, without loss scale.

    Gradients are unscaled once, here or in the step, in the same pass. Raises ConfigError for an optimizer that was
    not accelerated: `penstock.optim.clip_grad_norm_` serves those.
    """
    if not max_norm > 0.0:
        raise ConfigError(f"max_norm is {max_norm}, but must be above 0.")
    listed = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    return scaling.clip([gradients_beside(one) for one in listed], max_norm)


def unscale_(optimizer: Optimizer) -> None:
    """Divide the gradients by their loss scale now, once, to read or change them before the step.

    With master weights the gradients are then at the optimizer's parameters (`optimizer.param_groups`), in fp32.
    """
    gradients_beside(optimizer).unscale()


def gradients_beside(optimizer: Optimizer) -> Gradients:
    """What `accelerate` put beside an optimizer. Raises ConfigError if it was not accelerated."""
    own = optimizer.__dict__.get("_penstock") if isinstance(optimizer, Optimizer) else None
    if own is None:
        raise ConfigError(
            f"This {type(optimizer).__name__} was not accelerated; call "
            "`model, optimizer = penstock.accelerate(model, optimizer)` first."
        )
    found: Gradients = own
    return found


def scalers_of(optimizer: Optimizer) -> list[LossScaler]:
    """The loss scalers an accelerated optimizer shares, one per loss, up to date; empty where nothing is scaled."""
    session = gradients_beside(optimizer).session
    session.settle_all()
    return session.scalers


def master_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The fp32 weights of an accelerated model by name: masters where there are any; those of the remainder form are
    made for the occasion, so that writing to them changes nothing.
    """
    masters = gradients_beside(optimizer).session.masters
    inner = unwrapped(model)
    if isinstance(optimizer, RemainderAdamW):
        return {
            name: optimizer.fp32_weight(p) if optimizer.completes(p) else p
            for name, p in inner.named_parameters()
        }
    return dict(inner.named_parameters()) if masters is None else masters.named(inner)


# -- checks


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _check_kinds(models: list[Any], optimizers: list[Any]) -> None:
    for value, kind, wanted in [(m, "model", nn.Module) for m in models] + [
        (o, "optimizer", Optimizer) for o in optimizers
    ]:
        if not isinstance(value, wanted):
            raise ConfigError(
                f"accelerate was given a {type(value).__name__} as {kind}; give it a {wanted.__module__}."
                f"{wanted.__name__}, or a list of them."
            )
    if not models:
        raise ConfigError("accelerate was given no model.")


def _check_options(scaler: Any, agree: Any, skip: Any) -> None:
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
    if skip not in get_args(Skip):
        problems.append(f"skip is {skip!r}, but must be one of {', '.join(get_args(Skip))}.")
    if problems:
        raise ConfigError(problems)


def _check(
    properties: Precision,
    models: list[nn.Module],
    bare: list[nn.Module],
    optimizers: list[Optimizer],
    losses: int,
) -> None:
    problems = []
    if not isinstance(losses, int) or losses < 1:
        problems.append(f"losses is {losses!r}, but must be a whole number of at least 1.")
    problems += [
        f"{properties.level} replaces weights, and DistributedDataParallel holds on to those it was given; "
        "accelerate the model first and wrap it afterwards."
        for model in models
        if properties.weights == "half" and _in_ddp(model)
    ]
    for model in bare:
        halves = [name for name, p in model.named_parameters() if p.dtype in (torch.float16, torch.bfloat16)]
        if halves:
            problems.append(
                f"{halves[0]} and {len(halves) - 1} more weights are half, but accelerate starts from fp32 weights "
                "and makes the half ones itself; call model.float() before making the optimizer."
            )
    if properties.weights == "half" and properties.master == "copy":
        problems += _shared_weights(bare, optimizers)
    problems += [
        f"This {type(optimizer).__name__} is already accelerated; make a new one."
        for optimizer in optimizers
        if "_penstock" in optimizer.__dict__
    ]
    if problems:
        raise ConfigError(problems)


def _shared_weights(models: list[nn.Module], optimizers: list[Optimizer]) -> Iterator[str]:
    """Weights of two optimizers: only one of them could have their masters."""
    names = {id(p): name for model in models for name, p in model.named_parameters()}
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                other = owners.setdefault(id(parameter), optimizer)
                if other is not optimizer:
                    yield (
                        f"{names.get(id(parameter), 'A weight')} is trained by a {type(other).__name__} and by a "
                        f"{type(optimizer).__name__}, and O2 keeps its fp32 weight with one of them; use "
                        "precision='O1', or give each weight to one optimizer."
                    )
                    return


def _in_ddp(model: nn.Module) -> bool:
    inner = model._modules.get("_orig_mod")
    return isinstance(model, nn.parallel.DistributedDataParallel) or (inner is not None and _in_ddp(inner))


def _device_of(models: Sequence[nn.Module]) -> torch.device:
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cpu")


def _scaler(precision: Precision, device: torch.device, options: Mapping[str, Any]) -> LossScaler:
    if precision.loss_scale == "dynamic":
        return LossScaler(device, **options)
    constant = float(precision.loss_scale)
    return LossScaler(device, initial=constant, floor=constant, ceiling=constant, dynamic=False)


def _cast_in_place(models: list[nn.Module], optimizers: list[Optimizer], properties: Precision) -> None:
    """O3: parameters keep their identity, so that the optimizer goes on with them; its state follows their type."""
    dtype = properties.dtype
    assert dtype is not None
    # Without an optimizer to keep them, MasterWeights casts and sees to state dicts.
    MasterWeights.cast(models, dtype, norms=properties.norms, lists=properties.lists)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                    state[key] = value.to(parameter.dtype)
        if isinstance(optimizer, Contiguous):
            optimizer.lay_out_again()
        if loses_updates(optimizer):
            _log.warning(
                "torch's fused SGD does not update %s weights on a CPU (pytorch issue 191763), so this optimizer "
                "goes on unfused.",
                properties.dtype_name,
            )
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = False, False
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


# -- the optimizer's own methods


def _attend(own: Gradients) -> None:
    """Let the optimizer's step, zero_grad and state dict see to loss scale and master weights."""
    optimizer = own.optimizer
    cls = type(optimizer)
    if cls not in _CLASSES:
        _CLASSES[cls] = _subclass(cls)
    stepping = optimizer.__dict__.get("step")
    optimizer.__class__ = _CLASSES[cls]
    if stepping is not None:  # a learning-rate scheduler wrapped it on the instance

        @functools.wraps(stepping)
        def step(closure: Callable[[], Any] | None = None) -> Any:
            return own.step(functools.partial(_call, stepping), closure)

        optimizer.step = step  # type: ignore[method-assign]


def _call(step: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
    return step() if closure is None else step(closure)


def _subclass(cls: type[Optimizer]) -> type[Optimizer]:
    original: Callable[..., Any] = cls.step

    @functools.wraps(original)
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return gradients_beside(self).step(
            functools.partial(_call, functools.partial(original, self)), closure
        )

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        own = gradients_beside(self)
        if own.prepared:
            own.discard()
        else:
            own.forget()
        if own.session.masters is not None:
            own.session.masters.zero_grad(self, set_to_none=set_to_none)
        cls.zero_grad(self, set_to_none=set_to_none)

    def state_dict(self: Optimizer) -> dict[str, Any]:
        session = gradients_beside(self).session
        session.settle_all()
        packed = cls.state_dict(self)
        packed[_KEY] = {
            "precision": session.precision.level,
            "dtype": session.precision.dtype_name,
            "scalers": [scaler.state_dict() for scaler in session.scalers],
        }
        return packed

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        session = gradients_beside(self).session
        plain = {key: value for key, value in state_dict.items() if key != _KEY}
        cls.load_state_dict(self, plain)
        session.start_again()
        _load_scalers(session, state_dict.get(_KEY))

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        masters = gradients_beside(self).session.masters
        if masters is None:
            cls.add_param_group(self, param_group)
            return
        param_group, new = masters.joining(param_group)
        cls.add_param_group(self, param_group)
        masters.join(self, new)

    def reduce(self: Optimizer, protocol: Any) -> Any:
        raise TypeError(
            "An accelerated optimizer cannot be copied or pickled: its master weights belong to the model. Accelerate "
            "a new pair and load this one's state_dict()."
        )

    made: type[Optimizer] = type(
        cls.__name__,
        (cls,),
        {
            "step": step, "zero_grad": zero_grad, "state_dict": state_dict, "load_state_dict": load_state_dict,
            "add_param_group": add_param_group,
            "__reduce_ex__": reduce, "__module__": cls.__module__, "__doc__": cls.__doc__,
        },
    )  # fmt: skip
    made.__qualname__ = cls.__qualname__
    return made


def _load_scalers(session: Session, stored: Mapping[str, Any] | None) -> None:
    if not session.scalers:
        return
    states = stored["scalers"] if stored else []
    if not states:
        _log.info("What was loaded was trained without a loss scale; it starts at its initial value.")
        return
    if len(states) != len(session.scalers):
        raise CheckpointError(
            f"The stored optimizer has {len(states)} loss scales, but accelerate was told of "
            f"{len(session.scalers)} losses; call accelerate(…, losses={len(states)})."
        )
    for scaler, state in zip(session.scalers, states):
        if scaler.dynamic:
            scaler.load_state_dict(state)
