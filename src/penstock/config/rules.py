"""Every reason why a Plan is not allowed, each stated once for all callers.

A rule is a function that yields whole sentences. Each names the setting, what is wrong and what to do. Its
parameters are what it needs: the Plan, the model, the machine. Its kind is `types` (types, kernels and device
features), `degrees` (of parallelism, and how they divide the model) or `run` (what can be predicted
but not run yet). Rules of the first two kinds also apply to predictions. `problems` evaluates all rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from penstock.config.convert import word
from penstock.config.machine import Machine
from penstock.config.model import EncoderConfig, ModelConfig, Seq2SeqConfig, ViTConfig, sequences, stacks
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.trainable import model_problems, plan_problems
from penstock.errors import ConfigError

Kind = Literal["types", "degrees", "run"]

CPU_ATTENTION = ("auto", "plain", "sdpa", "flash", "math")
"""Attention backends that exist on a CPU (torch/nn/attention)."""
HALF_ONLY_ATTENTION = ("flash", "cudnn")
"""Attention backends that compute only in half precision on a GPU."""
FLASH_HEAD_WIDTH = 256
"""The widest heads that flash attention supports."""
SKIPS_ON_DEVICE = ("fused", "contiguous")
"""Optimizer forms that can skip an overflowed step without making the host wait."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition that a Plan must meet."""

    name: str
    kind: Kind
    text: str
    """What it requires, in one sentence."""
    check: Callable[..., Iterator[str]]
    takes: tuple[str, ...]
    """The names of its parameters, out of plan, model and machine."""


RULES: list[Rule] = []
"""All rules, in the order in which their problems are reported."""


def _rule(kind: Kind) -> Callable[[Callable[..., Iterator[str]]], Callable[..., Iterator[str]]]:
    def enrol(check: Callable[..., Iterator[str]]) -> Callable[..., Iterator[str]]:
        text = " ".join((inspect.getdoc(check) or "").split())
        takes = tuple(inspect.signature(check).parameters)
        RULES.append(Rule(check.__name__.strip("_"), kind, text, check, takes))
        return check

    return enrol


def problems(
    plan: Plan,
    model: ModelConfig | None = None,
    machine: Machine | None = None,
    *,
    run: bool = False,
    degrees: bool = True,
) -> list[str]:
    """Every reason why `plan` is not allowed. Rules that need a model or a machine are skipped if it is not
    given.

    With `run`, rules of that kind are included. Without `degrees`, rules of that kind are skipped, for a search
    that chooses the degrees itself.
    """
    found: list[str] = []
    for check, takes_plan, takes_model, takes_machine in _asked(model is None, machine is None, run, degrees):
        arguments = (plan,) * takes_plan + (model,) * takes_model + (machine,) * takes_machine
        found += check(*arguments)
    return list(dict.fromkeys(found)) if found else found


@cache
def _asked(
    no_model: bool, no_machine: bool, run: bool, degrees: bool
) -> tuple[tuple[Callable[..., Iterator[str]], bool, bool, bool], ...]:
    """The checks to run, each with flags for whether it takes plan, model and machine."""
    skipped = {kind for kind, asked in (("run", run), ("degrees", degrees)) if not asked}
    return tuple(
        (rule.check, "plan" in rule.takes, "model" in rule.takes, "machine" in rule.takes)
        for rule in RULES
        if rule.kind not in skipped
        and not (no_model and "model" in rule.takes)
        and not (no_machine and "machine" in rule.takes)
    )


def require(
    plan: Plan, model: ModelConfig | None = None, machine: Machine | None = None, *, run: bool = False
) -> None:
    """Raise `ConfigError` with all that `problems` finds."""
    found = problems(plan, model, machine, run=run)
    if found:
        raise ConfigError(found)


# Contradictions within the Plan.


@_rule("types")
def _dtype_has_an_effect(plan: Plan) -> Iterator[str]:
    """`dtype` is set only if something is computed in half precision."""
    if plan.precision == "O0" and plan.dtype != "bf16":
        yield (
            f"plan.dtype={plan.dtype} has no effect with plan.precision=O0, which computes in fp32; "
            "choose precision=O1, O2 or O3, or leave dtype out."
        )


@_rule("types")
def _half_norms_are_of_o2(plan: Plan) -> Iterator[str]:
    """`norms=half` is set with O2 only, the one level that has a choice."""
    if plan.norms == "half" and plan.precision != "O2":
        has = "half ones anyway" if plan.precision == "O3" else "fp32 ones"
        yield (
            f"plan.norms=half has no effect with plan.precision={plan.precision}, which has {has}; use precision=O2, "
            "or leave norms out."
        )


@_rule("types")
def _remainder_completes_bf16_weights(plan: Plan) -> Iterator[str]:
    """`master=remainder` needs O2 in bf16, a fused optimizer, and weights that are not sharded."""
    if plan.master != "remainder":
        return
    if (plan.precision, plan.dtype, plan.optimizer) != ("O2", "bf16", "fused"):
        yield (
            "plan.master=remainder completes the bf16 weights of plan.precision=O2 in a fused AdamW; use "
            "precision=O2 dtype=bf16 optimizer=fused with it, or master=copy."
        )
    if plan.sharding != "ddp":
        yield (
            f"plan.master=remainder keeps whole weights, and plan.sharding={plan.sharding} shards them; use "
            "master=copy, whose shards are the fp32 weights alone."
        )


@_rule("types")
def _fp8_stands_on_bf16(plan: Plan) -> Iterator[str]:
    """`fp8` replaces the bf16 products of O1 or O2."""
    if plan.fp8 and (plan.precision not in ("O1", "O2") or plan.dtype != "bf16"):
        yield (
            f"plan.fp8={word(plan.fp8)} replaces the bf16 products of plan.precision=O1 or O2 with dtype=bf16, "
            f"but the plan has precision={plan.precision} dtype={plan.dtype}; change these, or leave fp8 out."
        )


@_rule("types")
def _budget_is_of_its_recomputation(plan: Plan) -> Iterator[str]:
    """`budget` is set with `recompute=budget` only, which leaves `recompute_every` alone."""
    if plan.budget and plan.recompute != "budget":
        yield (
            f"plan.budget={word(plan.budget)} has no effect with plan.recompute={plan.recompute}; use "
            "recompute=budget, or leave budget out."
        )
    if plan.recompute == "budget" and plan.recompute_every != 1:
        yield (
            f"plan.recompute_every={word(plan.recompute_every)} says which blocks recompute, and plan.recompute=budget "
            "chooses for each by itself; leave recompute_every out, or use another recompute."
        )


@_rule("degrees")
def _shard_is_of_hsdp(plan: Plan) -> Iterator[str]:
    """`shard` is set only with `sharding=hsdp`, and divides the number of replicas."""
    replicas = plan.dp * plan.cp
    if plan.sharding != "hsdp":
        if plan.shard > 1:
            yield f"plan.shard={plan.shard} needs plan.sharding=hsdp; use shard=1, or sharding=hsdp."
    elif replicas % plan.shard:
        named = f"plan.dp={plan.dp}" + (f" times plan.cp={plan.cp}" if plan.cp > 1 else "")
        yield f"plan.shard={plan.shard} does not divide the replicas, {named}; use a shard that does."


@_rule("degrees")
def _sequence_parallel_needs_tensor_parallel(plan: Plan) -> Iterator[str]:
    """`sp` needs tensor parallelism."""
    if plan.sp and plan.tp == 1:
        yield "plan.sp=true splits what tensor parallelism does not, but plan.tp=1; use sp=false, or a larger tp."


@_rule("degrees")
def _virtual_stages_interleave(plan: Plan) -> Iterator[str]:
    """`virtual` above 1 needs an interleaved schedule over several stages, and a multiple of `pp`
    micro-batches."""
    if plan.virtual == 1:
        return
    if plan.schedule != "interleaved":
        yield (
            f"plan.virtual={plan.virtual} needs plan.schedule=interleaved, which plan.schedule={plan.schedule} is not."
        )
    elif plan.accumulate % plan.pp:
        yield (
            f"plan.accumulate={plan.accumulate} is not a multiple of plan.pp={plan.pp}, but an interleaved schedule "
            "takes micro-batches in groups of pp; use a multiple, or schedule=1f1b with virtual=1."
        )
    if plan.pp == 1:
        yield f"plan.virtual={plan.virtual} cuts pipeline stages into chunks, but plan.pp=1; use virtual=1."


@_rule("degrees")
def _experts_are_split_over_replicas(plan: Plan) -> Iterator[str]:
    """`ep` divides `dp`."""
    if plan.dp % plan.ep:
        yield f"plan.ep={plan.ep} must divide plan.dp={plan.dp}, because experts are split over replicas."


# Rules that need the model.


@_rule("degrees")
def _heads_split_over_tensor_parallel(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`tp` divides the heads and the MLP's hidden width, and divides or is a multiple of the heads of
    keys."""
    if plan.tp == 1:
        return
    for stack in stacks(model):
        if stack.heads % plan.tp:
            yield (
                f"plan.tp={plan.tp} cannot split the model's {stack.heads} attention heads evenly; "
                f"use a tp of {_divisors(stack.heads)}."
            )
        elif stack.kv % plan.tp and plan.tp % stack.kv:
            yield (
                f"plan.tp={plan.tp} neither divides the model's {stack.kv} heads of keys nor is a multiple of them; "
                f"use a tp that divides {stack.kv}, or a multiple of it."
            )
        dense = not stack.experts or stack.expert_every > 1
        widths = [stack.mlp_width] * dense + [stack.expert_width or stack.mlp_width] * bool(stack.experts)
        for width in dict.fromkeys(widths):
            if width % plan.tp:
                yield (
                    f"plan.tp={plan.tp} cannot split the MLP's hidden width {width} evenly; "
                    "use a tp that divides it."
                )


@_rule("degrees")
def _tokens_split_over_devices(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`cp` divides the tokens of a sample."""
    if plan.cp == 1:
        return
    for tokens in sequences(model):
        if tokens % plan.cp:
            yield (
                f"plan.cp={plan.cp} cannot split the model's {tokens} tokens evenly; use a cp that divides them."
            )


@_rule("degrees")
def _every_stage_has_a_block(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`pp` is at most the number of blocks. `pp` times `virtual` divides that number, with or without
    embedding and head."""
    chunks = plan.pp * plan.virtual
    if chunks == 1:
        return
    depth = sum(stack.depth for stack in stacks(model))
    if plan.pp > depth:
        yield f"plan.pp={plan.pp} leaves stages without a block: the model has {depth}; use at most that."
    elif plan.virtual > 1 and depth % chunks and (depth + 2) % chunks:
        yield (
            f"plan.pp={plan.pp} times plan.virtual={plan.virtual} does not divide the model's {depth} "
            f"blocks (nor {depth + 2} with embedding and head); choose another virtual."
        )


@_rule("degrees")
def _experts_split_evenly(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`ep` divides the model's experts."""
    if plan.ep == 1:
        return
    experts = max(stack.experts for stack in stacks(model))
    if not experts:
        yield f"plan.ep={plan.ep} splits experts, but the model has none; use ep=1."
    elif experts % plan.ep:
        yield (
            f"plan.ep={plan.ep} cannot split the model's {experts} experts evenly; use an ep of "
            f"{_divisors(experts)}."
        )


@_rule("types")
def _flash_takes_narrow_heads(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """Flash attention supports heads of at most 256 features."""
    if plan.attention != "flash":
        return
    widest = max(stack.head_width for stack in stacks(model))
    if widest > FLASH_HEAD_WIDTH:
        yield (
            f"plan.attention=flash takes heads of at most {FLASH_HEAD_WIDTH} features, but this model's have "
            f"{widest}; use more model.heads, or attention=math."
        )


@_rule("types")
def _chunked_loss_is_over_words(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`loss=chunked` needs a model whose outputs are logits over a vocabulary."""
    words = not isinstance(model, ViTConfig | EncoderConfig) or getattr(model, "head", None) == "words"
    if plan.loss == "chunked" and not words:
        yield (
            "plan.loss=chunked cuts up logits over a vocabulary, which this model's outputs are not; leave loss out."
        )


@_rule("types")
def _padding_is_left_out_of_encoders(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """`padding=remove` needs an encoder, or an encoder–decoder's."""
    if plan.padding == "remove" and not isinstance(model, EncoderConfig | Seq2SeqConfig):
        yield (
            "plan.padding=remove leaves padding out of an encoder, which this model does not have; leave padding out."
        )


# Rules that need the machine.


@_rule("types")
def _machine_computes_the_types(plan: Plan, machine: Machine) -> Iterator[str]:
    """The machine has units for the types that the Plan computes in."""
    if numerics_of(plan).half and plan.dtype not in machine.peak_flops:
        able = [dtype for dtype in ("bf16", "fp16") if dtype in machine.peak_flops]
        remedy = f"use dtype={able[0]}" if able else "use precision=O0"
        yield f"plan.dtype={plan.dtype} cannot be computed on machine {machine.name}; {remedy}."
    if not numerics_of(plan).half and "fp32" not in machine.peak_flops:
        yield (
            f"plan.precision={plan.precision} computes in fp32, and machine {machine.name} has rates for "
            f"{', '.join(machine.peak_flops)} only; use precision=O1, O2 or O3, or give machine.peak_flops.fp32."
        )
    if plan.fp8 and "fp8" not in machine.peak_flops:
        yield (
            f"plan.fp8={word(plan.fp8)} needs a GPU with fp8 units (compute capability 8.9 or newer), and machine "
            f"{machine.name} has none; leave it out."
        )
    if plan.matmul != "highest" and machine.device == "cuda" and "tf32" not in machine.peak_flops:
        yield (
            f"plan.matmul={plan.matmul} asks for TF32, which machine {machine.name} does not have; "
            "use matmul=highest."
        )


@_rule("types")
def _host_memory_matters_on_cpus(plan: Plan, machine: Machine) -> Iterator[str]:
    """`host_memory` affects only CPUs."""
    if plan.host_memory != "release" and machine.device == "cuda":
        yield (
            f"plan.host_memory={plan.host_memory} has no effect on a GPU's step, and machine {machine.name} is "
            "one; leave it out."
        )


@_rule("types")
def _activations_leave_a_gpu(plan: Plan, machine: Machine) -> Iterator[str]:
    """`offload=activations` affects only GPUs."""
    if plan.offload == "activations" and machine.device == "cpu":
        yield (
            f"plan.offload=activations takes activations to host memory, where a CPU such as {machine.name} has them "
            "already; leave it out."
        )


@_rule("types")
def _attention_backend_exists(plan: Plan, machine: Machine) -> Iterator[str]:
    """The attention backend exists on the machine, in the type that the Plan computes in."""
    if machine.device == "cpu" and plan.attention not in CPU_ATTENTION:
        yield (
            f"plan.attention={plan.attention} exists on GPUs only, and machine {machine.name} is a CPU; "
            f"use one of {', '.join(CPU_ATTENTION)}."
        )
    if machine.device == "cuda" and plan.attention in HALF_ONLY_ATTENTION:
        if not numerics_of(plan).half:
            yield (
                f"plan.attention={plan.attention} computes in half precision only, but plan.precision=O0 is "
                "fp32; use precision=O1, O2 or O3, or attention=efficient."
            )
        if "bf16" not in machine.peak_flops:
            yield (
                f"plan.attention={plan.attention} needs a GPU of compute capability 8.0, which machine "
                f"{machine.name} is not; use attention=efficient or math."
            )


# What can be predicted but not run yet.


@_rule("run")
def _fp16_skips_overflowed_steps(plan: Plan) -> Iterator[str]:
    """fp16 needs a loss scale, which needs an optimizer that can skip a step on the device."""
    if numerics_of(plan).loss_scale and plan.optimizer not in SKIPS_ON_DEVICE:
        yield (
            f"plan.dtype=fp16 needs a loss scale, and plan.optimizer={plan.optimizer} cannot skip an overflowed "
            f"step without making the host wait; use optimizer={' or '.join(SKIPS_ON_DEVICE)}, or dtype=bf16."
        )


@_rule("run")
def _runtime_has_the_setting(plan: Plan) -> Iterator[str]:
    """Training supports every setting of the Plan."""
    yield from plan_problems(plan)


@_rule("run")
def _pipeline_runs_stages(plan: Plan) -> Iterator[str]:
    """A pipeline's stages take no `compile=whole`, and for `zero_bubble` plain linears and whole weights."""
    if plan.pp == 1:
        if plan.schedule != "1f1b":
            yield f"plan.schedule={plan.schedule} orders the stages of a pipeline, but plan.pp=1; leave schedule out."
        return
    if plan.compile == "whole":
        yield f"plan.compile=whole cannot be run with plan.pp={plan.pp}, which cuts the model; use compile=blocks."
    if plan.schedule == "zero_bubble":
        whole = {"fp8": False, "sharding": "ddp"}
        for name, value in whole.items():
            if getattr(plan, name) != value:
                yield (
                    "plan.schedule=zero_bubble takes the backward pass of linears apart, which cannot be done with "
                    f"plan.{name}={word(getattr(plan, name))}; use {name}={word(value)}, or schedule=1f1b."
                )


@_rule("run")
def _heads_of_keys_are_split(plan: Plan, model: ModelConfig) -> Iterator[str]:
    """In training, `tp` divides the heads of keys."""
    for stack in stacks(model):
        if plan.tp > 1 and stack.kv % plan.tp and not plan.tp % stack.kv:
            yield (
                f"plan.tp={plan.tp} would copy the model's {stack.kv} heads of keys, which can be predicted but not "
                f"trained yet; use a tp of {_divisors(stack.kv)}."
            )


@_rule("run")
def _split_layers_have_plain_weights(plan: Plan) -> Iterator[str]:
    """In training, `tp` goes with neither `fp8` nor `master=remainder`."""
    if plan.tp > 1 and plan.fp8:
        yield f"plan.fp8={word(plan.fp8)} cannot be trained with plan.tp={plan.tp} yet; leave one of them out."
    if plan.tp > 1 and plan.master == "remainder":
        yield (
            f"plan.master=remainder keeps whole weights, and plan.tp={plan.tp} splits them; use master=copy, or tp=1."
        )


@_rule("run")
def _split_tokens_have_whole_shards(plan: Plan) -> Iterator[str]:
    """In training, `cp` divides `shard`."""
    if plan.sharding == "hsdp" and plan.shard % plan.cp:
        yield (
            f"plan.shard={plan.shard} would separate the plan.cp={plan.cp} ranks that split a sample's tokens; use a "
            f"shard that plan.cp divides."
        )


@_rule("run")
def _offloaded_blocks_run_eagerly(plan: Plan) -> Iterator[str]:
    """Activations are offloaded from blocks that are neither compiled nor recomputed."""
    for name in ("compile", "recompute"):
        if plan.offload == "activations" and getattr(plan, name) != "none":
            yield (
                f"plan.offload=activations takes what blocks keep, which plan.{name}={getattr(plan, name)} decides by "
                f"itself; use {name}=none, or offload=none."
            )


@_rule("run")
def _offload_keeps_shards(plan: Plan) -> Iterator[str]:
    """The optimizer is offloaded only if its states are sharded."""
    if plan.offload == "optimizer" and (plan.sharding == "ddp" or plan.dp == 1):
        yield (
            "plan.offload=optimizer keeps shards in host memory, but the plan shards nothing; use "
            "plan.sharding=fsdp with plan.dp of 2 or more, or offload=none."
        )


@_rule("run")
def _family_can_be_trained(model: ModelConfig) -> Iterator[str]:
    """The model's family can be built."""
    yield from model_problems(model)


def _divisors(number: int) -> str:
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
