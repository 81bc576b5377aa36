"""How weights in half get to disk and back as the fp32 values that they stand for: hooks on each module."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from penstock.errors import ConfigError


def take_masters(model: nn.Module) -> None:
    """Put the master weights into a copy of a model in place of the half ones. Under autocast it computes the same;
    averages of its weights, and whatever else is done to its state dict, then show in what it computes.

    What shares its weights with the original, as a shallow copy does, is left alone.
    """
    for module, stored in _all_fp32_states(model):
        for key, half in own_parameters(module):
            if half not in stored.masters or _marked(half):
                continue
            setattr(module, key, stored.masters[half])


def adopt_weights(model: nn.Module) -> None:
    """Take weights that were written in place over into the masters."""
    for _, stored in _all_fp32_states(model):
        for half, master in stored.masters.items():
            adopt(half, master)


def give_master(model: nn.Module, half: Parameter, master: Parameter) -> None:
    """From now on the state dict has the value of `master` for a half weight of the model."""
    for module, stored in _all_fp32_states(model):
        if any(parameter is half for _, parameter in own_parameters(module)):
            stored.masters[half] = master


def is_half(tensor: Tensor) -> bool:
    """Whether a tensor is of a half type."""
    return tensor.dtype in (torch.float16, torch.bfloat16)


def fp32_state_of(module: nn.Module) -> Fp32State | None:
    """How a module's own half weights get to disk; None where it has none."""
    return module.__dict__.get("_penstock_stored")


def own_parameters(module: nn.Module) -> list[tuple[str, Parameter]]:
    """The parameters of a module itself, each under every name that it has."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module itself."""
    return list(module.named_buffers(recurse=False, remove_duplicate=False))


def keep_handles(module: nn.Module, *handles: RemovableHandle) -> None:
    """Remember hooks of ours, so that `remove_hooks` finds them, in a copy of the module too."""
    module.__dict__.setdefault("_penstock_hooks", []).extend(handles)


def remove_hooks(module: nn.Module) -> None:
    """Take all hooks of ours off a module."""
    for handle in module.__dict__.pop("_penstock_hooks", []):
        handle.remove()


def _all_fp32_states(model: nn.Module) -> Iterator[tuple[nn.Module, Fp32State]]:
    for module in model.modules():
        stored = fp32_state_of(module)
        if stored is not None:
            yield module, stored


class Fp32State:
    """One module's way to disk and back: fp32 values under the plain names. Copied and pickled with its module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.masters: dict[Parameter, Parameter] = {}
        self.wide: dict[Parameter, Tensor] = {}
        """Values being loaded, between the two hooks."""

    def fp32(self, weight: Tensor) -> Tensor:
        """The exact value of a half weight or buffer."""
        master = self.masters.get(weight) if isinstance(weight, Parameter) else None
        if master is None:
            return weight.detach().float()
        adopt(weight, master)
        return master.detach()

    @torch.no_grad()
    def take(self, weight: Parameter, value: Tensor) -> None:
        """Give a half weight its exact value."""
        master = self.masters[weight]
        master.copy_(value)
        publish([weight], [master])

    def attach(self, module: nn.Module) -> None:
        """From now on, handle what is saved of a module and loaded into it."""
        target: Any = module
        module.__dict__["_penstock_stored"] = self
        keep_handles(
            module,
            target.register_state_dict_post_hook(self),
            target.register_load_state_dict_pre_hook(self._loading),
            target.register_load_state_dict_post_hook(self._loaded),
        )

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """A state dict was made. torch marks this hook by an attribute, which a method could not take."""
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
            if isinstance(value, Tensor) and value.shape == parameter.shape and parameter in self.masters:
                self.wide[parameter] = value

    def _loaded(self, module: nn.Module, _: Any) -> None:
        for parameter, value in self.wide.items():
            self.take(parameter, value)
        self.wide = {}


def publish(halves: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(halves), list(masters))
    for half in halves:
        mark(half)


def mark(half: Tensor) -> None:
    # With the identity: a copy that was unpickled with this mark has another count, which is no change.
    half._penstock_version = (id(half), half._version)  # type: ignore[attr-defined]


def _marked(half: Tensor) -> bool:
    """Whether this is the tensor that was published, and no copy of it."""
    return bool(getattr(half, "_penstock_version", (0, 0))[0] == id(half))


def adopt(half: Tensor, master: Tensor) -> None:
    """Take over a half weight that was written since it was published: in place, or perhaps through `.data`."""
    if not _marked(half):
        return
    touched = isinstance(half, HalfWeight) and half.__dict__.pop("_penstock_touched", False)
    if touched or half._penstock_version[1] != half._version:  # type: ignore[attr-defined]
        with torch.no_grad():
            # Where nothing was written, the master's other bits stay.
            kept = (master.to(half.dtype) == half) | half.isnan()
            master.copy_(torch.where(kept, master, half.to(master.dtype)))
        mark(half)


class HalfWeight(Parameter):
    """A half weight with a master. A write through `.data` raises no version, so that reading `.data` counts as one."""

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
