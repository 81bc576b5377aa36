"""The prediction for any model, layout and machine, from its shape: `predict` and `search` both end here."""

from __future__ import annotations

from penstock.config.machine import Machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.config.rules import require
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.holding import held_parameters
from penstock.planner.iteration import Memo, iteration
from penstock.planner.memory_model import activation_kinds, in_flight, memory
from penstock.planner.outcome import MARGIN, Prediction
from penstock.planner.rates import FUSED, Rates, rates_of
from penstock.planner.shapes import Shape, shape_of


def estimate(model: ModelConfig, machine: Machine, plan: Plan, constants: Constants = DEFAULT) -> Prediction:
    """Predict one optimizer step. Raises ConfigError for a layout that cannot be, with every reason."""
    shape = shape_of(model)
    require(plan, model)
    return prediction(shape, machine, rates_of(machine, plan, constants), plan, constants)


def prediction(
    shape: Shape,
    machine: Machine,
    rates: Rates,
    plan: Plan,
    constants: Constants = DEFAULT,
    *,
    parts: dict[str, float] | None = None,
    memo: Memo | None = None,
) -> Prediction:
    """As `estimate`, for a layout known to be possible; `parts` is its memory where it is known already."""
    held = held_parameters(shape, plan)
    step = iteration(shape, rates, plan, memo, held=held)
    seconds = sum(step.seconds.values())
    parts = memory(shape, plan, constants, held=held) if parts is None else parts
    needed = int(sum(parts.values()))
    batch, gpus = plan.global_batch, plan.gpus
    useful = shape.model_flops * batch / seconds / gpus
    return Prediction(
        plan=plan,
        machine=machine.name,
        iteration_seconds=seconds,
        samples_per_second=batch / seconds,
        memory_bytes=needed,
        fits=not machine.memory_bytes or needed <= MARGIN * machine.memory_bytes,
        model_flops_per_second_per_gpu=useful,
        mfu=useful / rates.peak,
        hfu=(useful + recomputed_flops(shape, plan) * batch / seconds / gpus) / rates.peak,
        peak_flops=rates.peak,
        peak_name=rates.peak_name,
        seconds=step.seconds,
        memory={name: int(size) for name, size in parts.items()},
        activations={n: int(size) for n, size in activation_kinds(shape, plan, parts["activations"]).items()},
        micro_batches_held=in_flight(plan) if plan.pp > 1 else 1.0,
        gpus=gpus,
        global_batch=batch,
        tokens_per_sample=shape.samples_are_tokens,
        parameters=shape.parameters,
        bubble_fraction=step.bubble_fraction,
        forward_seconds=step.forward_seconds,
        backward_seconds=step.backward_seconds,
        weight_gradient_seconds=step.weight_gradient_seconds,
        memory_limit_bytes=int(machine.memory_bytes),
    )


def recomputed_flops(shape: Shape, plan: Plan) -> float:
    """Forward FLOPs that are computed twice for one sample: by recomputation, and by fused attention's scores."""
    total = 0.0
    for block in shape.blocks:
        if plan.recompute == "full":
            again = block.flops / plan.recompute_every
        elif plan.recompute == "early":
            last = 2 * block.tokens * block.width * block.hidden * ((block.routed + block.shared) or 1)
            again = (block.flops - last) / plan.recompute_every
        elif plan.recompute == "operators":
            again = 2 * block.tokens * block.width * (block.attention_width + block.hidden * block.gated)
            again /= plan.recompute_every
        elif plan.recompute == "selective" and plan.attention not in FUSED:
            again = block.attention_flops / plan.recompute_every
        else:
            again = 0.0
        if plan.attention in FUSED:
            again += block.attention_flops / 2
        total += block.count * again
    return total
