"""AdamW in one pass over memory: with clipping, loss scale, averages and half copies of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from penstock.errors import ConfigError
from penstock.kernels.adamw import Batch, Form, Hyper, adamw_, form_on
from penstock.kernels.native import read_number
from penstock.optim import tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


class Averages(NamedTuple):
    """Averages of weights that an optimizer updates in its own pass."""

    shadows: dict[Tensor, Tensor]
    """fp32 averages by Parameter, in the Parameter's shape."""
    part: float
    """Step towards the weights, 1 − decay."""
    moved: set[Tensor]
    """Parameters whose averages have been updated since this set was last cleared."""


class Copies(NamedTuple):
    """Half copies of fp32 weights that an optimizer writes in its own pass."""

    halves: dict[Tensor, Tensor]
    """bf16 copies by Parameter, in the Parameter's shape."""
    written: set[Tensor]
    """Parameters whose copies have been written since this set was last cleared."""


class OnePassAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` over fp32 weights that also updates averages and half copies in the same pass.

    With averages or copies it uses a kernel of `penstock.kernels.adamw`, in C++ on a CPU and in Triton on a GPU, which
    also does not modify gradients when it clips and unscales; results differ from torch's in the last digits, because
    torch's kernel fuses multiplications and additions. Without them, or once weights were cast, it uses torch's kernel,
    which is as fast (`benchmarks/adamw_cpu.py`). The state dict is torch's.
    """

    form: Form = "auto"
    averages: Averages | None = None
    """Averages that a step updates in its own pass: see `penstock.optim.EMA`."""
    copies: Copies | None = None
    """Copies that a step writes in its own pass: see `penstock.precision.MasterWeights`."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns the closure's loss."""
        folds = self.averages is not None or self.copies is not None
        if not folds or any(p.dtype != torch.float32 for group in self.param_groups for p in group["params"]):
            return tensors.adamw_step(self, closure)
        loss = tensors.loss_of(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for batch in self._batches(group):
                    device, names = batch.weights[0].device, ("grad_scale", "found_inf")
                    scalars = {name: tensors.step_scalar(self, name, device) for name in names}
                    part = 0.0 if self.averages is None else self.averages.part
                    adamw_(batch, _hyper(group), form=self.form, average_part=part, **scalars)
        return loss

    def _batches(self, group: dict[str, Any]) -> list[Batch]:
        """The Parameters of a group that have a gradient, batched by device and presence of average and copy."""
        batches: dict[tuple[Any, ...], Batch] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise ConfigError(
                    f"{type(self).__name__} needs dense gradients; build the embedding with sparse=False."
                )
            local = tensors.local(parameter)
            if local.numel() == 0:  # a shard may be empty
                continue
            average, copy = self._average_of(parameter, local), self._copy_of(parameter, local)
            state = self._state_of(parameter)
            key = (local.device, average is None, copy is None)
            if key not in batches:
                batches[key] = Batch(
                    [], [], [], [], [],
                    copies=None if copy is None else [], averages=None if average is None else [],
                )  # fmt: skip
            batch = batches[key]
            batch.weights.append(tensors.flat(local))
            batch.gradients.append(tensors.flat(tensors.ordered(tensors.local(parameter.grad), local)))
            batch.exp_avgs.append(tensors.flat(tensors.local(state["exp_avg"])))
            batch.exp_avg_sqs.append(tensors.flat(tensors.local(state["exp_avg_sq"])))
            batch.steps.append(state["step"])
            for listed, tensor in ((batch.averages, average), (batch.copies, copy)):
                if listed is not None and tensor is not None:
                    listed.append(tensors.flat(tensors.local(tensor)))
        return list(batches.values())

    def _average_of(self, parameter: Parameter, weight: Tensor) -> Tensor | None:
        """The average that this step's pass updates with a weight. A skipped step updates none, and neither does a step
        on a GPU that may be skipped: `EMA.update` moves these averages instead."""
        stops = None if self.averages is None else getattr(self, "found_inf", None)
        stands = stops is not None and (stops.device.type != "cpu" or read_number(stops))
        if self.averages is None or stands or form_on(self.form, weight.device) == "fused":
            return None
        return _beside(self.averages.shadows, self.averages.moved, parameter, weight)

    def _copy_of(self, parameter: Parameter, weight: Tensor) -> Tensor | None:
        """The half copy that this step's pass writes with a weight."""
        if self.copies is None or form_on(self.form, weight.device) == "fused":
            return None
        return _beside(self.copies.halves, self.copies.written, parameter, weight)

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensors.local(parameter).device)
            state |= {name: torch.zeros_like(parameter.detach(), dtype=torch.float32) for name in MOMENTS}
        if state["step"].dtype != torch.float32:  # a state of another form, under another default dtype
            state["step"] = state["step"].float()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `torch.optim.AdamW`. Raises ConfigError for settings that the kernel lacks."""
        for group in state_dict["param_groups"]:
            check_group(group)
        super().load_state_dict(state_dict)


def takes_one_pass(groups: Iterable[Any]) -> bool:
    """Whether `OnePassAdamW` supports these parameters or groups (fp32, on one device) and its kernel is available."""
    parameters = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
    takes = all(
        isinstance(p, Tensor) and p.dtype == torch.float32 and tensors.dense(tensors.local(p.detach()))
        for p in parameters
    )
    devices = {p.device for p in parameters} if takes else set()
    return len(devices) == 1 and form_on("auto", devices.pop()) != "fused"


def check_group(group: dict[str, Any]) -> None:
    """Raise ConfigError for settings that the kernels do not support."""
    numbers = [(name, group.get(name)) for name in ("lr", "eps", "weight_decay")]
    numbers += [("betas", beta) for beta in group.get("betas", ())]
    problems = []
    if group.get("amsgrad"):
        problems.append("AdamW in one pass has no amsgrad; set amsgrad=False, or use torch.optim.AdamW.")
    if group.get("differentiable"):
        problems.append("AdamW in one pass updates in place and cannot be differentiable; leave it out.")
    problems += [
        f"AdamW in one pass needs {name} as a number, not as a tensor; pass a float."
        for name, value in numbers
        if isinstance(value, Tensor)
    ]
    if problems:
        raise ConfigError(problems)


def _beside(
    held: dict[Tensor, Tensor], written: set[Tensor], parameter: Tensor, weight: Tensor
) -> Tensor | None:
    """The tensor of `held` that the pass over a parameter's weight can also write, added to `written`: it must be on
    the weight's device, with its memory order and without gaps; else None."""
    own = tensors.local(held[parameter]) if parameter in held else None
    if own is None or own.device != weight.device or tensors.ordered(own, weight) is not own:
        return None
    if not tensors.dense(own):
        return None
    written.add(parameter)
    return own


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])
