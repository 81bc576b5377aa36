"""What a Plan will cost, said before it runs."""

from __future__ import annotations

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, ViTConfig
from penstock.config.plan import Plan
from penstock.config.rules import require
from penstock.planner.activations import activation_parts, working_bytes
from penstock.planner.counts import parameters
from penstock.planner.estimate import estimate
from penstock.planner.memory import step_memory
from penstock.planner.operations import conv_widths, listing
from penstock.planner.outcome import MARGIN
from penstock.planner.outcome import Prediction as Prediction
from penstock.planner.rates import compute_type, peak_of
from penstock.planner.time import Workload, step_parts


def predict(model: ModelConfig, machine: Machine, plan: Plan) -> Prediction:
    """Predict one optimizer step of `model` under `plan` on the devices of `machine` that the plan takes.

    A ViT on one device is predicted operator by operator, as Penstock's own modules launch them; every other model and
    layout from its shape. Raises ConfigError where the machine cannot compute in the
    plan's type, or for a layout that cannot be, with every reason.
    """
    if isinstance(model, ViTConfig) and by_operators(plan):
        return predict_workload(workload(model, machine, plan), machine, plan)
    return estimate(model, machine, plan)


_BY_OPERATORS: dict[str, object] = {
    "sharding": "ddp", "recompute": "none", "gradients": "weights", "offload": "none",
}  # fmt: skip


def by_operators(plan: Plan) -> bool:
    """Whether a plan is of one device and of settings that the prediction by operators knows."""
    # Muon's products follow from the matrices, which the operators do not name.
    return (
        plan.gpus == 1
        and plan.algorithm != "muon"
        and all(getattr(plan, name) == value for name, value in _BY_OPERATORS.items())
    )


def workload(model: ViTConfig, machine: Machine, plan: Plan) -> Workload:
    """The operations, parameters and activations of one micro-batch of `model`."""
    batch, device = plan.micro_batch, machine.device
    kept = activation_parts(model, batch, plan, device=device)
    return Workload(
        listed=listing(model, plan, device=device),
        samples=batch,
        tokens=model.tokens,
        parameters=parameters(model),
        tensors=parameter_tensors(model),
        activation_bytes=sum(kept.values()),
        activation_parts=kept,
        working_bytes=working_bytes(model, batch, plan, device=device),
    )


def parameter_tensors(model: ViTConfig) -> int:
    """How many tensors the parameters are: what an optimizer loops over."""
    block = 2 * 2 + 4 * 2 - (not model.qkv_bias) + 4 * model.qk_norm + 2 * (model.layer_scale is not None)
    stem = 2 if model.stem == "patchify" else 3 * len(conv_widths(model)) + 2
    return stem + 1 + (model.classifier == "token") + model.depth * block + 2 + 2


def predict_workload(work: Workload, machine: Machine, plan: Plan) -> Prediction:
    """As `predict`, for any model whose operations are known. Raises ConfigError as it does."""
    peak_name = compute_type(plan, machine)
    peak = peak_of(machine, peak_name)
    require(plan)
    seconds, forward = step_parts(work, machine, plan)
    computing = (seconds["gemm"] + seconds["attention"] + seconds["pointwise"]) / plan.accumulate
    memory = step_memory(work, plan)
    total = sum(seconds.values())
    useful, again = (plan.accumulate * flops for flops in work.listed.flops(work.samples))
    return Prediction(
        plan=plan,
        machine=machine.name,
        iteration_seconds=total,
        samples_per_second=work.samples * plan.accumulate / total,
        memory_bytes=sum(memory.values()),
        fits=not machine.memory_bytes or sum(memory.values()) <= MARGIN * machine.memory_bytes,
        model_flops_per_second_per_gpu=useful / total,
        mfu=useful / total / peak,
        hfu=(useful + again) / total / peak,
        peak_flops=peak,
        peak_name=peak_name,
        seconds=seconds,
        memory=memory,
        activations=work.activation_parts if memory["activations"] else {},
        global_batch=work.samples * plan.accumulate,
        tokens_per_sample=work.tokens,
        parameters=work.parameters,
        forward_seconds=forward,
        backward_seconds=computing - forward,
        memory_limit_bytes=int(machine.memory_bytes),
    )
