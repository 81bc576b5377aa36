"""fp32 master weights for half weights (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1).

The optimizer keeps its original fp32 parameters, and with them its groups, state, schedulers and flat buffers: they are
the master weights. The model gets new half parameters in their place. So any optimizer works unchanged.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.models.anatomy import is_norm
from penstock.optim.contiguous import Contiguous
from penstock.optim.one_pass import OnePassAdamW, SideTensors
from penstock.optim.tensors import parameters_of
from penstock.precision.copies import (
    Fp32State,
    HalfWeight,
    adopt,
    attach_master,
    is_half,
    keep_handles,
    mark,
    own_buffers,
    own_parameters,
    publish,
)
from penstock.precision.forward import living
from penstock.precision.lists import OpLists, fp32_modules_of

_log = logging.getLogger(__name__)


class MasterWeights:
    """Casts a model's weights to half, and leaves fp32 masters of the trained ones in the optimizer.

    Per step: `collect` adds the half gradients to the fp32 ones, the optimizer steps, `publish` rounds its weights into
    the model. The model's state dict holds the fp32 values under its plain names, and loading fills them, so that no
    bit is lost on the way to disk and back. Norms stay fp32 unless `norms` is "half", and compute in fp32; the same
    holds for modules that `lists` name for fp32.

    Half weights written between steps (clipped, tied, re-initialised), in place or by `.data`, update the masters.
    """

    def __init__(
        self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], dtype: torch.dtype, *,
        norms: str = "fp32", lists: OpLists | None = None, autocast: bool = True,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self._autocast = autocast
        trained = {id(p): optimizer for optimizer in optimizers for p in parameters_of(optimizer)}
        self._masters: dict[Parameter, Parameter] = {}
        """Masters by half weight."""
        self._trained: dict[Optimizer, dict[Parameter, Parameter]] = {}
        """Masters by half weight, for each optimizer's trained weights."""
        swapped: dict[int, Parameter] = {}
        frozen: list[str] = []
        for name, module in _to_halve(models, norms, lists):
            self._halve(name, module, trained, swapped, frozen)
        if frozen:
            _log.warning(
                "%d weights that no optimizer trains, %s among them, are rounded to half precision, in state dicts "
                "too; keep the fp32 ones if they are wanted.",
                len(frozen), frozen[0],
            )  # fmt: skip
        self._parallel: list[weakref.ref[nn.parallel.DistributedDataParallel]] | None = None
        self._spent: set[Optimizer] = set()
        """Optimizers that have stepped on the gradients that their masters still hold."""
        self._views: dict[Optimizer, tuple[int, dict[Parameter, Tensor]]] = {}
        self._shared: dict[Parameter, weakref.ref[Tensor] | None] | None = None
        """The gradient that a half weight and its master shared at the last check."""

    def _halve(
        self, name: str, module: nn.Module, trained: Mapping[int, Optimizer], swapped: dict[int, Parameter],
        frozen: list[str],
    ) -> None:  # fmt: skip
        has_weights = False
        for key, parameter in own_parameters(module):
            if not parameter.is_floating_point():
                continue
            has_weights = True
            half = swapped.get(id(parameter))
            if half is None:
                half = HalfWeight(parameter.detach().to(self.dtype), requires_grad=parameter.requires_grad)
                half.__dict__.update(parameter.__dict__)  # marks that libraries leave on parameters
                half._backward_hooks = parameter._backward_hooks
                half._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
                swapped[id(parameter)] = half
                if id(parameter) in trained:
                    self._add(trained[id(parameter)], half, parameter)
                else:
                    frozen.append(f"{name}.{key}" if name else key)
            setattr(module, key, half)  # not by _parameters: recurrent layers keep a second list
        if has_weights:
            Fp32State(self.dtype).attach(module)

    def _add(self, optimizer: Optimizer, half: Parameter, master: Parameter) -> None:
        self._masters[half] = master
        self._trained.setdefault(optimizer, {})[half] = master
        attach_master(half, master, autocast=self._autocast)
        if isinstance(optimizer, OnePassAdamW) and half.dtype == torch.bfloat16:
            optimizer.copies = optimizer.copies or SideTensors({}, set())
            optimizer.copies.tensors[master] = half

    # -- around a step

    def _of(self, optimizer: Optimizer | None) -> dict[Optimizer, dict[Parameter, Parameter]]:
        """Masters by half weight, of one optimizer or of all."""
        return self._trained if optimizer is None else {optimizer: self._trained.get(optimizer, {})}

    @torch.no_grad()
    def collect(self, optimizer: Optimizer | None = None) -> None:
        """Add the half gradients to the masters' gradients, and copy weights written in place to the masters."""
        for owner, masters in self._of(optimizer).items():
            if owner in self._spent:
                self._spent.discard(owner)
                if self._shared is None:
                    for master in masters.values():
                        master.grad = None
            for half, master in masters.items():
                adopt(half, master)
            if self._shared is not None:
                for half, master in masters.items():
                    self._share(half, master, self._shared)
                continue
            views = self._flat_gradients(owner)
            into: list[Tensor] = []
            fresh: list[Tensor] = []
            more: list[Tensor] = []
            added: list[Tensor] = []
            for half, master in masters.items():
                gradient = half.grad
                if gradient is None:
                    continue
                half.grad = None
                if gradient.is_sparse:
                    wide = gradient.to(torch.float32)
                    master.grad = wide if master.grad is None else master.grad + wide
                elif master.grad is not None:
                    more.append(master.grad)
                    added.append(gradient)
                else:
                    master.grad = views.get(master)
                    if master.grad is None:
                        master.grad = torch.empty_like(master)
                    into.append(master.grad)
                    fresh.append(gradient)
            if into:
                torch._foreach_copy_(into, fresh)
            if more:
                torch._foreach_add_(more, [g.to(m.dtype) for m, g in zip(more, added)])

    @torch.no_grad()
    def publish(self, optimizer: Optimizer | None = None) -> None:
        """Round the masters into the model, except those that the optimizer has just rounded itself."""
        for owner, masters in self._of(optimizer).items():
            copies = owner.copies if isinstance(owner, OnePassAdamW) else None
            rest = {h: m for h, m in masters.items() if copies is None or m not in copies.written}
            if rest:
                publish(list(rest), list(rest.values()))
            for half in masters.keys() - rest.keys():
                mark(half)
            if copies is not None:
                copies.written.clear()

    def used_up(self, optimizer: Optimizer) -> None:
        """Note that the optimizer has stepped. Its gradients can be read until new ones replace them; new ones are not
        added, because it cannot be observed here whether the script has zeroed the model's gradients.
        """
        self._spent.add(optimizer)

    def unsynced(self) -> bool:
        """Whether a DistributedDataParallel around one of the models defers averaging the next backward pass's
        gradients to a later one (`no_sync`).
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return False
        if self._parallel is None:
            self._parallel = [weakref.ref(model) for model in _parallel_around(self._masters)]
        return any(
            model is not None and not model.require_backward_grad_sync
            for model in (reference() for reference in self._parallel)
        )

    def joining(self, group: dict[str, Any]) -> tuple[dict[str, Any], dict[Parameter, Parameter]]:
        """A parameter group for an optimizer, with masters in place of half weights; and the newly made masters by half
        weight, for `join` after the group was added.
        """
        given = group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        new: dict[Parameter, Parameter] = {}
        for index, half in enumerate(parameters):
            if isinstance(half, Parameter) and half.dtype == self.dtype:
                if half not in self._masters:
                    new[half] = Parameter(half.detach().float())
                parameters[index] = self._masters[half] if half in self._masters else new[half]
        return {**group, "params": parameters}, new

    def join(self, optimizer: Optimizer, new: Mapping[Parameter, Parameter]) -> None:
        """Let `optimizer` train half weights by the new masters."""
        for half, master in new.items():
            self._add(optimizer, half, master)

    def zero_grad(self, optimizer: Optimizer | None = None, *, set_to_none: bool = True) -> None:
        """Clear the model's half gradients; the optimizer clears the masters'."""
        of = self._of(optimizer)
        self._spent -= of.keys()
        if self._shared is not None and not set_to_none:
            # The optimizer will fill the masters' gradients with zeros, which are the same tensors.
            self.collect(optimizer)
            return
        for masters in of.values():
            for half in masters:
                half.grad = None

    def share_gradients(self) -> None:
        """Let a half weight and its master share one fp32 gradient tensor, so that micro-batches add up in fp32, and
        code unaware of masters changes the gradients of model and optimizer alike. Not under DistributedDataParallel,
        whose buckets have the type of the weights.
        """
        self._shared = dict.fromkeys(self._masters)
        for half in self._masters:
            half.grad_dtype = torch.float32

    def _share(
        self, half: Parameter, master: Parameter, shared: dict[Parameter, weakref.ref[Tensor] | None]
    ) -> None:
        if half.grad is master.grad:
            pass
        elif _refers(shared[half], half.grad):  # then it is the optimizer's that was replaced or forgotten
            half.grad = master.grad
        elif half.grad is None or master.grad is None or _refers(shared[half], master.grad):
            master.grad = half.grad
        else:  # both are new: the loss has both the model and what the script held of it before
            half.grad = master.grad = master.grad + half.grad
        shared[half] = None if half.grad is None else weakref.ref(half.grad)

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a half weight holds a gradient that has not been collected."""
        return any(half.grad is not None for half in self._trained.get(optimizer, {}))

    def _flat_gradients(self, optimizer: Optimizer) -> dict[Parameter, Tensor]:
        """A contiguous optimizer's views for each gradient, so that collecting writes there directly."""
        if not isinstance(optimizer, Contiguous):
            return {}
        generation, views = self._views.get(optimizer, (-1, {}))
        if generation != optimizer.generation:
            views = {
                p: v for b in optimizer.buckets() for p, v in zip(b.parameters, b.gradient_views, strict=True)
            }
            self._views[optimizer] = (optimizer.generation, views)
        return views

    def weights_of(self, optimizer: Optimizer) -> list[Parameter]:
        """The half weights that an optimizer trains."""
        return list(self._trained.get(optimizer, {}))

    # -- what is saved

    def master_of(self, weight: Tensor) -> Tensor:
        """The fp32 value of a weight of the model: its master, or itself if it has none."""
        return self._masters.get(weight, weight)  # type: ignore[call-overload,no-any-return]

    def named(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters of `model` by name, each replaced by its master if it has one."""
        return {name: self.master_of(parameter) for name, parameter in model.named_parameters()}


def _parallel_around(weights: Mapping[Parameter, Parameter]) -> Iterator[nn.parallel.DistributedDataParallel]:
    """The live DistributedDataParallel modules that average gradients of some of these weights."""
    for parallel in living(nn.parallel.DistributedDataParallel):
        if any(parameter in weights for parameter in parallel.parameters()):
            yield parallel


def _refers(reference: weakref.ref[Tensor] | None, value: Tensor | None) -> bool:
    return value is None if reference is None else value is not None and reference() is value


def _to_halve(
    models: Iterable[nn.Module], norms: str, lists: OpLists | None
) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each module whose weights become half. Norms that stay fp32 compute in fp32 from now on."""
    seen: set[nn.Module] = set()
    for model in models:
        wide = fp32_modules_of(model, lists)
        for name, module in model.named_modules():
            if module in wide or module in seen:  # models may share modules
                continue
            seen.add(module)
            if norms == "fp32" and is_norm(module):
                compute_in_fp32(module)
            else:
                yield name, module


def cast_in_place(
    models: Sequence[nn.Module], dtype: torch.dtype, *, norms: str = "half", lists: OpLists | None = None
) -> None:
    """Cast weights to half without masters. Parameters keep their identity, so references to them stay valid; gradients
    are cast too. The state dict holds the values in fp32.
    """
    # Weights of modules that stay fp32 may be tied to other modules' weights.
    kept = {p for model in models for module in fp32_modules_of(model, lists) for p in module.parameters()}
    if norms == "fp32":
        kept |= {p for model in models for m in model.modules() if is_norm(m) for _, p in own_parameters(m)}
    for _, module in _to_halve(models, norms, lists):
        for _, parameter in own_parameters(module):
            if parameter not in kept and parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
                parameter.grad = None if parameter.grad is None else parameter.grad.to(dtype)
        for key, buffer in own_buffers(module):
            if buffer.is_floating_point():
                setattr(module, key, buffer.to(dtype))
        if own_parameters(module) or own_buffers(module):
            Fp32State(dtype).attach(module)


def compute_in_fp32(norm: nn.Module) -> None:
    """Let a norm with fp32 weights accept half inputs, compute in fp32 and return the input's type."""
    keep_handles(norm, norm.register_forward_pre_hook(_to_fp32), norm.register_forward_hook(_as_input))


def _to_fp32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, Tensor) and is_half(a) else a for a in args)


def _as_input(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    first = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
    if isinstance(output, Tensor) and first is not None and output.is_floating_point():
        return output.to(first.dtype)
    return output
