"""The words of other tools for a Plan. Their names were read in the sources of the versions that the page names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.cli.plan_tools import how_to_run, megatron, penstock_train, torchtitan
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan

H100 = load_machine("h100")
LAYOUT = Plan.parse(
    "precision=O2 optimizer=fused attention=flash compile=blocks micro_batch=2 accumulate=16 dp=8 sharding=zero1 tp=4 "
    "sp=true pp=2 schedule=interleaved virtual=4 recompute=operators"
)

MEGATRON_FLAGS = {  # megatron/training/arguments.py, and the dataclasses that it makes arguments of, core_v0.19.0
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank",
    "--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--sequence-parallel",
    "--micro-batch-size",
    "--global-batch-size", "--bf16", "--fp16", "--use-distributed-optimizer", "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy", "--ckpt-format", "--num-distributed-optimizer-instances",
    "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
}  # fmt: skip
TITAN_FLAGS = {  # torchtitan/config/job_config.py, v0.2.2
    "training": {"seq_len", "local_batch_size", "global_batch_size", "mixed_precision_param", "dtype"},
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "pipeline_parallel_degree",
        "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
    },
    "activation_checkpoint": {"mode"},
    "model": {"converters"},
    "quantize": {
        f"linear.float8.{name}" for name in (
            "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name", "filter_fqns"
        )
    },
}  # fmt: skip


def _options(command: str, tool: str) -> dict[str, str]:
    """The options after the tool's script or module, with their values."""
    words = command.split(tool, 1)[1].split()
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = ""
        else:
            found[list(found)[-1]] = word
    return found


def test_megatron() -> None:
    said = megatron(PRESETS["llama3-8b"], H100, LAYOUT)
    assert said.command.startswith("torchrun --nproc-per-node 8 --nnodes 8 ")
    options = _options(said.command, "pretrain_gpt.py")
    asked = {
        "--tensor-model-parallel-size": "4", "--pipeline-model-parallel-size": "2",
        "--num-virtual-stages-per-pipeline-rank": "4", "--sequence-parallel": "",
        "--micro-batch-size": "2", "--global-batch-size": "256", "--bf16": "", "--use-distributed-optimizer": "",
    }  # fmt: skip
    assert asked.items() <= options.items()
    assert "--use-megatron-fsdp" not in options
    assert {*said.notes} == {
        "the sizes of the model", "compile=blocks", "attention=flash", "optimizer=fused", "recompute=operators",
    }  # fmt: skip


def test_torchtitan() -> None:
    said = torchtitan(PRESETS["llama3-8b"], H100, LAYOUT)
    options = _options(said.command, "torchtitan.train")
    asked = {
        "--training.local_batch_size": "32", "--training.global_batch_size": "256",
        "--parallelism.data_parallel_shard_degree": "8", "--parallelism.tensor_parallel_degree": "4",
        "--parallelism.pipeline_parallel_degree": "2", "--parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
        "--parallelism.pipeline_parallel_microbatch_size": "2", "--activation_checkpoint.mode": "selective",
    }  # fmt: skip
    assert asked.items() <= options.items()
    assert "virtual=4" in said.notes
    grouped = replace(LAYOUT, sharding="hsdp", shard=4, cp=2, pp=1, schedule="1f1b", virtual=1)
    options = _options(torchtitan(PRESETS["llama3-8b"], H100, grouped).command, "torchtitan.train")
    # 16 replicas, of which each 4 share everything: 2 in each part of a sample's tokens, in 4 groups.
    assert options["--parallelism.data_parallel_shard_degree"] == "2"
    assert options["--parallelism.data_parallel_replicate_degree"] == "4"
    eight = replace(LAYOUT, sharding="fsdp", products="fp8_tensorwise", gather="products")
    said = torchtitan(PRESETS["llama3-8b"], H100, eight)
    gathers = "--quantize.linear.float8.enable_fsdp_float8_all_gather"
    assert "--model.converters quantize.linear.float8" in said.command
    assert gathers in said.command
    assert not {"products=fp8_tensorwise", "gather=products"} & {*said.notes}
    assert gathers not in torchtitan(PRESETS["llama3-8b"], H100, replace(eight, gather="level")).command


def test_penstock_runs_what_it_can() -> None:
    model = PRESETS["vit-l16"]
    assert isinstance(model, ViTConfig)
    plan = Plan.parse("precision=O1 dp=16 sharding=fsdp micro_batch=32")
    command = penstock_train(model, H100, plan).command
    assert (
        command
        == f'penstock launch --procs 8 --nnodes 2 --rdzv HOST:29400 -- train vit-l16 --plan "{plan.line()}"'
    )
    # Nodes are equally full, with whole tensor parallel groups.
    for line, size, nodes in (("dp=12", 6, 2), ("dp=3 tp=4", 4, 3), ("dp=2 tp=16", 8, 4)):
        command = penstock_train(model, H100, Plan.parse(line)).command
        assert f"--procs {size} --nnodes {nodes} " in command
    assert penstock_train(model, H100, Plan()).command == 'penstock train vit-l16 --plan "baseline"'
    assert [one.tool.split()[0] for one in how_to_run(model, H100, plan)] == ["penstock"]
    refused = replace(plan, precision="O2", optimizer="fused", products="fp8", tp=2)
    assert "penstock" not in [one.tool.split()[0] for one in how_to_run(model, H100, refused)]
    assert how_to_run(model, H100, replace(plan, tp=2, pp=2))[0].tool.startswith("penstock")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "O0"}, {"precision": "O1"}, {"precision": "O3"}, {"dtype": "fp16"},
        {"products": "fp8_tensorwise"}, {"products": "fp8"},
        {"products": "fp8_tensorwise", "sharding": "fsdp", "gather": "products"},
        *({"sharding": kind} for kind in ("ddp", "zero2", "fsdp")), {"sharding": "hsdp", "shard": 4},
        {"cp": 2}, {"cp": 2, "cp_exchange": "gather"}, {"ep": 2}, {"offload": "optimizer"}, {"gradients": "fp32"},
        *({"recompute": kind} for kind in ("none", "selective", "early", "full")),
        {"recompute": "full", "recompute_every": 2.0},
        {"schedule": "gpipe", "virtual": 1}, {"schedule": "zero_bubble", "virtual": 1}, {"tp_overlap": "all"},
        {"overlap": False},
        {"pp": 1, "virtual": 1, "schedule": "1f1b"}, {"tp": 1, "sp": False}, {"algorithm": "sgd"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "t5-large"])
def test_only_names_that_the_tools_have(model: str, changes: dict[str, Any]) -> None:
    plan = replace(LAYOUT, **changes)
    words = _options(megatron(PRESETS[model], H100, plan).command, ".py ")
    assert words.keys() <= MEGATRON_FLAGS
    for name in _options(torchtitan(PRESETS[model], H100, plan).command, "torchtitan.train"):
        group, _, field = name[2:].partition(".")
        assert field in TITAN_FLAGS[group], name
    assert not re.search(r"\bNone\b", f"{words}")
