"""AdamW that keeps exact fp32 weights in a bf16 weight and sixteen bits more: master weights without a copy.

Bytes per parameter between steps: bf16 weight 2, remainder 2, two fp32 moments 8, together 12. Half weights with an
fp32 copy take 14, and during a step the copy's fp32 gradients as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.errors import CheckpointError, ConfigError
from penstock.kernels.remainder_adamw import Form, form_on, join, split
from penstock.optim import tensors
from penstock.optim.groups import parameters_of
from penstock.optim.one_pass import MOMENTS, OnePass, check_group

__all__ = ["RemainderAdamW", "from_adamw", "join", "split"]

_STATE = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "remainder": torch.int16}
"""Types of the state of each Parameter, except for its count of steps."""


class RemainderAdamW(OnePass):
    """AdamW (Loshchilov and Hutter, ICLR 2019) whose bf16 Parameters stand for exact fp32 weights.

    A bf16 Parameter holds the fp32 weight rounded to nearest; `state[p]["remainder"]` (int16, the Parameter's shape)
    holds what rounding left out, zero for a Parameter that had only been bf16. Steps are taken on the fp32 weights:
    `fused` bit for bit as torch's fused AdamW takes them, `triton` (CUDA) and `native` (CPU) in one pass of their own,
    `auto` by the best of these where the weights are (see `penstock.kernels.remainder_adamw`). fp32 Parameters among
    them, such as norms, are updated as they are. DTensors are updated shard by shard.

    Gradients may be bf16, fp16 or fp32 (`p.grad_dtype`). Those of bf16 Parameters are only read: unlike torch's fused
    kernels this one does not write back what it divided by the loss scale or by clipping. It takes `grad_scale` and
    `found_inf` from GradScaler or `clipped_step`, and skips an overflowed step on the device.

    A Parameter written from outside (`p.copy_(…)`) keeps its old remainder; write through `set_fp32_weight` instead.
    `state_dict()` has the remainders, the model's has the weights: both together are exact. Raises ConfigError for
    amsgrad and differentiable, a learning rate that is a tensor, and Parameters of other types or with gaps in memory.
    """

    NOT_CONTIGUOUS = (
        "flat buffers keep state in the weights' type, which would round its fp32 moments; use it without contiguous, "
        "it gathers small tensors by itself."
    )

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        amsgrad: bool = False,
        form: Form = "auto",
    ) -> None:
        self.form = form
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"maximize": maximize, "amsgrad": amsgrad})
        self._step_supports_amp_scaling = True

    # -- what the user of an optimizer calls

    @torch.no_grad()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Raises ConfigError for what cannot be updated here."""
        super().add_param_group(param_group)
        try:
            check_group(param_group)
            for parameter in param_group["params"]:
                _check_parameter(parameter)
                form_on(self.form, parameter.device)
        except ConfigError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class or of `torch.optim.AdamW` over fp32 weights, bit by bit.

        The latter has no remainders: those here stay, so that it does not matter whether `set_fp32_weight` brings the
        weights before or after. Raises CheckpointError for states of other optimizers, ConfigError for amsgrad.
        """
        for group in state_dict["param_groups"]:
            check_group(group)
            if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
                raise CheckpointError(
                    "The stored optimizer is Adam with weight decay in its gradients, which AdamW has not; load it "
                    "into torch.optim.Adam, or set its weight_decay to 0 first."
                )

        restored: dict[Any, dict[str, Any]] = {}

        def take(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            keys = [key for group in given["param_groups"] for key in group["params"]]
            named = dict(zip(keys, parameters_of(self)))
            for key, value in given["state"].items():
                restored[named.get(key, key)] = (
                    self._restored(named[key], value) if key in named else copy.deepcopy(value)
                )
            return {**given, "state": {}}

        # torch would cast every number to the Parameter's bf16. This sees what users' hooks made before, and goes
        # before those that look at what is loaded. What is refused has changed nothing.
        with (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(lambda _: self.state.update(restored), prepend=True),
        ):
            super().load_state_dict(state_dict)

    def adamw_state_dict(self) -> dict[str, Any]:
        """The state that `torch.optim.AdamW` over the same weights in fp32 loads to go on from here; without
        remainders.
        """
        packed = self.state_dict()
        states = {
            key: {name: value for name, value in state.items() if name != "remainder"}
            for key, state in packed["state"].items()
        }
        return {**packed, "state": states}

    # -- the exact weights

    def completes(self, parameter: Tensor) -> bool:
        """Whether this optimizer knows more bits of a weight than the Parameter has: a bf16 one of its groups."""
        return parameter.dtype == torch.bfloat16 and self._holds(parameter)

    @torch.no_grad()
    def fp32_weights(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Every Parameter with its exact fp32 weight, a new tensor of its shape made when its turn comes."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield parameter, self.fp32_weight(parameter)

    @torch.no_grad()
    def fp32_weight(self, parameter: Tensor) -> Tensor:
        """A copy of the exact fp32 weight of one Parameter. Raises ConfigError for one of another optimizer."""
        local, remainder = self._halves(parameter)
        whole = local.to(torch.float32, copy=True) if remainder is None else join(local, remainder)
        return tensors.whole(parameter, whole)

    @torch.no_grad()
    def fp32_chunks(self, parameter: Tensor, size: int = 1 << 20) -> Iterator[Tensor]:
        """The exact fp32 weight in the order of memory, in flat pieces of at most `size`: no copy of the whole is
        made. To be read only; an fp32 Parameter's are its own memory. Of a DTensor, this device's shard.
        """
        local, remainder = self._halves(parameter)
        weights = torch.split(tensors.flat(local), size)
        if remainder is None:
            return (weight.float() for weight in weights)
        return map(join, weights, torch.split(tensors.flat(remainder), size))

    @torch.no_grad()
    def set_fp32_weight(self, parameter: Parameter, value: Tensor) -> None:
        """Give a Parameter the exact weight `value` (its shape; fp32, or bf16 and fp16, which are exact in it).

        Raises ConfigError for a Parameter that is not of this optimizer, another shape or a wider type.
        """
        self._halves(parameter)
        exact = (torch.float32, torch.bfloat16, torch.float16)
        if value.shape != parameter.shape or value.dtype not in exact:
            raise ConfigError(
                f"A weight of shape {tuple(parameter.shape)} was given {value.dtype} values of shape "
                f"{tuple(value.shape)}; pass fp32 values of the same shape."
            )
        local = tensors.local(parameter)
        given = tensors.local(tensors.alike(parameter, value)).to(device=local.device, dtype=torch.float32)
        if parameter.dtype == torch.float32:
            local.copy_(given)
            return
        weight, remainder = split(given)
        local.copy_(weight)
        tensors.local(self._state_of(parameter)["remainder"]).copy_(remainder)

    # -- inside

    def _holds(self, parameter: Tensor) -> bool:
        # Found by identity, and at once where it has a state.
        return parameter in self.state or any(parameter is own for own in parameters_of(self))

    def _halves(self, parameter: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and remainder as they lie here; no remainder where nothing was left out yet."""
        if not self._holds(parameter):
            raise ConfigError(
                f"A Parameter of shape {tuple(parameter.shape)} is not in this optimizer's groups; give it one of the "
                "Parameters that it was built with."
            )
        remainder = self.state[parameter].get("remainder") if parameter in self.state else None
        return tensors.local(parameter), None if remainder is None else tensors.local(remainder)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "form": self.form}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)

    def _restored(self, parameter: Parameter, given: dict[str, Any]) -> dict[str, Any]:
        """Own copies of a stored state, in the types and at the places that a step expects."""
        where = f"The stored optimizer state of a weight of shape {tuple(parameter.shape)} has"
        if not {"step", *MOMENTS} <= given.keys() <= {"step", *_STATE}:
            raise CheckpointError(
                f"{where} {', '.join(sorted(given))}, but RemainderAdamW needs step, exp_avg and exp_avg_sq, and knows "
                "remainder besides; load it into the optimizer that wrote it."
            )
        half = parameter.dtype == torch.bfloat16
        if "remainder" in given and not half:
            raise CheckpointError(
                f"{where} a remainder, which belongs to a bf16 weight, but the weight is {parameter.dtype}; cast it to "
                "bf16 before building the optimizer, or load what adamw_state_dict() writes."
            )
        if half and "remainder" not in given:
            zeros = torch.zeros_like(parameter.detach(), dtype=torch.int16)
            given = {**given, "remainder": self.state.get(parameter, {}).get("remainder", zeros)}
        step = torch.as_tensor(given["step"], dtype=torch.float32)
        count = step.detach().to(tensors.local(parameter).device, copy=True)
        return {name: _stored(parameter, name, given[name]) for name in given if name != "step"} | {
            "step": count
        }


def _stored(parameter: Tensor, name: str, value: Any) -> Tensor:
    """An own copy of a stored tensor, laid out like the Parameter."""
    where = f"The stored {name} of a weight of shape {tuple(parameter.shape)} is"
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(f"{where} {shape}; load the state of the same model.")
    if name == "remainder" and value.dtype != torch.int16:
        raise CheckpointError(
            f"{where} {value.dtype} in place of int16, so its bits are lost; something cast it on the way. Load the "
            "state that was saved."
        )
    made = torch.zeros_like(parameter.detach(), dtype=_STATE[name])
    tensors.local(made).copy_(tensors.local(tensors.alike(parameter, value)))
    return made


def _check_parameter(parameter: Tensor) -> None:
    """Raise ConfigError for a Parameter that RemainderAdamW cannot update."""
    where = f"A Parameter of shape {tuple(parameter.shape)}"
    if parameter.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"{where} is {parameter.dtype}; RemainderAdamW updates bf16 weights (and fp32 ones as they are). fp16 has "
            "fewer exponents than fp32, so sixteen bits more do not complete it: use dtype=bf16, or an fp32 copy as "
            "master weights."
        )
    if not tensors.dense(tensors.local(parameter)):
        raise ConfigError(
            f"{where} and strides {tuple(parameter.stride())} has gaps or overlaps in memory; make it contiguous "
            "before building the optimizer."
        )


@torch.no_grad()
def from_adamw(
    optimizer: Optimizer, *, keep_fp32: Collection[Parameter] = (), form: Form = "auto"
) -> RemainderAdamW:
    """Turn a `torch.optim.AdamW` into a RemainderAdamW, and its fp32 Parameters to bf16: both in place.

    The optimizer stays the same object, with its groups, moments, counters and hooks; schedulers go on with it. So do
    the Parameter objects, and with them the model: each one's fp32 weight lives on, exactly, in its bf16 data and the
    optimizer's remainder. Gradients are rounded to bf16. Parameters in `keep_fp32` (norms, say) stay fp32.

    Raises ConfigError for another optimizer, Parameters that are not fp32 or sharded already, and what RemainderAdamW
    refuses; then nothing has changed.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ConfigError(
            f"The remainder form of master weights is part of AdamW, but the optimizer is "
            f"{type(optimizer).__name__}; use torch.optim.AdamW, or an fp32 copy as master weights."
        )
    for group in optimizer.param_groups:
        check_group(group)
    resolved: list[Any] = parameters_of(optimizer)
    for parameter in resolved:
        _check_parameter(parameter)
        where = f"A Parameter of shape {tuple(parameter.shape)} is"
        if hasattr(parameter.detach(), "to_local"):
            raise ConfigError(
                f"{where} sharded already and cannot be turned to bf16 in place; shard the bf16 model, build "
                "RemainderAdamW over it, and bring the fp32 weights with set_fp32_weight."
            )
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"{where} {parameter.dtype}, but its exact fp32 weight is needed; convert before the model is cast."
            )
        form_on(form, parameter.device)
    kept = {id(parameter) for parameter in keep_fp32}
    converted: Any = optimizer
    converted.__class__ = RemainderAdamW
    converted.__setstate__({"form": form})
    scheduled = vars(converted).get("step")
    if scheduled is not None:  # a learning-rate scheduler wrapped it on the instance
        converted.step = functools.wraps(scheduled)(functools.partial(RemainderAdamW.step, converted))
        converted._opt_called = True  # else the scheduler would warn that its optimizer never steps
    for parameter in resolved:
        remainder = None if id(parameter) in kept else _to_bf16(parameter)
        state = converted.state.get(parameter)
        if state:
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).to(parameter.device)
        if remainder is not None:
            converted._state_of(parameter)["remainder"] = remainder
    return converted  # type: ignore[no-any-return]


def _to_bf16(parameter: Parameter) -> Tensor:
    """Round a Parameter to bf16 in place, its gradient too; returns the remainder."""
    gradient = parameter.grad
    parameter.grad = None
    parameter.data, remainder = split(parameter.detach())
    if gradient is not None:
        parameter.grad = gradient.to(torch.bfloat16)
    return remainder
