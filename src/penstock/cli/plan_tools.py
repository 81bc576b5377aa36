"""How to run a layout: Penstock's own command, and the options of Megatron-LM and torchtitan that ask for it.

Theirs hold the degrees, the batch, the type, the sharding, the schedule and the recomputation. The line below a command
lists what else the Plan has, which is set by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config.graph import PatchInput
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, option_words
from penstock.config.plan import Plan
from penstock.config.recipes import plan_option
from penstock.config.rules import problems

MEGATRON, TORCHTITAN = "Megatron-LM core 0.19", "torchtitan 0.2.2"
"""The versions whose names these are."""
_BOTH = {
    "micro_batch", "accumulate", "dp", "tp", "sp", "pp", "cp", "ep", "virtual", "sharding", "shard", "schedule",
    "dtype",
}  # fmt: skip
"""Fields of a Plan that both tools are given."""
_MEGATRON_SCRIPTS = {
    "causal tokens": "pretrain_gpt.py", "tokens": "pretrain_bert.py", "causal tokens and tokens": "pretrain_t5.py",
}  # fmt: skip
_MEGATRON_SHARDING = {"zero2": "optim_grads", "fsdp": "optim_grads_params", "hsdp": "optim_grads_params"}
_MEGATRON_RECOMPUTE = {"full": "full", "selective": "selective"}
_TITAN_SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero_bubble": "InterleavedZeroBubble",
}  # fmt: skip
_TITAN_RECOMPUTE = {"none": "none", "operators": "selective", "full": "full"}


@dataclass(frozen=True, slots=True)
class HowTo:
    """A tool's words for a layout."""

    tool: str
    command: str
    """The command line."""
    notes: tuple[str, ...] = ()
    """Parts of the Plan or the model that the command does not set."""


def how_to_run(model: ModelConfig, machine: Machine, plan: Plan) -> list[HowTo]:
    """The commands that run `plan`: Penstock's own where it can, and those of tools for text models on GPUs."""
    ways = []
    if not problems(plan, model, machine, run=True):
        ways.append(penstock_train(model, machine, plan))
    if machine.device == "cuda" and not model.graph.inputs_of(PatchInput) and len(model.graph.heads) == 1:
        if model.graph.form in _MEGATRON_SCRIPTS:
            ways.append(megatron(model, machine, plan))
        ways.append(torchtitan(model, machine, plan))
    return ways


def penstock_train(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """`penstock train`, under its own launcher where the Plan has several ranks."""
    words = [" ".join(option_words(model)), plan_option(model, plan)]
    if plan.gpus == 1:
        return HowTo("penstock", " ".join(["penstock train", *words]))
    per_node, nodes = _nodes(machine, plan)
    rendezvous = [f"--nnodes {nodes} --rdzv HOST:29400"] if nodes > 1 else []
    words = [f"penstock launch --procs {per_node}", *rendezvous, "-- train", *words]
    return HowTo("penstock", " ".join(words))


def megatron(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """Arguments of Megatron-LM's `pretrain_*.py` (megatron/training/arguments.py)."""
    sharding = _MEGATRON_SHARDING.get(plan.sharding) if plan.replicas > 1 else None
    recompute = _MEGATRON_RECOMPUTE.get(plan.recompute)
    whole = plan.recompute == "full"
    options = {
        "tensor-model-parallel-size": _above_one(plan.tp), "pipeline-model-parallel-size": _above_one(plan.pp),
        "num-virtual-stages-per-pipeline-rank": _above_one(plan.virtual),
        "context-parallel-size": _above_one(plan.cp), "expert-model-parallel-size": _above_one(plan.ep),
        # Experts are whole here, and split there by default.
        "expert-tensor-parallel-size": 1 if plan.ep > 1 and plan.tp > 1 else None,
        "sequence-parallel": plan.sp, "micro-batch-size": plan.micro_batch, "global-batch-size": plan.global_batch,
        plan.dtype: plan.precision != "O0",
        "use-distributed-optimizer": plan.replicas > 1 and plan.sharding != "ddp",
        "use-megatron-fsdp": sharding is not None, "data-parallel-sharding-strategy": sharding,
        "ckpt-format": sharding and "fsdp_dtensor",
        "num-distributed-optimizer-instances": (
            plan.replicas // plan.shard if plan.sharding == "hsdp" else None
        ),
        "recompute-granularity": recompute, "recompute-method": "uniform" if whole else None,
        "recompute-num-layers": 1 if whole else None,
    }  # fmt: skip
    covered = {*_BOTH, *(["recompute"] if recompute else [])}
    if plan.precision in ("O0", "O2"):  # it keeps half weights and fp32 masters
        covered.add("precision")
    notes = ["the sizes of the model", *_other_fields(plan, covered)]
    if plan.schedule in ("gpipe", "zero_bubble"):
        notes.append(f"schedule={plan.schedule}, for which it runs 1F1B")
    command = _command(machine, plan, _MEGATRON_SCRIPTS[model.graph.form], options)
    return HowTo(MEGATRON, command, tuple(notes))


def torchtitan(model: ModelConfig, machine: Machine, plan: Plan) -> HowTo:
    """Options of torchtitan's `torchtitan.train` (torchtitan/config/job_config.py)."""
    sharded = {"ddp": 1, "hsdp": max(1, plan.shard // plan.cp)}.get(plan.sharding, plan.dp)
    recompute, staged = _TITAN_RECOMPUTE.get(plan.recompute), plan.pp > 1
    in_fp8 = plan.products in ("fp8", "fp8_tensorwise")
    gathers, float8 = in_fp8 and plan.gather == "products", "quantize.linear.float8"
    options = {
        "training.seq_len": model.graph.lengths[0],
        # A data parallel rank is given all micro-batches of a pipeline at once, and accumulates others.
        "training.local_batch_size": plan.micro_batch * (plan.accumulate if staged else 1),
        "training.global_batch_size": plan.global_batch,
        "parallelism.data_parallel_replicate_degree": plan.dp // sharded,
        "parallelism.data_parallel_shard_degree": sharded,
        "parallelism.fsdp_reshard_after_forward": "never" if plan.sharding in ("zero1", "zero2") else None,
        "parallelism.tensor_parallel_degree": _above_one(plan.tp),
        "parallelism.context_parallel_degree": _above_one(plan.cp),
        "parallelism.expert_parallel_degree": _above_one(plan.ep),
        "parallelism.pipeline_parallel_degree": _above_one(plan.pp),
        "parallelism.pipeline_parallel_schedule": _TITAN_SCHEDULES[plan.schedule] if staged else None,
        "parallelism.pipeline_parallel_microbatch_size": plan.micro_batch if staged else None,
        "activation_checkpoint.mode": recompute,
        "training.mixed_precision_param": "float32" if plan.precision == "O0" else None,
        "training.dtype": "bfloat16" if plan.precision == "O3" else None,
        "model.converters": float8 if in_fp8 else None, f"{float8}.filter_fqns": "output" if in_fp8 else None,
        f"{float8}.recipe_name": "rowwise" if plan.products == "fp8" else None,
        f"{float8}.enable_fsdp_float8_all_gather": gathers,
        f"{float8}.precompute_float8_dynamic_scale_for_fsdp": gathers,
    }  # fmt: skip
    covered = {
        *_BOTH,
        "precision",
        *(["recompute"] if recompute else []),
        *(["products", "gather"] if in_fp8 else []),
    }
    covered -= {"virtual"} | ({"dtype"} if plan.dtype == "fp16" else set())
    notes = ["model.name and model.flavor", *_other_fields(plan, covered)]
    if plan.sharding == "zero1":
        notes.append("sharding=zero1, for which it shards gradients too")
    if plan.tp > 1 and not plan.sp:
        notes.append("sp=false, for it always splits tokens over tensor parallel devices")
    return HowTo(TORCHTITAN, _command(machine, plan, "-m torchtitan.train", options), tuple(notes))


def _above_one(degree: int) -> int | None:
    return degree if degree > 1 else None


def _other_fields(plan: Plan, covered: set[str]) -> list[str]:
    """The fields on a Plan's line other than those in `covered`."""
    return [word for word in plan.line().split() if "=" in word and word.partition("=")[0] not in covered]


def _nodes(machine: Machine, plan: Plan) -> tuple[int, int]:
    """Devices of a node, the same number on each and whole tensor parallel groups where they fit, and nodes."""
    most = min(plan.gpus, machine.devices_per_node)
    group = plan.tp if plan.tp <= most else 1
    per_node = next(size for size in range(most - most % group, 0, -group) if plan.gpus % size == 0)
    return per_node, plan.gpus // per_node


def _command(machine: Machine, plan: Plan, program: str, options: dict[str, Any]) -> str:
    """The command with the options that have a value; True is a flag."""
    per_node, nodes = _nodes(machine, plan)
    given = {name: value for name, value in options.items() if value not in (None, False)}
    words = [f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items()]
    if nodes > 1:
        program = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 {program}"
    return " ".join([f"torchrun --nproc-per-node {per_node}", program, *words])
