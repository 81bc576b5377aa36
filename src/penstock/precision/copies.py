"""Copies and pickles of accelerated models. Hooks on each module save and load half weights as their exact fp32 values.

A copy is accelerated like its original. A pickle, including a whole model in `torch.save`, is the plain model in fp32:
it loads without Penstock installed, and under `torch.serialization.safe_globals`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from penstock.containers import tensors
from penstock.errors import ConfigError
from penstock.products.convert import restore_linears


def master_of(weight: Tensor) -> Parameter | None:
    """The fp32 master of a half weight; None without one."""
    return getattr(weight, "_penstock_master", None)


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is of a half type."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def fp32_state_of(module: nn.Module) -> Fp32State | None:
    """The hooks that save a module's own half weights as fp32; None if it has none."""
    return module.__dict__.get("_penstock_stored")


def own_parameters(module: nn.Module) -> list[tuple[str, Parameter]]:
    """The parameters of a module itself (not of its children), under each of their names."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module itself (not of its children)."""
    return list(module.named_buffers(recurse=False, remove_duplicate=False))


def keep_handles(module: nn.Module, *handles: RemovableHandle) -> None:
    """Remember hooks of ours, so that `remove_hooks` finds them, in a copy of the module too."""
    module.__dict__.setdefault("_penstock_hooks", []).extend(handles)


def remove_hooks(module: nn.Module) -> None:
    """Take all hooks of ours off a module."""
    for handle in module.__dict__.pop("_penstock_hooks", []):
        handle.remove()


class Fp32State:
    """Saves and loads a module's half weights as fp32 under the plain names. Copied and pickled with the module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.wide: dict[Parameter, Tensor] = {}
        """Values being loaded, between the pre-hook and the post-hook."""

    def fp32(self, weight: Tensor) -> Tensor:
        """The exact value of a half weight or buffer."""
        if (master := master_of(weight)) is None:
            return weight.detach().float()
        adopt(weight, master)
        return master.detach().to(weight.device)  # the script may have moved the model for saving

    @torch.no_grad()
    def take(self, weight: Parameter, value: Tensor) -> None:
        """Give a half weight its exact value."""
        master = master_of(weight)
        assert master is not None
        master.copy_(value)
        publish([weight], [master])

    def attach(self, module: nn.Module) -> None:
        """From now on, handle saving of a module and loading into it."""
        target: Any = module
        module.__dict__["_penstock_stored"] = self
        keep_handles(
            module,
            target.register_state_dict_post_hook(self),
            target.register_load_state_dict_pre_hook(self._loading),
            target.register_load_state_dict_post_hook(self._loaded),
        )

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Hook after a state dict was made. torch sets an attribute on it, which a method could not take."""
        for key, value in (*own_parameters(module), *own_buffers(module)):
            if prefix + key in state and value.dtype == self.dtype:
                state[prefix + key] = self.fp32(value)

    def _loading(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise ConfigError(
                "load_state_dict(assign=True) would replace the half weights that master weights stand behind; load "
                "without assign, or load before the model is accelerated."
            )
        self.wide = {}
        for key, parameter in own_parameters(module):
            value = state.get(prefix + key)
            # torch reports a tensor of another shape.
            if (
                isinstance(value, Tensor)
                and value.shape == parameter.shape
                and master_of(parameter) is not None
            ):
                self.wide[parameter] = value

    def _loaded(self, module: nn.Module, _: Any) -> None:
        for parameter, value in self.wide.items():
            self.take(parameter, value)
        self.wide = {}


def publish(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(halves), list(masters))
    for half in halves:
        mark(half)


def attach_master(half: Parameter, master: Parameter, *, autocast: bool) -> None:
    """Let `master` hold the value of a half weight; `autocast`: whether the model would compute alike on the master."""
    half.__dict__.update(_penstock_master=master, _penstock_autocast=autocast)
    mark(half)


def mark(half: Tensor) -> None:
    # With the identity, because an unpickled copy of this mark has another version count without a change.
    half._penstock_version = (id(half), half._version)  # type: ignore[attr-defined]


def _marked(half: Tensor) -> bool:
    """Whether this is the published tensor itself and not a copy of it."""
    return bool(getattr(half, "_penstock_version", (0, 0))[0] == id(half))


def adopt(half: Tensor, master: Tensor) -> None:
    """Copy a half weight to its master if it was written since it was published: in place, or perhaps by `.data`."""
    if not _marked(half):
        return
    touched = isinstance(half, HalfWeight) and half.__dict__.pop("_penstock_touched", False)
    if touched or half._penstock_version[1] != half._version:  # type: ignore[attr-defined]
        with torch.no_grad():
            # Unwritten elements keep the master's additional bits.
            value = half.to(master.device)
            kept = (master.to(half.dtype) == value) | value.isnan()
            master.copy_(torch.where(kept, master, value.to(master.dtype)))
        mark(half)


_OF_A_MODEL: Any = "penstock: a model is copied"
"""Key in the memo of `copy.deepcopy`."""


class HalfWeight(Parameter):
    """A half weight that may have a master. A write through `.data` raises no version, so reading `.data` counts as a
    write.

    In a copy of a model that computes under autocast, a copy of the weight is a copy of the master: the copied model
    computes the same, and averaging its weights, or any other change through its state dict, takes effect.
    """

    def __deepcopy__(self, memo: dict[Any, Any]) -> Parameter:
        master = master_of(self)
        if master is None or id(self) in memo:
            return super().__deepcopy__(memo)  # type: ignore[no-any-return, no-untyped-call]
        adopt(self, master)
        copied: Parameter = copy.deepcopy(master, memo)
        if not (self.__dict__["_penstock_autocast"] and _OF_A_MODEL in memo):
            half: Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
            attach_master(half, copied, autocast=False)
            return half
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.detach() if (master := master_of(self)) is None else master.detach()
        wide: Any = Parameter(value.float(), self.requires_grad)
        return wide.__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:
        self.__dict__["_penstock_touched"] = True
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__["_penstock_touched"] = True
        _DATA.__set__(self, value)


_DATA: Any = inspect.getattr_static(Tensor, "data")


_CLASS: Any = object.__dict__["__class__"]


class _Quiet:
    """First base of a stand-in while it is created, so that the original's `__init_subclass__` is not called, as its
    metaclass is not: registries keep the original, and arguments that such a hook may require are not needed."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


class StandIns:
    """One stand-in for each class, made when it is first needed: a subclass with the original's name.

    `attributes(cls)` returns the stand-in's own methods. An object's `__class__` still reads as the original, which
    pickle looks up by name. Only torch.compile's lookup of methods reads the stand-in. If code assigns another class,
    as sharding and parametrizations do, the object gets a stand-in for that class.
    """

    def __init__(self, attributes: Callable[[Any], dict[str, Any]]) -> None:
        self._attributes = attributes
        self._made: dict[type, type] = {}

    def put_on(self, value: Any) -> None:
        """Replace an object's class by its stand-in."""
        _CLASS.__set__(value, self._for(type(value)))

    def take_off(self, value: Any) -> None:
        """Give an object its original class back; no effect if it has that."""
        if self.on(value):
            _CLASS.__set__(value, type(value).__mro__[1])

    def on(self, value: Any) -> bool:
        """Whether an object's class is a stand-in of this kind."""
        kind = type(value)
        return self._made.get(kind.__mro__[1]) is kind if len(kind.__mro__) > 1 else False

    def _for(self, cls: type) -> type:
        if cls not in self._made:
            kept = {"__module__": cls.__module__, "__doc__": cls.__doc__}
            original = vars(cls).get("_penstock_original", cls)  # one may stand in for another
            shown = property(
                lambda value: (
                    type(value)
                    if not torch.compiler.is_dynamo_compiling() and asked_by(*_METHODS_IN_DYNAMO)
                    else original
                ),
                lambda value, new: _CLASS.__set__(value, self._for(new)),
            )
            names = {**kept, "__class__": shown, "_penstock_original": original, **self._attributes(cls)}
            made = type.__new__(type(cls), cls.__name__, (_Quiet, cls), names)
            made.__bases__ = (cls,)
            made.__qualname__ = cls.__qualname__
            self._made[cls] = made
        return self._made[cls]


_METHODS_IN_DYNAMO = "torch._dynamo", "lookup_class_mro_attr"
"""torch.compile's lookup of an object's methods. Elsewhere it must read the class that compiled code will read."""


def asked_by(package: str, function: str = "") -> bool:
    """Whether a package's code, or one of its functions, is reading the property whose getter calls this."""
    frame = sys._getframe(2)
    own = str(frame.f_globals.get("__name__")).startswith(package)
    return own and function in ("", frame.f_code.co_name)


_KINDS: list[ModuleStandIns] = []
"""Every kind of stand-in that modules may have."""


class ModuleStandIns(StandIns):
    """Stand-ins for module classes, with copies and pickles as described at the top of this file."""

    def __init__(self, attributes: Callable[[Any], dict[str, Any]]) -> None:
        def with_copies(cls: type[nn.Module]) -> dict[str, Any]:
            return {
                **attributes(cls),
                "__deepcopy__": property(lambda module: self._copier(module, cls, by_name=asked_by("copy"))),
                "__copy__": lambda module: self._copied(module, lambda: copy.copy(module)),
                "__reduce_ex__": lambda module, protocol: plain(module).__reduce_ex__(protocol),
            }

        super().__init__(with_copies)
        _KINDS.append(self)

    def _copier(self, module: nn.Module, cls: type[nn.Module], *, by_name: bool) -> Any:
        """The stand-in's `__deepcopy__` if copy.deepcopy asks for it. A wrapper that forwards missing attributes to
        this module, as PEFT's do, must not get it as its own.
        """
        if by_name:
            return functools.partial(self._deep, module)
        own: Any = getattr(cls, "__deepcopy__", None)
        if own is None:
            raise AttributeError("__deepcopy__")
        return own.__get__(module)

    def _deep(self, module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
        memo[_OF_A_MODEL] = True
        return self._copied(module, lambda: copy.deepcopy(module, memo))

    def _copied(self, module: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        # The original's own copying methods, above all `__getstate__`, need its own class.
        self.take_off(module)
        try:
            copied = make()
        finally:
            self.put_on(module)
        if any(key.startswith("_penstock") for key in copied.__dict__):
            self.put_on(copied)
        return copied


@torch.no_grad()
def plain(model: nn.Module) -> nn.Module:
    """The model without Penstock: plain classes, fp32 weights, none of our hooks.

    Weights that are fp32 already, and master weights, are shared with the model and not copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        stored = fp32_state_of(module)
        for _, value in (*own_parameters(module), *own_buffers(module)):
            memo[id(value)] = _fp32(value, stored)
        for value in tensors(list(vars(module).values())):
            memo.setdefault(id(value), value)  # copy refuses those that autograd has made
        if stored is not None:
            memo[id(stored)] = Fp32State(stored.dtype)
    twin = copy.deepcopy(model, memo)
    strip(twin)
    return twin


def strip(model: nn.Module) -> None:
    """Remove everything that Penstock has added to a model, except the type of its weights."""
    for module in model.modules():
        for kind in reversed(_KINDS):
            kind.take_off(module)
        remove_hooks(module)
        for mark in [name for name in module.__dict__ if name.startswith("_penstock")]:
            del module.__dict__[mark]
    restore_linears(model)


@torch.no_grad()
def widen(model: nn.Module) -> None:
    """Give a model its fp32 weights back, in place: the masters that optimizers hold, if there are any."""
    widened: dict[int, Tensor] = {}
    for module in model.modules():
        stored = fp32_state_of(module)
        if stored is None:
            continue
        for key, weight in own_parameters(module):
            if not is_half(weight):
                continue
            master = master_of(weight)
            if master is not None or isinstance(weight, HalfWeight):
                if id(weight) not in widened:
                    stored.fp32(weight)  # takes over what was written to it
                    widened[id(weight)] = _fp32(weight, stored) if master is None else master
                setattr(module, key, widened[id(weight)])
            else:  # the optimizer holds this very parameter
                weight.grad = None
                weight.data = stored.fp32(weight)
        for key, buffer in own_buffers(module):
            if buffer.dtype == stored.dtype:
                setattr(module, key, buffer.float())


def _fp32(value: Tensor, stored: Fp32State | None) -> Tensor:
    if stored is None or not is_half(value):
        return value
    wide = stored.fp32(value)
    if isinstance(value, Parameter):
        wide = Parameter(wide, requires_grad=value.requires_grad)
    wide.__dict__.update({key: v for key, v in value.__dict__.items() if not key.startswith("_penstock")})
    return wide
