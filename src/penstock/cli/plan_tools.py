"""How to run a layout: the flags of Megatron-LM, torchtitan and DeepSpeed that ask for it, and Penstock's own command.

Every tool lacks something that a Plan can say. What it lacks is said beside its command, and what comes nearest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.machine import Machine
from penstock.config.model import (
    PRESETS,
    DecoderConfig,
    ModelConfig,
    ViTConfig,
    option_words,
    sequences,
    stacks,
)
from penstock.config.plan import Plan
from penstock.config.rules import problems

MEGATRON, TORCHTITAN, DEEPSPEED = "Megatron-LM core 0.19", "torchtitan 0.2.2", "DeepSpeed 0.19"
"""The versions whose names these are."""
_FLAVORS = {"llama3-8b": "8B", "llama3-70b": "70B", "llama3-405b": "405B"}
"""The presets that torchtitan has too."""
_MEGATRON_SCRIPTS = {"decoder": "pretrain_gpt.py", "encoder": "pretrain_bert.py", "seq2seq": "pretrain_t5.py"}


@dataclass(frozen=True, slots=True)
class HowTo:
    """A tool's words for a layout."""

    tool: str
    command: str
    """What to type; for DeepSpeed the JSON of its configuration."""
    notes: tuple[str, ...] = ()
    """What the tool does not have, or what else it needs."""


def how_to_run(model: ModelConfig, machine: Machine, plan: Plan) -> list[HowTo]:
    """The commands that run `plan`: Penstock's own where it can, and those of tools for GPUs."""
    found = []
    if not problems(plan, model, machine, run=True):
        found.append(penstock_train(model, machine, plan))
    if machine.device != "cuda":
        return found
    if isinstance(model, ViTConfig):
        return [*found, deepspeed(model, machine, plan)]
    return [
        *found,
        megatron(model, machine, plan),
        torchtitan(model, machine, plan),
        deepspeed(model, machine, plan),
    ]


def penstock_train(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """`penstock train`, under its own launcher where the Plan has several ranks."""
    words = [" ".join(option_words(model)), f'--plan "{plan.line()}"']
    if plan.gpus == 1:
        return HowTo("penstock", " ".join(["penstock train", *words]))
    here, nodes = _nodes(machine, plan)
    meet = [f"--nnodes {nodes} --rdzv HOST:29400"] if nodes > 1 else []
    return HowTo("penstock", " ".join([f"penstock launch --procs {here}", *meet, "-- train", *words]))


def megatron(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """Arguments of Megatron-LM's `pretrain_*.py` (megatron/training/arguments.py)."""
    flags: list[Any] = [*_megatron_sizes(model)] if isinstance(model, DecoderConfig) else []
    flags += _given(
        ("--tensor-model-parallel-size", plan.tp), ("--pipeline-model-parallel-size", plan.pp),
        ("--num-virtual-stages-per-pipeline-rank", plan.virtual), ("--context-parallel-size", plan.cp),
        ("--expert-model-parallel-size", plan.ep), least=2,
    )  # fmt: skip
    flags += ["--sequence-parallel"] * plan.sp
    flags += ["--tp-comm-overlap"] * (plan.tp > 1 and plan.tp_overlap == "all")
    flags += ["--cp-comm-type", "all_gather"] if plan.cp > 1 and plan.cp_exchange == "gather" else []
    flags += ["--micro-batch-size", plan.micro_batch, "--global-batch-size", plan.global_batch]
    flags += [] if plan.precision == "O0" else [f"--{plan.dtype}"]
    flags += ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"] if plan.fp8 else []
    flags += ["--attention-backend", "flash"] if plan.attention == "flash" else []
    flags += _megatron_sharding(plan)
    flags += ["--optimizer-cpu-offload"] * (plan.offload == "optimizer")
    whole = [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ]
    selective = ["--recompute-granularity", "selective"]
    flags += {"full": whole, "early": whole, "selective": selective, "operators": selective}.get(
        plan.recompute, []
    )
    return HowTo(
        MEGATRON,
        " ".join([_torchrun(machine, plan), _MEGATRON_SCRIPTS[model.family], *map(str, flags)]),
        _notes(
            (not isinstance(model, DecoderConfig), "add the sizes of the model"),
            (plan.precision in ("O1", "O3"), f"keeps half weights and fp32 masters, unlike {plan.precision}"),
            (plan.recompute == "operators", "recomputes attention alone where recompute=operators recomputes more"),
            (plan.recompute == "early", "recomputes whole blocks"),
            (plan.recompute_every != 1, "recomputes in every block"),
            (plan.schedule in ("gpipe", "zero_bubble"), f"has no schedule {plan.schedule}: it runs 1F1B"),
            (plan.fp8 == "rowwise", "has no scale per row of fp8 numbers"),
            (plan.algorithm not in ("adamw", "sgd", "muon"), f"has no {plan.algorithm}"),
        ),
    )  # fmt: skip


def _megatron_sizes(model: DecoderConfig) -> Iterator[Any]:
    yield from (
        "--num-layers",
        model.depth,
        "--hidden-size",
        model.width,
        "--num-attention-heads",
        model.heads,
    )
    yield from ("--ffn-hidden-size", model.mlp_width, "--seq-length", model.sequence)
    yield from ("--max-position-embeddings", model.max_positions or model.sequence)
    if model.kv_heads not in (None, model.heads):
        yield from ("--group-query-attention", "--num-query-groups", model.kv_heads)
    if model.positions == "rotary":
        yield from ("--position-embedding-type", "rope")
    yield from ["--swiglu"] * (model.mlp == "swiglu")
    yield from ["--normalization", "RMSNorm"] * (model.norm == "rms")
    yield from ["--disable-bias-linear"] * (not model.bias)
    yield from ["--untie-embeddings-and-output-weights"] * (not model.tied)
    if model.experts:
        yield from ("--num-experts", model.experts, "--moe-router-topk", model.experts_per_token)


def _megatron_sharding(plan: Plan) -> list[Any]:
    if plan.replicas == 1:
        return []
    overlap = ["--overlap-grad-reduce"] * plan.overlap
    if plan.sharding == "ddp":
        return overlap
    flags = ["--use-distributed-optimizer", *overlap, *["--overlap-param-gather"] * plan.overlap]
    if plan.sharding == "zero1":
        return flags
    kind = "optim_grads" if plan.sharding == "zero2" else "optim_grads_params"
    flags += [
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy",
        kind,
        "--ckpt-format",
        "fsdp_dtensor",
    ]
    groups = plan.replicas // plan.shard
    return [*flags, "--num-distributed-optimizer-instances", groups] if plan.sharding == "hsdp" else flags


def torchtitan(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """Options of torchtitan's `torchtitan.train` (torchtitan/config/job_config.py)."""
    flavor = _FLAVORS.get(next((name for name, preset in PRESETS.items() if preset == model), ""))
    # A data parallel rank is given all micro-batches of a pipeline at once, and accumulates others.
    local = plan.micro_batch * (plan.accumulate if plan.pp > 1 else 1)
    sharded = {"ddp": 1, "hsdp": max(1, plan.shard // plan.cp)}.get(plan.sharding, plan.dp)
    whole = plan.sharding == "ddp" and plan.dp > 1
    options: dict[str, Any] = {
        "model.name": "llama3", "model.flavor": flavor or "YOURS", "training.seq_len": sequences(model)[0],
        "training.local_batch_size": local, "training.global_batch_size": plan.global_batch,
        "parallelism.data_parallel_replicate_degree": plan.dp // sharded,
        "parallelism.data_parallel_shard_degree": sharded,
    }  # fmt: skip
    if plan.sharding in ("zero1", "zero2"):
        options["parallelism.fsdp_reshard_after_forward"] = "never"
    degrees = {
        "parallelism.tensor_parallel_degree": plan.tp, "parallelism.context_parallel_degree": plan.cp,
        "parallelism.expert_parallel_degree": plan.ep, "parallelism.pipeline_parallel_degree": plan.pp,
    }  # fmt: skip
    options |= {name: degree for name, degree in degrees.items() if degree > 1}
    if plan.cp > 1:
        exchange = {"gather": "allgather", "ring": "alltoall"}[plan.cp_exchange]
        options["parallelism.context_parallel_rotate_method"] = exchange
    if plan.pp > 1:
        options |= _titan_pipeline(model, plan)
    options |= {
        "none": {"activation_checkpoint.mode": "none"},
        "selective": {"activation_checkpoint.mode": "none"},
        "operators": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
        "early": {"activation_checkpoint.mode": "full", "activation_checkpoint.early_stop": ""},
        "full": {"activation_checkpoint.mode": "full"},
    }[plan.recompute]  # fmt: skip
    options |= {"compile.enable": ""} if plan.compile != "none" else {}
    options |= {"training.mixed_precision_param": "float32"} if plan.precision == "O0" else {}
    options |= {"training.dtype": "bfloat16"} if plan.precision == "O3" else {}
    options |= {"training.enable_cpu_offload": ""} if plan.offload == "optimizer" else {}
    if plan.fp8:
        recipe = "rowwise" if plan.fp8 == "rowwise" else "tensorwise"
        options |= {
            "model.converters": "quantize.linear.float8",
            "quantize.linear.float8.recipe_name": recipe,
        }
    words = [f"--{name} {value}".rstrip() for name, value in options.items()]
    return HowTo(
        TORCHTITAN,
        " ".join([_torchrun(machine, plan), "-m torchtitan.train", *words]),
        _notes(
            (flavor is None, "register the model and its sizes as a flavor first"),
            (plan.sharding == "zero1", "shards gradients too where it shards the optimizer's states"),
            (whole and plan.tp * plan.pp > 1, "has whole replicas only where nothing else is parallel"),
            (plan.tp > 1 and not plan.sp, "always splits tokens (sp) over tensor parallel devices"),
            (plan.dtype == "fp16" and plan.precision != "O0", "has no fp16: it computes in bf16"),
            (plan.recompute == "selective", "recomputes nothing: its attention keeps no scores"),
            (plan.recompute_every != 1, "recomputes in every block"),
        ),
    )  # fmt: skip


def _titan_pipeline(model: ModelConfig, plan: Plan) -> dict[str, Any]:
    names = {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved": "Interleaved1F1B",
        "zero_bubble": "InterleavedZeroBubble",
    }
    blocks = sum(stack.depth for stack in stacks(model))
    even = blocks % (plan.pp * plan.virtual) == 0
    pieces = (
        blocks if even else blocks + 2
    )  # embedding and head count as a block each where only so it comes out even
    return {
        "parallelism.pipeline_parallel_schedule": names[plan.schedule],
        "parallelism.pipeline_parallel_microbatch_size": plan.micro_batch,
        "parallelism.pipeline_parallel_layers_per_stage": pieces // (plan.pp * plan.virtual),
        "parallelism.pipeline_parallel_first_stage_less_layers": int(not even),
        "parallelism.pipeline_parallel_last_stage_less_layers": int(not even),
    }


def deepspeed(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """The JSON of DeepSpeed's configuration (deepspeed.ai, "DeepSpeed Configuration JSON")."""
    stage = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "hsdp": 3}[plan.sharding]
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": plan.overlap}
    if plan.sharding == "hsdp":
        zero["mics_shard_size"] = plan.shard
    if plan.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    half = {"bf16": "bfloat16", "fp16": "float16"}[plan.dtype]
    types: dict[str, dict[str, Any]] = {
        "O0": {}, "O1": {"torch_autocast": {"enabled": True, "dtype": half}},
        "O2": {plan.dtype: {"enabled": True}}, "O3": {plan.dtype: {"enabled": True}},
    }  # fmt: skip
    settings: dict[str, Any] = {
        "train_batch_size": plan.global_batch, "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulate, **types[plan.precision], "zero_optimization": zero,
    }  # fmt: skip
    if plan.gradients == "fp32":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if plan.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": plan.tp}
    return HowTo(
        DEEPSPEED,
        json.dumps(settings),
        _notes(
            (plan.pp > 1, f"pipeline stages are made in code: PipelineModule(layers, num_stages={plan.pp})"),
            (plan.pp > 1 and stage > 1, "a pipeline goes with ZeRO stage 1 at most"),
            (plan.virtual > 1 or plan.schedule == "zero_bubble", f"has no schedule {plan.schedule}: it runs 1F1B"),
            (plan.cp > 1, "has no ring over a sample's tokens: sequence parallelism (Ulysses) splits heads instead"),
            (plan.recompute != "none", f"the model makes recompute={plan.recompute}: gradient_checkpointing_enable()"),
            (bool(plan.fp8), "has no fp8 of its own: use Transformer Engine's layers"),
            (plan.precision == "O3", "keeps fp32 master weights, unlike precision=O3"),
        ),
    )  # fmt: skip


def _nodes(machine: Machine, plan: Plan) -> tuple[int, int]:
    here = min(plan.gpus, machine.devices_per_node)
    return here, -(-plan.gpus // here)


def _torchrun(machine: Machine, plan: Plan) -> str:
    here, nodes = _nodes(machine, plan)
    meet = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400" if nodes > 1 else ""
    return f"torchrun --nproc-per-node {here}{meet}"


def _given(*flags: tuple[str, int], least: int) -> list[Any]:
    return [word for name, value in flags if value >= least for word in (name, value)]


def _notes(*cases: tuple[bool, str]) -> tuple[str, ...]:
    return tuple(words for applies, words in cases if applies)


def show(found: Sequence[HowTo], tell: Callable[[str], None]) -> None:
    """One line for each tool, and one for what it does not have."""
    for one in found:
        tell(f"  {one.tool}: {one.command}")
        if one.notes:
            tell(f"    {one.tool.split()[0]}: {'; '.join(one.notes)}.")
