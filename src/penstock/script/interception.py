"""Replaces the functions of torch through which a running script gets mixed precision."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.export
import torch.fx
import torch.onnx
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from penstock.errors import ConfigError
from penstock.precision.copies import plain
from penstock.precision.settings import properties_of
from penstock.precision.stepping import gradients_beside
from penstock.script.account import Account, Say
from penstock.script.backward import listed, scaled_backward
from penstock.script.pairing import Pairing, Switches

_installed: Interception | None = None
_EXPORTERS: Any = (
    (torch.export, "export"), (torch.export, "draft_export"), (torch.onnx, "export"), (torch.jit, "trace"),
    (torch.jit, "trace_module"), (torch.jit, "script"), (torch.fx, "symbolic_trace"),
)  # fmt: skip


class Interception:
    """Accelerates the models that a script trains automatically, from `install` to `remove`.

    `precision`, `dtype` and `overrides` are those of `penstock.accelerate`. `say` is called on rank 0 with the changes,
    once after the first optimizer step (and again if the script starts on another model); `applied` each time that
    something was applied. Which models and optimizers belong together is found when a model is first called with
    gradients; see `pairing`. `switches` change more than the precision.

    Raises:
        ConfigError: the level or its properties are impossible, or the script does something unsupported, when it does.
    """

    def __init__(
        self, *, precision: str = "O1", dtype: str = "auto", say: Say, applied: Callable[[], None] = lambda: None,
        switches: Switches | None = None, **overrides: Any,
    ) -> None:  # fmt: skip
        level = properties_of(precision, dtype=dtype, device="meta", **overrides)
        if level.weights != "fp32" and level.masters == "none" and level.scales:
            raise ConfigError(
                f"loss_scale={level.loss_scale!r} needs gradients in fp32 between the backward pass and the step, and "
                f"{level.level} has none; use O2."
            )
        self._plain = not level.half and switches is None
        self._asks = level.half or (switches is not None and switches.asks)
        self._account = Account(dtype, say, applied)
        self._switches = switches
        arguments = {"precision": precision, "dtype": dtype, **overrides}
        self._pairing = Pairing(arguments, self._account, switches)
        self._patches = ExitStack()
        self._watching = ExitStack()
        self._watches = False
        self._in_backward = False
        self._step_hook: RemovableHandle | None = None
        self._stepping: set[type] = set()
        """Optimizer classes whose step is patched."""

    def install(self) -> Interception:
        """Begin; O0 changes nothing. Raises ConfigError while another one is installed."""
        global _installed
        if _installed is not None:
            raise ConfigError("The script already runs under `penstock run`; run it once.")
        _installed = self
        if self._plain:
            return self
        patch = functools.partial(_patch, self._patches)
        patch(Optimizer, "__init__", _after(Optimizer.__init__, self._optimizer_made))
        extended = _before(Optimizer.add_param_group, self._pairing.extended)
        patch(Optimizer, "add_param_group", _after(extended, self._grown))
        patch(torch.autograd, "backward", self._backward(torch.autograd.backward))
        patch(torch, "compile", _before(torch.compile, self._compiles))
        patch(nn.Module, "zero_grad", _after(nn.Module.zero_grad, self._zeroed))
        scaler = torch.amp.grad_scaler.GradScaler
        patch(scaler, "__init__", _after(scaler.__init__, self._pairing.scaler_made))
        for owner, name in _EXPORTERS:
            patch(owner, name, _of_plain(vars(owner)[name]))
        return self

    def remove(self, *, finished: bool = True) -> None:
        """Undo `install`, and report the rest; after a script that `finished`, also that nothing was applied."""
        global _installed
        if _installed is not self:
            return
        _installed = None
        self._watching.close()
        self._patches.close()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        if self._switches is not None:
            self._switches.remove()
        if finished and self._asks:
            self._account.conclude(self._pairing.made_count)
        self._account.tell()

    def __enter__(self) -> Interception:
        return self.install()

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.remove(finished=kind is None)

    # -- what the script does

    def _optimizer_made(self, optimizer: Optimizer) -> None:
        if self._switches is not None:
            self._switches.prepare(optimizer)
        self._pairing.note_optimizer(optimizer)
        owner = next(cls for cls in type(optimizer).__mro__ if "step" in vars(cls))
        if owner not in self._stepping:
            self._stepping.add(owner)
            _patch(self._patches, owner, "step", self._closing(vars(owner)["step"]))
        self._update_hooks()

    def _grown(self, optimizer: Optimizer) -> None:
        self._pairing.grown(optimizer)
        self._update_hooks()

    def _closing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The step of an optimizer class. A closure that may make the first forward pass, as Lightning's does, is
        called before the step, so that the step is already an accelerated optimizer's. So is the step of a script that
        has stored `optimizer.step` earlier.
        """

        @functools.wraps(original)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            closure = args[0] if args else kwargs.get("closure")
            if closure is not None and self._pairing.waits_for(optimizer):
                kwargs.pop("closure", None)
                args = (_Called(closure), *args[1:])
            own = optimizer.__dict__.get("_penstock")
            if own is None or own.stepping or not _attended(optimizer):
                return original(optimizer, *args, **kwargs)
            return type(optimizer).step(optimizer, *args, **kwargs)

        return step

    def _compiles(self, *_: Any, **__: Any) -> None:
        self._pairing.compiles = True

    def _called(self, module: nn.Module, *_: Any, **__: Any) -> None:
        if not torch.compiler.is_compiling():
            self._pairing.called(module)
            self._update_hooks()

    def _zeroed(self, module: nn.Module) -> None:
        for optimizer in self._pairing.accelerated:
            own = gradients_beside(optimizer)
            if own.prepared and self._pairing.owns(module, optimizer):
                own.discard()

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(
            tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None,
            create_graph: bool = False, grad_variables: Any = None, inputs: Any = None,
        ) -> None:  # fmt: skip
            options = {"retain_graph": retain_graph, "create_graph": create_graph}
            if grad_variables is not None:
                options["grad_variables"] = grad_variables
            self._account.backward(listed(tensors))
            optimizers = [o for o in self._pairing.accelerated if _attended(o)]
            # A backward pass inside another, as in checkpointing, is part of that other.
            if not optimizers or grad_variables is not None or self._in_backward:
                original(tensors, grad_tensors, inputs=inputs, **options)
                return
            self._in_backward = True
            try:
                scaled_backward(original, optimizers, tensors, grad_tensors, inputs, **options)
            finally:
                self._in_backward = False

        return backward

    # -- only while an optimizer waits

    def _update_hooks(self) -> None:
        """Watch calls of modules and steps only while that is needed."""
        if self._step_hook is None and (self._pairing.waits or self._account.unreported):
            self._step_hook = register_optimizer_step_post_hook(self._stepped)
        if self._pairing.waits and not self._watches:
            _patch(self._watching, nn.Module, "__call__", _before(nn.Module.__call__, self._called))
        elif not self._pairing.waits:
            self._watching.close()
        self._watches = self._pairing.waits

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._account.stepped(optimizer)
        self._pairing.stepped(optimizer)
        self._account.tell()
        self._update_hooks()
        if not (self._pairing.waits or self._account.unreported) and self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None


def _patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a class or module until the stack is closed."""
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _before(original: Callable[..., Any], hook: Callable[..., None]) -> Callable[..., Any]:
    """`original`, but `hook` is first called with its arguments."""

    @functools.wraps(original)
    def both(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    return both


def _after(original: Callable[..., Any], hook: Callable[[Any], None]) -> Callable[..., Any]:
    """A method `original`; afterwards `hook` is called with the object."""

    @functools.wraps(original)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        hook(self)
        return result

    return both


def _of_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that records a model: for an accelerated model it gets the form that plain Python would pass."""
    deeper = "_frames_up" in inspect.signature(original).parameters  # where torch.jit.script looks up names

    def as_plain(value: Any) -> Any:
        modules = value.modules() if isinstance(value, nn.Module) else ()
        marked = any(name.startswith("_penstock") for module in modules for name in module.__dict__)
        return plain(value) if marked else value

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if deeper:
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        return original(*map(as_plain, args), **{name: as_plain(value) for name, value in kwargs.items()})

    return recorded


class _Called:
    """A closure that has already been called: the first call returns that loss."""

    def __init__(self, closure: Callable[[], Any]) -> None:
        self._closure = closure
        with torch.enable_grad():
            self._losses = [closure()]

    def __call__(self) -> Any:
        return self._losses.pop() if self._losses else self._closure()


def _attended(optimizer: Optimizer) -> bool:
    session = gradients_beside(optimizer).session
    return bool(session.scalers) or session.masters is not None
