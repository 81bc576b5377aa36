"""Finds while a script runs which model an optimizer trains, and the moment to accelerate both.

An optimizer waits from its construction until a module that owns its parameters is called, with gradients, from outside
any other module. At that time the script has placed the model, and nothing has been computed yet. Models that are
trained together with it, and their optimizers, are taken at the same time.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from penstock.config.numerics import Numerics
from penstock.errors import ConfigError
from penstock.optim.tensors import parameters_of
from penstock.precision.copies import is_half, master_of
from penstock.precision.forward import (
    living,
    precision_on,
    redirected,
    replaced_forward,
    unwrapped,
)
from penstock.precision.settings import properties_of
from penstock.precision.stepping import gradients_beside
from penstock.script.accelerate import accelerate
from penstock.script.account import Account

_ENGINES = {"deepspeed": "DeepSpeed", "colossalai": "Colossal-AI", "megatron": "Megatron"}


class Switches(Protocol):
    """Changes to a script besides its precision."""

    @property
    def asks(self) -> bool:
        """Whether the user asked for changes, and must be told if none was made."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Change an optimizer that the script has just made. Raises ConfigError if that is impossible."""

    def apply(self, model: nn.Module, *, compiled: bool) -> list[str]:
        """Change a model before it is first called with gradients, and return the changes, its optimizers' included;
        `compiled` says that the script itself compiles. Raises ConfigError if that is impossible.
        """

    def remove(self) -> None:
        """Undo the changes that apply to the whole process."""


class Pairing:
    """The optimizers of a script: those that wait for a model, and those that have one."""

    def __init__(self, arguments: dict[str, Any], account: Account, switches: Switches | None) -> None:
        """`arguments` are those of `accelerate` that set the precision."""
        self._arguments, self._account, self._switches = arguments, account, switches
        self._switched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._waiting: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._accelerated: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
        self._own_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Modules that no waiting optimizer trains."""
        self._lazy: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """Models whose parameters get their shapes in the first call."""
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.made_count = 0
        self.compiles = False
        """Whether the script has called torch.compile."""

    @property
    def waits(self) -> bool:
        """Whether calls of modules have to be watched."""
        return bool(self._waiting)

    def waits_for(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has no model yet."""
        return optimizer in self._waiting

    @property
    def accelerated(self) -> list[Optimizer]:
        """Living optimizers whose backward passes must be handled."""
        return list(self._accelerated)

    # -- what the script does

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """The script constructed an optimizer."""
        self.made_count += 1
        self._waiting[optimizer] = None
        self._seen.clear()

    def extended(self, optimizer: Optimizer, param_group: Any) -> None:
        """The script adds a group of parameters. Raises ConfigError if it can no longer have master weights."""
        own = optimizer.__dict__.get("_penstock")
        if own is not None and own.session.masters is not None:
            raise ConfigError(
                f"The script adds parameters to its {type(optimizer).__name__} after training began, and "
                f"{own.session.numerics.level} has given the model half weights by then; use --precision O1."
            )

    def grown(self, optimizer: Optimizer) -> None:
        """The script has added parameters to an optimizer: their model may be called for the first time now."""
        owned = set().union(*map(self._owned, self._own_models))
        if optimizer in self._accelerated and not _ids(optimizer) <= owned:
            self._waiting[optimizer] = None
            self._seen.clear()

    def scaler_made(self, scaler: Any) -> None:
        """The script constructed a GradScaler. Raises ConfigError if Penstock already scales the loss."""
        if not scaler.is_enabled():
            return
        self._scalers.add(scaler)
        if any(gradients_beside(optimizer).session.scalers for optimizer in self.accelerated):
            raise ConfigError(
                "The script makes a GradScaler after its model was accelerated, and the loss would be scaled twice; "
                "use --dtype bf16, which needs no loss scale, or GradScaler(enabled=False)."
            )

    def owns(self, module: nn.Module, optimizer: Optimizer) -> bool:
        """Whether a module contains everything that an optimizer trains."""
        return _ids(optimizer) <= self._owned(module)

    def called(self, module: nn.Module) -> None:
        """A module is about to be called; the outermost module is reported first."""
        if not torch.is_grad_enabled():
            return
        root = unwrapped(module)
        if any(map(is_lazy, root.parameters())):
            self._lazy.add(root)
            return
        for own in [o for o in self._waiting if "_penstock" in o.__dict__ and o not in self._accelerated]:
            for model in gradients_beside(own).session.models:
                self._leave(type(model).__name__, [own], "the script accelerates it itself")
                self._seen.update(model.modules())
        if root in self._seen or redirected(root):
            return
        models, takers = self._trained_together(root)
        if takers:
            self._take(module, models, takers)
        else:
            if next(root.parameters(), None) is not None:
                self._account.left(type(root).__name__, "no optimizer trains it")
            self._seen.update(root.modules())

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has taken a step."""
        if optimizer not in self._waiting:
            return
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            return
        if optimizer in self._accelerated:
            self._done([optimizer])
            return
        name = type(optimizer).__name__
        owners = roots_owning(_ids(optimizer))
        if not owners:
            self._leave(name, [optimizer], "it trains no module's weights")
        elif self.compiles or not self._lazy.isdisjoint(owners):
            # Compiled code called the model itself; the change of its class makes it compile again.
            self._take(owners[0], owners, [optimizer])
        else:
            models = ", ".join(type(owner).__name__ for owner in owners)
            self._leave(
                name,
                [optimizer],
                f"{models} was trained without being called, as model(…), after {name} was made",
            )

    # -- consequences

    def _trained_together(self, root: nn.Module) -> tuple[list[nn.Module], list[Optimizer]]:
        """A called module with the models that waiting optimizers train together with it, and these optimizers."""
        models = [root]
        while True:
            owned = set().union(*map(self._owned, models))
            takers = [o for o in self._waiting if not owned.isdisjoint(_ids(o))]
            others = roots_owning(set().union(*map(_ids, takers)) - owned, beside=models)
            if not others:
                return models, takers
            models += others

    def _done(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            self._waiting.pop(optimizer, None)

    def _leave(self, what: str, takers: list[Optimizer], why: str) -> None:
        self._account.left(what, why)
        self._done(takers)

    def _take(self, module: nn.Module, models: list[nn.Module], takers: list[Optimizer]) -> None:
        """Apply what was asked for to models and their optimizers; `module` is the first model as it was called."""
        root = models[0]
        if self._arguments["precision"] == "O0":
            self._done(takers)
        elif (why := self._mixed_already(root)) is not None:
            self._leave(type(root).__name__, takers, why)
        else:
            self._accelerate(module, models, takers)
        for model in models:
            self._seen.update(model.modules())
            self._switch(model, takers)

    def _switch(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        if self._switches is None or model in self._switched:
            return
        self._switched.add(model)
        self._account.switched(model, optimizers, self._switches.apply(model, compiled=self.compiles))

    def _accelerate(self, module: nn.Module, models: list[nn.Module], takers: list[Optimizer]) -> None:
        root = models[0]
        options = dict(self._arguments)
        numerics = properties_of(options.pop("precision"), device=next(root.parameters()).device, **options)
        self._refuse(module, root, numerics)
        if numerics.weights != "fp32":
            self._require_one(models, takers, numerics.level)
        new = [optimizer for optimizer in takers if optimizer not in self._accelerated]
        taken = []
        for model in models if new else [m for m in models if m not in self._own_models]:
            if (why := self._mixed_already(model)) is None:
                taken.append(model)
            else:
                self._account.left(type(model).__name__, why)
        self._done(takers)
        if not taken:
            return
        accelerate(taken, new, **self._arguments)
        for optimizer in takers:
            if optimizer not in new:
                gradients_beside(optimizer).session.models += taken
        self._accelerated.update(dict.fromkeys(takers))
        self._own_models.update(taken)
        self._account.accelerated(taken, takers, numerics)
        masters = gradients_beside(takers[0]).session.masters
        if masters is not None:
            masters.share_gradients()

    def _owned(self, root: nn.Module) -> set[int]:
        """The ids under which optimizers may know a module's parameters: their own, and those of their masters."""
        return {id(weight) for p in root.parameters() for weight in (p, master_of(p)) if weight is not None}

    # -- cases that are impossible or unnecessary

    def _mixed_already(self, root: nn.Module) -> str | None:
        """Why a model's precision is left to the script."""
        device = next(root.parameters()).device
        if torch.is_autocast_enabled(device.type):
            return "it runs under the script's own torch.autocast"
        if len(self._scalers):
            return "the script scales its loss with a GradScaler of its own"
        if root in self._own_models:
            return None
        if precision_on(root) is not None:
            return "the script accelerates it itself"
        accelerated = {id(p) for model in self._own_models for p in model.parameters()}
        if any(id(p) in accelerated for p in root.parameters()):
            return None
        if any(map(is_half, root.parameters())):
            return "the script gave it half weights"
        kinds = {p.dtype for p in root.parameters() if p.is_floating_point()}
        if torch.float32 not in kinds:
            return (
                f"its weights are {', '.join(sorted(str(kind) for kind in kinds)) or 'no floating numbers'}"
            )
        return None

    def _require_one(self, models: list[nn.Module], takers: list[Optimizer], level: str) -> None:
        """Raise ConfigError unless only one model, which gets half weights, with only one optimizer is trained."""
        if {*self._waiting, *self._accelerated} - {*takers}:
            gc.collect()  # a scheduler and its optimizer, of an earlier model, refer to each other
        others = {*self._waiting, *self._accelerated} - {*takers}
        why = ""
        if others or len(takers) > 1:
            every = sorted(type(optimizer).__name__ for optimizer in (*takers, *others))
            why = f"several optimizers ({', '.join(every)})"
        elif len(models) > 1:
            names = ", ".join(type(model).__name__ for model in models)
            why = f"several models ({names}) of one {type(takers[0]).__name__}"
        elif models[0] in self._own_models:
            why = f"a second optimizer of {type(models[0]).__name__}, {type(takers[0]).__name__}"
        if why:
            raise ConfigError(
                f"{level} gives a script's model half weights, which works from outside for one model with one "
                f"optimizer, but the script has {why}. Use --precision O1, or write in the script: "
                f'model, optimizer = penstock.accelerate(model, optimizer, precision="{level}"), which takes lists of '
                "both, and with penstock.scale_loss(loss, optimizer) as scaled: scaled.backward()."
            )

    def _refuse(self, module: nn.Module, root: nn.Module, numerics: Numerics) -> None:
        name = type(root).__name__
        engine = _ENGINES.get(type(module).__module__.partition(".")[0])
        if engine is not None:
            raise ConfigError(
                f"{name} is run by {engine}, which has mixed precision of its own; turn it on in {engine}'s "
                "configuration and run the script with plain python."
            )
        if replaced_forward(root) is not None:
            raise ConfigError(
                f"The forward of {name} was replaced on the instance, as Hugging Face Accelerate does for "
                "Trainer(bf16=True or fp16=True) and Accelerator(mixed_precision=…), which is mixed precision already; "
                "TRL's trainers have bf16 by default. Add `--bf16 False` to the script's arguments where it parses "
                "them as these libraries do, write bf16=False into its configuration, or run it with plain python."
            )
        if numerics.weights == "fp32":
            return
        parts = set(root.modules())
        for wrapper in living(nn.Module):
            holds = isinstance(wrapper, nn.parallel.DistributedDataParallel) or _sharded(wrapper)
            if holds and not parts.isdisjoint(wrapper.modules()):
                raise ConfigError(
                    f"{numerics.level} replaces the weights of {name}, and {type(wrapper).__name__} holds on to those "
                    "that the script gave it; use --precision O1, or call penstock.accelerate before wrapping."
                )


def roots_owning(wanted: set[int], *, beside: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The largest living modules that own a parameter whose `id` is in `wanted`. With `beside`, only modules that have
    a forward pass and do not contain one of these."""
    if not wanted:
        return []
    owning = [
        (module, {id(m) for m in module.modules()})
        for module in living(nn.Module)
        if unwrapped(module) is module and any(id(p) in wanted for p in module.parameters())
    ]
    if beside:
        owning = [
            (module, within)
            for module, within in owning
            if within.isdisjoint(map(id, beside)) and type(module).forward is not nn.Module.forward
        ]
    return [
        module
        for module, _ in owning
        if not any(id(module) in within and outer is not module for outer, within in owning)
    ]


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for parameter in parameters_of(optimizer)}


def _sharded(module: nn.Module) -> bool:
    return type(module).__name__.startswith("F") and any(
        cls.__name__ in ("FullyShardedDataParallel", "FSDPModule") for cls in type(module).__mro__
    )
