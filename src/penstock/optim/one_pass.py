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


class SideTensors(NamedTuple):
    """Tensors that an optimizer writes in the pass that updates fp32 weights: their fp32 averages or bf16 copies."""

    tensors: dict[Tensor, Tensor]
    """The tensor of each Parameter, in its shape."""
    written: set[Tensor]
    """Parameters whose tensors have been written since this set was last cleared."""
    part: float = 0.0
    """An average's step towards the weight, 1 − decay."""

    def begin(self, parameter: Parameter, weight: Tensor) -> Tensor | None:
        """Return the tensor of a Parameter, and add the Parameter to `written`; None if the pass over its `weight`
        cannot write it, because it is on another device, has another memory order, or gaps."""
        own = tensors.local(self.tensors[parameter]) if parameter in self.tensors else None
        if own is None or own.device != weight.device or tensors.ordered(own, weight) is not own:
            return None
        if not tensors.dense(own):
            return None
        self.written.add(parameter)
        return own


class OnePassAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` over fp32 weights that also updates averages and half copies in the same pass.

    With averages or copies it uses a kernel of `penstock.kernels.adamw`, in C++ on a CPU and in Triton on a GPU, which
    also does not modify gradients when it clips and unscales; results differ from torch's in the last digits, because
    torch's kernel fuses multiplications and additions. Without them, or once weights were cast, it uses torch's kernel,
    which is as fast (`benchmarks/adamw_cpu.py`). The state dict is torch's.
    """

    form: Form = "auto"
    averages: SideTensors | None = None
    """Averages that a step updates in its own pass: see `penstock.optim.EMA`."""
    copies: SideTensors | None = None
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
                (beta1, beta2), decay = group["betas"], group["weight_decay"]
                rates = Hyper(group["lr"], beta1, beta2, group["eps"], decay, group["maximize"])
                for batch in self._batches(group):
                    device, names = batch.weights[0].device, ("grad_scale", "found_inf")
                    scalars = {name: tensors.step_scalar(self, name, device) for name in names}
                    part = 0.0 if self.averages is None else self.averages.part
                    adamw_(batch, rates, form=self.form, average_part=part, **scalars)
        return loss

    def _batches(self, group: dict[str, Any]) -> list[Batch]:
        """The Parameters of a group that have a gradient, batched by device and presence of average and copy."""
        batches: dict[tuple[Any, ...], Batch] = {}
        averages = self.averages
        stops = None if averages is None else getattr(self, "found_inf", None)
        if stops is not None and (stops.device.type != "cpu" or read_number(stops)):
            # A skipped step moves no average, and neither does a step on a GPU that may be skipped: `EMA.update` does.
            averages = None
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
            fused = form_on(self.form, local.device) == "fused"
            average, copy = (
                None if beside is None or fused else beside.begin(parameter, local)
                for beside in (averages, self.copies)
            )
            state = self._state_of(parameter)
            key = (local.device, average is None, copy is None)
            none_or_list = [None if each is None else list[Tensor]() for each in (copy, average)]
            batch = batches.setdefault(key, Batch([], [], [], [], [], *none_or_list))
            batch.weights.append(tensors.flat(local))
            batch.gradients.append(tensors.flat(tensors.ordered(tensors.local(parameter.grad), local)))
            batch.exp_avgs.append(tensors.flat(tensors.local(state["exp_avg"])))
            batch.exp_avg_sqs.append(tensors.flat(tensors.local(state["exp_avg_sq"])))
            batch.steps.append(state["step"])
            for listed, tensor in ((batch.averages, average), (batch.copies, copy)):
                if listed is not None and tensor is not None:
                    listed.append(tensors.flat(tensors.local(tensor)))
        return list(batches.values())

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensors.local(parameter).device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter.detach(), dtype=torch.float32)
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
    numbers = {name: group.get(name) for name in ("lr", "eps", "weight_decay")}
    numbers |= {f"betas[{index}]": beta for index, beta in enumerate(group.get("betas", ()))}
    problems = [
        f"AdamW in one pass needs {name} as a number, not as a tensor; pass a float."
        for name, value in numbers.items()
        if isinstance(value, Tensor)
    ]
    if group.get("amsgrad"):
        problems.append("AdamW in one pass has no amsgrad; set amsgrad=False, or use torch.optim.AdamW.")
    if group.get("differentiable"):
        problems.append("AdamW in one pass updates in place and cannot be differentiable; leave it out.")
    if problems:
        raise ConfigError(problems)
