"""The script's side of `penstock tune`: makes optimizer steps on request, and reports how long they took.

A step is the time between two returns of `Optimizer.step`: reading data, forward and backward passes, logging. Between
turns the script waits inside the hook after that call, while scripts under other settings take their turns. Messages
use a connection on 127.0.0.1 to the process that started the script.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from penstock.config.load import to_dict
from penstock.config.plan import Plan
from penstock.containers import tensors
from penstock.errors import ConfigError, PenstockError, ran_out_of_memory
from penstock.kernels.sdpa import Switch
from penstock.kernels.sdpa import Watch as AttentionWatch
from penstock.ladder.trace import supported_switches, trace
from penstock.launch.local import Closed, JsonLink
from penstock.models.anatomy import anatomy_of, inner_model
from penstock.models.fuse import places_for
from penstock.optim.tensors import parameters_of
from penstock.planner.operators import Workload
from penstock.planner.prediction import predict_workload
from penstock.precision.copies import is_half
from penstock.precision.forward import replaced_forward
from penstock.probe import machine_for
from penstock.products.convert import device_problem
from penstock.tune.process import FORMS, PRODUCTS, SWITCHED, Facts
from penstock.tune.switches import ScriptSwitches, form_problem

_log = logging.getLogger(__name__)


class ScriptWatch:
    """Switches for a script whose steps are counted and timed. `address` is `PORT:KEY:SEED`: the port of the process
    that times it, the key by which that process recognises this one, and the number added to all seeds of the script.
    """

    def __init__(self, switches: ScriptSwitches, address: str) -> None:
        self._switches = switches
        port, key, seed = address.split(":")
        self._link = JsonLink(socket.create_connection(("127.0.0.1", int(port))))
        self._device = torch.device("cpu")
        self._optimizer: Optimizer | None = None
        self._model: nn.Module | None = None
        self._call: tuple[Any, Any] | None = None
        """Arguments of the first forward pass of the model, without wrappers around it."""
        self._work: Workload | None = None
        self._facts: dict[str, Any] = {"compiled": False, "mixed": "", "padding": 0.0, "attention": False}
        self._count, self._start = 0, time.perf_counter()
        self._left = self._timed = 1
        self._released = False
        """Whether the allocator's unused memory was freed since the last step."""
        self._loss: Tensor | None = None
        self._losses: list[Tensor | None] = []
        self._scalers: list[Any] = []
        self._passes = 0
        """Number of backward passes so far."""
        self._send(event="hello", key=key, rank=int(os.environ.get("RANK", "0")))
        _shift_seeds(int(seed))
        self._patch_backward()
        register_optimizer_step_post_hook(self._stepped)

    asks = False
    """False, because nobody reads this process's output."""

    # -- what the script does

    def prepare(self, optimizer: Optimizer) -> None:
        """Change an optimizer that the script has just made."""
        self._facts["form"] = next((form for form in FORMS if optimizer.defaults.get(form)), "")
        self._switches.prepare(optimizer)

    def apply(self, model: nn.Module, *, compiled: bool) -> list[str]:
        """Change a model before its first forward pass, and record facts during that pass."""
        self._device = next(model.parameters()).device
        self._model = self._model or model
        self._facts["compiled"] = compiled
        self._facts["mixed"] = self._facts["mixed"] or self._mixed(model)
        changes = self._switches.apply(model, compiled=compiled)
        if self._switches.named <= {"recompute"}:
            self._look_once(inner_model(model))
        return changes

    def remove(self) -> None:
        """Undo the settings that apply to the whole process."""
        self._switches.remove()

    def end(self, error: BaseException | None) -> None:
        """Report that the script has ended, normally or with an error."""
        status, why = "ended", ""
        if isinstance(error, PenstockError):
            status, why = "unsupported", str(error)
        elif error is not None:
            status = "out of memory" if ran_out_of_memory(error) else "failed"
            lines = str(error).strip().splitlines()
            why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        self._send(event="end", status=status, why=why, steps=self._count, losses=self._take_losses())

    # -- turns

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        elif optimizer is not self._optimizer:
            names = f"{type(self._optimizer).__name__} and {type(optimizer).__name__}"
            why = f"it steps with several optimizers ({names}), so it is unclear where a step ends"
            self.end(ConfigError(why))
            self._leave()
        self._count += 1
        self._losses.append(self._loss)
        self._loss = None
        self._left -= 1
        if self._left == 0:
            self._wait()
            self._report(event="turn", seconds=time.perf_counter() - self._start, steps=self._count)
            self._released = self._device.type == "cuda"
            if self._released:  # for the other processes
                torch.cuda.empty_cache()
            self._obey()
        elif self._left == self._timed:
            self._wait()
            self._start = time.perf_counter()

    def _obey(self) -> None:
        """Carry out the other side's commands until it requests the next steps."""
        while True:
            try:
                command = self._link.receive()
            except Closed:
                self._leave()
            assert command is not None
            if command["do"] == "step":
                # One step refills the allocator first, untimed.
                self._timed = int(command["steps"])
                self._left = self._timed + self._released
                self._wait()
                self._start = time.perf_counter()
                return
            if command["do"] == "predict":
                self._report(event="predicted", speeds=self._predicted(command["first"], command["plans"]))
            elif command["do"] == "facts":
                facts, machine = asdict(self._all_facts()), to_dict(machine_for(self._device))
                self._report(event="facts", facts=facts, machine=machine)
            else:
                self._leave()

    def _leave(self) -> NoReturn:
        """End the process at once, without what the script does at its end, such as saving."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _report(self, **message: Any) -> None:
        self._send(**message, losses=self._take_losses(), memory=self._memory())

    def _send(self, **message: Any) -> None:
        try:
            self._link.send(**message)
        except Closed:  # the process that times this one is gone
            os._exit(1)

    def _memory(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def _take_losses(self) -> list[float | None]:
        losses, self._losses = self._losses, []
        return [None if loss is None else float(loss) for loss in losses]

    # -- losses

    def _patch_backward(self) -> None:
        """Record each step's loss, the sum of the scalars that its backward passes start from. Never undone."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            root = tensors[0] if isinstance(tensors, list | tuple) and len(tensors) == 1 else tensors
            if isinstance(root, Tensor) and root.numel() == 1:
                loss = root.detach().float().reshape(())
                scales = [s._scale for s in self._scalers if s.is_enabled() and s._scale is not None]
                loss = loss / scales[0] if len(scales) == 1 else loss
                self._passes += 1
                self._loss = loss.clone() if self._loss is None else self._loss + loss.to(self._loss.device)
            return original(tensors, *args, **kwargs)

        torch.autograd.backward = backward
        scaler_class: Any = torch.amp.grad_scaler.GradScaler
        construct = scaler_class.__init__

        def noted(scaler: Any, *args: Any, **kwargs: Any) -> None:
            construct(scaler, *args, **kwargs)
            self._scalers.append(scaler)
            if scaler.is_enabled():
                self._facts["mixed"] = "it scales its loss with a GradScaler of its own"

        scaler_class.__init__ = noted

    # -- facts

    def _mixed(self, model: nn.Module) -> str:
        """Why precision is left to the script; empty if it is not."""
        if torch.is_autocast_enabled(self._device.type):
            return "it runs under torch.autocast by itself"
        if replaced_forward(model) is not None:
            return "its forward pass was replaced, as Accelerate does for mixed precision"
        if any(map(is_half, model.parameters())):
            return "it has half weights"
        return ""

    def _look_once(self, model: nn.Module) -> None:
        """Record in the first forward pass whether torch's attention is called, and the share of padding."""
        switch = Switch("sdpa")
        mode: Any = AttentionWatch(switch)
        handles: list[RemovableHandle] = []

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._call = args, kwargs
            mask = kwargs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self._facts["padding"] = 1.0 - float((mask != 0).float().mean())
            mode.__enter__()

        def after(*_: Any) -> None:
            mode.__exit__(None, None, None)
            self._facts["attention"] = switch.used
            for handle in handles:
                handle.remove()

        handles.append(model.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(model.register_forward_hook(after, always_call=True))

    def _all_facts(self) -> Facts:
        """All facts of the script. This switches its model back and forth, so no step may follow."""
        model, optimizer = self._model, self._optimizer
        assert optimizer is not None
        facts = dict(self._facts)
        attention = facts.pop("attention")
        if model is None:
            return Facts(device=self._device.type, optimizer=type(optimizer).__name__, **facts)
        inner = inner_model(model)
        eager = getattr(getattr(inner, "config", None), "_attn_implementation", "") == "eager"
        try:
            blocks, no_blocks = len(anatomy_of(inner).blocks), ""
        except ConfigError as error:
            blocks, no_blocks = 0, str(error)
        if self._call is not None:
            self._work = _traced(inner, self._call, max(1, blocks))
        switches = supported_switches(inner, SWITCHED, attention=attention or eager)
        forms = {form: form_problem(optimizer, form) or "" for form in FORMS}
        products = {name: device_problem(self._device, name) or "" for name in PRODUCTS}
        return Facts(
            device=self._device.type, model=type(model).__name__,
            parameters=sum(p.numel() for p in parameters_of(optimizer)), optimizer=type(optimizer).__name__,
            eager=eager, blocks=blocks, no_blocks=no_blocks, switches=switches,
            fused=places_for(inner, self._device.type), forms=forms, products=products, **facts,
        )  # fmt: skip

    def _predicted(self, first: str, plans: list[str]) -> dict[str, float]:
        """Predicted speeds of Plans relative to `first`, the unchanged script; empty if no model was recorded."""
        if self._work is None:
            return {}
        machine = machine_for(self._device)
        passes = max(1, round(self._passes / self._count))

        def rate(line: str) -> float:
            assert self._work is not None
            plan = replace(Plan.parse(line), accumulate=passes)
            return predict_workload(self._work, machine, plan).samples_per_second

        return {line: rate(line) / rate(first) for line in plans}


def _traced(model: nn.Module, call: tuple[Any, Any], blocks: int) -> Workload | None:
    """The operators of one forward and backward pass; None if the model cannot be recorded."""

    def loss(model: nn.Module, call: tuple[Any, Any]) -> Tensor:
        out = model(*call[0], **call[1])
        floats = [t for t in tensors(out) if t.is_floating_point() and t.requires_grad]
        output_loss = getattr(out, "loss", None)
        scalars = [output_loss] if isinstance(output_loss, Tensor) else [t for t in floats if t.numel() == 1]
        return scalars[-1] if scalars else floats[0].float().mean()

    try:
        return trace(model, call, loss, 1, units=blocks)
    except Exception as error:  # noqa: BLE001 - anybody's model, which runs outside its script here
        _log.info("%s was not recorded: %s", type(model).__name__, error)
        return None


def _shift_seeds(by: int) -> None:
    """Seed all generators, in case the script does not, and add a number to each seed that it sets later."""

    def shifted(seed_it: Callable[..., Any], most: int) -> Callable[..., Any]:
        def moved(value: Any) -> Any:
            return (int(value) + by) % most if isinstance(value, Integral) else value

        def seed(*args: Any, **kwargs: Any) -> Any:
            named = {name: value if name == "version" else moved(value) for name, value in kwargs.items()}
            return seed_it(*map(moved, args[:1]), *args[1:], **named)

        return seed

    import numpy as np

    random.seed(by)
    np.random.seed(by)
    torch.manual_seed(by)
    if by:
        random.seed = shifted(random.seed, 1 << 62)
        np.random.seed = shifted(np.random.seed, 1 << 32)
        torch.manual_seed = torch.random.manual_seed = shifted(torch.manual_seed, 1 << 62)
