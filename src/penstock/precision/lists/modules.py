"""Modules on the op lists: a module's class is swapped for a subclass of the same name whose forward casts, so that
names, `isinstance` and hooks stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from penstock.config.convert import nearest
from penstock.dtypes import HALVES
from penstock.errors import ConfigError
from penstock.models.former_names import present_patterns
from penstock.precision.copies import ModuleStandIns
from penstock.precision.lists.mode import cast, device_type_of, prepare, region
from penstock.precision.lists.op_lists import ModuleChoice, OpLists, differences

_KEY = "_penstock_lists"
_LSTM = "torch.lstm"
# torch's modules that are one operation, for which `keep` can save a copy in fp32.
_SINGLE: dict[type[nn.Module], str] = {
    nn.LayerNorm: "torch.nn.functional.layer_norm",
    nn.GroupNorm: "torch.nn.functional.group_norm",
    nn.RMSNorm: "torch.nn.functional.rms_norm",
    nn.Softmax: "torch.nn.functional.softmax",
}


@dataclass(frozen=True, slots=True)
class _Treatment:
    """The change to a treated module's forward pass."""

    kind: Literal["fp32", "half", "keep", "enter", "recurrent"]
    lists: OpLists
    devices: tuple[str, ...] = ()
    """Devices on which `keep` makes a difference."""
    dtypes: tuple[torch.dtype, ...] = ()
    """The half types that `recurrent` does not support on a CPU."""
    twin: nn.LSTM | None = None
    """For `recurrent`: the same layer without weights."""


def apply_modules(model: nn.Module, lists: OpLists | None) -> None:
    """Prepare a model's modules to follow `lists`, in place; each acts only where autocast is on.

    Modules in `fp32_modules` and `half_modules` cast their inputs; an fp32 module includes everything inside it.
    torch's modules that are a single `keep` operation run in the type of their input, and an LSTM on a CPU whose kernel
    lacks the half type runs in fp32. If the lists differ from torch.autocast's, modules with children enter `region`
    when they run alone, as in activation checkpointing's backward pass. Repeating the call replaces the effect of an
    earlier one.

    Raises:
        ConfigError: a name, pattern or class of `fp32_modules` or `half_modules` fits no module.
    """
    restore_modules(model)
    if lists is None:
        return
    prepare(lists)
    chosen: dict[str, _Treatment] = {}
    modules = dict(model.named_modules())
    problems = []
    for kind, choices in (("half", lists.half_modules), ("fp32", lists.fp32_modules)):
        for choice in present_patterns(model, choices):
            matching = list(_matching(modules, choice))
            if not matching:
                problems.append(_unmatched(modules, choice, kind))
            chosen |= {name: _Treatment("half" if kind == "half" else "fp32", lists) for name in matching}
    if problems:
        raise ConfigError(problems)
    for name, module in modules.items():
        treatment = chosen.get(name) or _implied(module, lists)
        # The outermost module follows the lists anyway, except for a kernel that lacks the half type.
        inner = module is not model or name in chosen
        if treatment is not None and treatment.kind == "enter" and "forward" in module.__dict__:
            continue  # one bound to the instance hides the class's; what it calls enters by itself
        if treatment is not None and (inner or treatment.kind == "recurrent"):
            _treat(module, treatment)


def fp32_modules_of(model: nn.Module, lists: OpLists | None) -> set[nn.Module]:
    """The modules that `lists` run in fp32, with everything inside them: their weights must be fp32 too."""
    modules = dict(model.named_modules())
    choices = present_patterns(model, lists.fp32_modules if lists else ())
    named = {name for choice in choices for name in _matching(modules, choice)}
    return {inner for name in named for inner in modules[name].modules()}


def restore_modules(model: nn.Module) -> None:
    """Undo `apply_modules`."""
    for module in model.modules():
        if _KEY in module.__dict__ and not _STAND_INS.on(module):
            raise ConfigError(
                f"A {type(module).__name__} follows op lists and was wrapped once more since, by sharding perhaps; "
                "change op lists before that."
            )
        module.__dict__.pop(_KEY, None)
        _STAND_INS.take_off(module)


def _refused(module: nn.Module, lists: OpLists) -> tuple[torch.dtype, ...]:
    """The half types in which a CPU cannot run a module that autocast would run in them."""
    if not isinstance(module, nn.LSTM) or module.weight_ih_l0.device.type != "cpu":
        return ()
    return () if _LSTM in lists.policies() else tuple(dtype for dtype in HALVES if not cpu_runs_lstm(dtype))


@functools.cache
def cpu_runs_lstm(dtype: torch.dtype) -> bool:
    """Whether torch.autocast can run an LSTM on this CPU in a half type, which needs hardware units. Tried once."""
    x, state = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
    weights = [torch.zeros(*shape, requires_grad=True) for shape in ((4, 1), (4, 1), (4,), (4,))]
    with torch.enable_grad(), torch.autocast("cpu", dtype=dtype):
        try:
            output = torch.lstm(x, (state, state), weights, True, 1, 0.0, True, False, False)[0]
            output.sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False
    return True


def _matching(modules: dict[str, nn.Module], choice: ModuleChoice) -> Iterator[str]:
    for name, module in modules.items():
        if isinstance(module, choice) if isinstance(choice, type) else name and fnmatchcase(name, choice):
            yield name


def _unmatched(modules: dict[str, nn.Module], choice: ModuleChoice, kind: str) -> str:
    if isinstance(choice, type):
        return f"{kind}_modules names the class {choice.__qualname__}, of which the model has no module."
    return (
        f"{kind}_modules names {choice!r}, but the model has no such module.{nearest(choice, filter(None, modules))} "
        "Write qualified names as named_modules gives them, patterns such as 'blocks.*.mlp', or classes."
    )


def _implied(module: nn.Module, lists: OpLists) -> _Treatment | None:
    """The treatment that follows from the operations' lists."""
    refused = _refused(module, lists)
    if refused:
        return _Treatment("recurrent", lists, dtypes=refused, twin=_without_weights(module))
    operation = _SINGLE.get(type(module))
    if operation is not None:
        devices = tuple(d for d in ("cpu", "cuda") if differences(lists, d).get(operation) == "keep")
        return _Treatment("keep", lists, devices) if devices else None
    holds = next(module.children(), None) is not None
    if holds and any(mode is not None for mode in lists.modes.values()):
        return _Treatment("enter", lists)
    return None


def _treat(module: nn.Module, treatment: _Treatment) -> None:
    if "forward" in module.__dict__:
        raise ConfigError(
            f"The forward of a {type(module).__name__} was replaced on the instance, which hides the class's, so op "
            "lists cannot reach it; apply them before whatever replaces it."
        )
    module.__dict__[_KEY] = treatment
    _STAND_INS.put_on(module)


def _forward(cls: type[nn.Module]) -> dict[str, Any]:
    original: Callable[..., Any] = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        treatment: _Treatment | None = self.__dict__.get(_KEY)
        # An instance made by `type(treated)(…)` behaves as the original class.
        device = None if treatment is None else device_type_of((args, kwargs))
        if treatment is None or device is None or not torch.is_autocast_enabled(device):
            return original(self, *args, **kwargs)
        kind, dtype = treatment.kind, torch.get_autocast_dtype(device)
        refused = device == "cpu" and dtype in treatment.dtypes
        if (kind == "keep" and device not in treatment.devices) or (kind == "recurrent" and not refused):
            return original(self, *args, **kwargs)
        if kind == "keep":
            with torch.autocast(device, enabled=False):
                return _kept(self, args[0] if args else kwargs["input"])
        if kind in ("fp32", "recurrent"):
            args, kwargs = cast(args, torch.float32, device), cast(kwargs, torch.float32, device)
            with torch.autocast(device, enabled=False):
                if treatment.twin is None:
                    return original(self, *args, **kwargs)
                twin = treatment.twin.train(self.training)
                # Rounded as autocast would, so that a copy on master weights computes as its original.
                weights = {name: getattr(self, name).to(dtype).float() for name, _ in twin.named_parameters()}
                return functional_call(twin, weights, args, kwargs)
        if kind == "half":
            args, kwargs = cast(args, dtype, device), cast(kwargs, dtype, device)
        with region(treatment.lists, device, dtype):
            return original(self, *args, **kwargs)

    return {"forward": forward}


_STAND_INS = ModuleStandIns(_forward)


def _without_weights(layer: Any) -> nn.LSTM:
    """A layer without weights, to be called with other ones than its own."""
    return nn.LSTM(
        layer.input_size, layer.hidden_size, layer.num_layers, layer.bias, layer.batch_first, layer.dropout,
        layer.bidirectional, layer.proj_size, device="meta",
    )  # fmt: skip


def _kept(module: nn.Module, x: Tensor) -> Tensor:
    """A single operation in the type of its input; kernels require weights of the same type, and compute in fp32."""
    if isinstance(module, nn.Softmax):
        return F.softmax(x, module.dim)
    weight, bias = (
        None if parameter is None else parameter.to(x.dtype)
        for parameter in (getattr(module, "weight", None), getattr(module, "bias", None))
    )
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, weight, bias, module.eps)
    assert isinstance(module, nn.RMSNorm)
    return F.rms_norm(x, module.normalized_shape, weight, module.eps)
