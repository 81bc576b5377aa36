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
    degrees = {
        "tensor-model-parallel-size": plan.tp, "pipeline-model-parallel-size": plan.pp,
        "num-virtual-stages-per-pipeline-rank": plan.virtual, "context-parallel-size": plan.cp,
        "expert-model-parallel-size": plan.ep,
    }  # fmt: skip
    options: dict[str, Any] = {name: degree for name, degree in degrees.items() if degree > 1}
    if plan.ep > 1 and plan.tp > 1:
        options["expert-tensor-parallel-size"] = 1  # experts are whole here, and split there by default
    options |= {"sequence-parallel": ""} if plan.sp else {}
    options |= {"micro-batch-size": plan.micro_batch, "global-batch-size": plan.global_batch}
    options |= {} if plan.precision == "O0" else {plan.dtype: ""}
    if plan.replicas > 1 and plan.sharding != "ddp":
        options["use-distributed-optimizer"] = ""
    if plan.replicas > 1 and plan.sharding in _MEGATRON_SHARDING:
        options |= {
            "use-megatron-fsdp": "", "data-parallel-sharding-strategy": _MEGATRON_SHARDING[plan.sharding],
            "ckpt-format": "fsdp_dtensor",
        }  # fmt: skip
    if plan.sharding == "hsdp":
        options["num-distributed-optimizer-instances"] = plan.replicas // plan.shard
    if plan.recompute in _MEGATRON_RECOMPUTE:
        options["recompute-granularity"] = _MEGATRON_RECOMPUTE[plan.recompute]
    if plan.recompute == "full":
        options |= {"recompute-method": "uniform", "recompute-num-layers": 1}
    covered = {*_BOTH, *(["recompute"] if plan.recompute in _MEGATRON_RECOMPUTE else [])}
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
    options: dict[str, Any] = {
        "training.seq_len": model.graph.lengths[0],
        # A data parallel rank is given all micro-batches of a pipeline at once, and accumulates others.
        "training.local_batch_size": plan.micro_batch * (plan.accumulate if plan.pp > 1 else 1),
        "training.global_batch_size": plan.global_batch,
        "parallelism.data_parallel_replicate_degree": plan.dp // sharded,
        "parallelism.data_parallel_shard_degree": sharded,
    }  # fmt: skip
    if plan.sharding in ("zero1", "zero2"):
        options["parallelism.fsdp_reshard_after_forward"] = "never"
    degrees = {"tensor": plan.tp, "context": plan.cp, "expert": plan.ep, "pipeline": plan.pp}
    options |= {f"parallelism.{name}_parallel_degree": n for name, n in degrees.items() if n > 1}
    if plan.pp > 1:
        options["parallelism.pipeline_parallel_schedule"] = _TITAN_SCHEDULES[plan.schedule]
        options["parallelism.pipeline_parallel_microbatch_size"] = plan.micro_batch
    if plan.recompute in _TITAN_RECOMPUTE:
        options["activation_checkpoint.mode"] = _TITAN_RECOMPUTE[plan.recompute]
    options |= {"training.mixed_precision_param": "float32"} if plan.precision == "O0" else {}
    options |= {"training.dtype": "bfloat16"} if plan.precision == "O3" else {}
    covered = {*_BOTH, "precision", *(["recompute"] if plan.recompute in _TITAN_RECOMPUTE else [])}
    covered -= {"virtual"} | ({"dtype"} if plan.dtype == "fp16" else set())
    if plan.products in ("fp8", "fp8_tensorwise"):
        float8 = "quantize.linear.float8"
        options |= {"model.converters": float8, f"{float8}.filter_fqns": "output"}
        options |= {f"{float8}.recipe_name": "rowwise"} if plan.products == "fp8" else {}
        for name in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"):
            options |= {f"{float8}.{name}": ""} if plan.gather == "products" else {}
        covered |= {"products", "gather"}
    notes = ["model.name and model.flavor", *_other_fields(plan, covered)]
    if plan.sharding == "zero1":
        notes.append("sharding=zero1, for which it shards gradients too")
    if plan.tp > 1 and not plan.sp:
        notes.append("sp=false, for it always splits tokens over tensor parallel devices")
    return HowTo(TORCHTITAN, _command(machine, plan, "-m torchtitan.train", options), tuple(notes))


def _other_fields(plan: Plan, covered: set[str]) -> list[str]:
    """The fields on a Plan's line other than those in `covered`."""
    return [word for word in plan.line().split() if "=" in word and word.partition("=")[0] not in covered]


def _nodes(machine: Machine, plan: Plan) -> tuple[int, int]:
    per_node = min(plan.gpus, machine.devices_per_node)
    return per_node, -(-plan.gpus // per_node)


def _command(machine: Machine, plan: Plan, program: str, options: dict[str, Any]) -> str:
    per_node, nodes = _nodes(machine, plan)
    words = [f"--{name} {value}".rstrip() for name, value in options.items()]
    if nodes > 1:
        program = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 {program}"
    return " ".join([f"torchrun --nproc-per-node {per_node}", program, *words])
