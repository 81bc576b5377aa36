"""Rules of what can be predicted but not run yet."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.convert import word
from penstock.config.formats import PRODUCTS
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, stacks
from penstock.config.numerics import numerics_of
from penstock.config.optimizers import OPTIMIZERS, form_problems
from penstock.config.plan import Plan
from penstock.config.rule import Rules, divisors
from penstock.config.trainable import mixture_problems, plan_problems

RUN_RULES = Rules()


@RUN_RULES.of("run")
def _fp16_skips_overflowed_steps(plan: Plan) -> Iterator[str]:
    """fp16 needs a loss scale, which needs an optimizer that can skip a step on the device."""
    skips = OPTIMIZERS[plan.algorithm].skips
    if numerics_of(plan).scales and plan.optimizer not in skips:
        name = f"plan.optimizer={plan.optimizer}" if skips else f"recipe.optimizer={plan.algorithm}"
        remedy = f"optimizer={' or '.join(skips)}, or dtype=bf16" if skips else "dtype=bf16"
        yield (
            f"plan.dtype=fp16 needs a loss scale, and {name} cannot skip an overflowed step without making the host "
            f"wait; use {remedy}."
        )


@RUN_RULES.of("run")
def _optimizer_has_the_form(plan: Plan) -> Iterator[str]:
    """The optimizer has the form that the Plan launches it in."""
    yield from form_problems(plan.algorithm, plan.optimizer)


@RUN_RULES.of("run")
def _matrices_are_whole(plan: Plan) -> Iterator[str]:
    """`adafactor` has whole weights on each device, and `muon` computes on the device, not in host memory."""
    matrices = OPTIMIZERS[plan.algorithm].matrices
    if matrices == "factored":
        split = [name for name in ("tp", "ep") if getattr(plan, name) > 1]
        split += ["sharding"] * (plan.sharding != "ddp" and plan.dp > 1)
        for name in split:
            value = {"sharding": "ddp"}.get(name, "1")
            yield (
                f"recipe.optimizer={plan.algorithm} keeps means of whole rows and columns, which plan.{name}="
                f"{getattr(plan, name)} splits over devices; use {name}={value}, or recipe.optimizer=muon."
            )
    if matrices == "orthogonal" and plan.offload == "optimizer":
        yield (
            f"recipe.optimizer={plan.algorithm} multiplies matrices, which plan.offload=optimizer would do in host "
            "memory; use offload=none, or recipe.optimizer=adamw."
        )


@RUN_RULES.of("run")
def _penstock_runs_on_the_machine(plan: Plan, machine: Machine) -> Iterator[str]:
    """Penstock trains on GPUs and CPUs."""
    if machine.device == "other":
        yield f"Machine {machine.name} can be planned for, but Penstock does not run on it; choose a GPU or a CPU."


@RUN_RULES.of("run")
def _runtime_has_the_setting(plan: Plan) -> Iterator[str]:
    """Training supports every setting of the Plan."""
    yield from plan_problems(plan)


@RUN_RULES.of("run")
def _pipeline_runs_stages(plan: Plan) -> Iterator[str]:
    """A pipeline's stages take no `compile=whole`, and for `zero_bubble` plain linears and whole weights."""
    if plan.pp == 1:
        if plan.schedule != "1f1b":
            yield f"plan.schedule={plan.schedule} orders the stages of a pipeline, but plan.pp=1; leave schedule out."
        return
    if plan.compile == "whole":
        yield f"plan.compile=whole cannot be run with plan.pp={plan.pp}, which cuts the model; use compile=blocks."
    if plan.schedule == "zero_bubble":
        whole = {"products": "plain", "sharding": "ddp"}
        for name, value in whole.items():
            if getattr(plan, name) != value:
                yield (
                    "plan.schedule=zero_bubble takes the backward pass of linears apart, which cannot be done with "
                    f"plan.{name}={word(getattr(plan, name))}; use {name}={word(value)}, or schedule=1f1b."
                )


@RUN_RULES.of("run")
def _heads_of_keys_are_split(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In training, `tp` divides the KV heads."""
    for kv in dict.fromkeys(layer.kv_heads for stack in stacks(model) for layer in stack.kinds):
        if plan.tp > 1 and kv % plan.tp and not plan.tp % kv:
            yield (
                f"plan.tp={plan.tp} would copy the model's {kv} KV heads, which can be predicted but not "
                f"trained yet; use a tp of {divisors(kv)}."
            )


@RUN_RULES.of("run")
def _split_layers_have_plain_weights(plan: Plan) -> Iterator[str]:
    """In training, `tp` goes with `products=plain` and those in int8 alone."""
    if plan.tp > 1 and not PRODUCTS[plan.products].splits:
        yield f"plan.products={plan.products} cannot be trained with plan.tp={plan.tp} yet; leave one of them out."


@RUN_RULES.of("run")
def _split_tokens_have_whole_shards(plan: Plan) -> Iterator[str]:
    """In training, `cp` divides `shard`."""
    if plan.sharding == "hsdp" and plan.shard % plan.cp:
        yield (
            f"plan.shard={plan.shard} would separate the plan.cp={plan.cp} ranks that split a sample's tokens; use a "
            f"shard that plan.cp divides."
        )


@RUN_RULES.of("run")
def _offloaded_blocks_run_eagerly(plan: Plan) -> Iterator[str]:
    """Activations are offloaded from blocks that are neither compiled nor recomputed."""
    for name in ("compile", "recompute"):
        if plan.offload == "activations" and getattr(plan, name) != "none":
            yield (
                f"plan.offload=activations takes what blocks keep, which plan.{name}={getattr(plan, name)} decides by "
                f"itself; use {name}=none, or offload=none."
            )


@RUN_RULES.of("run")
def _offload_keeps_shards(plan: Plan) -> Iterator[str]:
    """The optimizer is offloaded only if its states are sharded."""
    if plan.offload == "optimizer" and (plan.sharding == "ddp" or plan.dp == 1):
        yield (
            "plan.offload=optimizer keeps shards in host memory, but the plan shards nothing; use "
            "plan.sharding=fsdp with plan.dp of 2 or more, or offload=none."
        )


@RUN_RULES.of("run")
def _mixtures_are_trained(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Mixtures of experts are compiled where each rank has them whole, with `products=plain`; what looks at all tokens
    of a sample needs them on one rank. Experts that are whole blocks are compiled by blocks, and of models that read
    texts they need whole texts, `cp=1` and `padding=keep`."""
    yield from mixture_problems(plan, model)
