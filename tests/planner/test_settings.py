"""What each setting of a Plan does to the prediction: at least the direction, and the arithmetic where it is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.machine import KernelSample, Machine, load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.planner import predict, search
from penstock.planner.describe import describe
from penstock.planner.pipeline import in_flight
from penstock.planner.prediction import Prediction

A100, H100 = load_machine("a100-80g"), load_machine("h100")
GPT = PRESETS["gpt-22b"]
BASE = Plan(
    precision="O2", optimizer="fused", compile="blocks", attention="flash", tp=8, sp=True, dp=8, accumulate=8,
    sharding="zero1",
)  # fmt: skip


def at(**changes: object) -> Prediction:
    return predict(GPT, A100, replace(BASE, **changes))  # type: ignore[arg-type]


def test_states_are_shared_out_step_by_step() -> None:
    """Bytes per weight of the device that holds a stage: half weights beside fp32 masters, until the shards of the
    weights are the masters."""
    held = at(sharding="ddp").memory["weights"] / 2
    for sharding, sizes in (
        ("ddp", (2, 4, 8, 2)), ("zero1", (2, 4 / 8, 8 / 8, 4)), ("zero2", (2, 4 / 8, 8 / 8, 4 / 8)),
        ("fsdp", (4 / 8, 0, 8 / 8, 4 / 8)), ("hsdp", (4 / 4, 0, 8 / 4, 4 / 4)),
    ):  # fmt: skip
        for precision in ("O2",) if sharding == "ddp" else ("O1", "O2"):
            one = at(precision=precision, sharding=sharding, shard=4 if sharding == "hsdp" else 1)
            found = [
                one.memory[name] / held for name in ("weights", "master_weights", "optimizer", "gradients")
            ]
            assert found == pytest.approx(sizes, rel=1e-6), (sharding, precision)


def test_autocast_keeps_a_copy_of_weights_that_are_not_shared_out() -> None:
    whole, shards = at(precision="O1", sharding="ddp"), at(precision="O1", sharding="fsdp")
    products = sum(
        count * op.n * op.k
        for count, op in describe(GPT, BASE).operators()
        if op.kind == "gemm" and op.forward and op.name != "head"
    )
    assert whole.activations["cast_weights"] == pytest.approx(2 * products)
    assert "cast_weights" not in shards.activations
    assert shards.memory["gathered_weights"] == at(sharding="fsdp").memory["gathered_weights"]


def test_bytes_per_parameter_are_sixteen_and_what_else_is_asked_for() -> None:
    """Weights and gradients in half, master weights and two moments in fp32: 2 + 2 + 12."""
    # Gradients stay from one micro-batch to the next.
    plan = Plan(precision="O2", optimizer="fused", attention="flash", accumulate=2)
    for changes, size in (
        ({}, 16.0), ({"gradients": "fp32"}, 18.0), ({"algorithm": "sgd"}, 12.0),
        ({"precision": "O3"}, 8.0), ({"precision": "O1"}, 16.0),
    ):  # fmt: skip
        one = predict(GPT, A100, replace(plan, **changes))  # type: ignore[arg-type]
        states = sum(one.memory[name] for name in ("weights", "gradients", "optimizer", "master_weights"))
        assert states / one.parameters == pytest.approx(size, rel=1e-5), changes


def test_recomputation_trades_time_for_memory() -> None:
    kinds = ("none", "elementwise", "operators", "early", "full")
    found = [at(recompute=kind, micro_batch=4) for kind in kinds]
    seconds = [one.iteration_seconds for one in found]
    assert seconds == sorted(seconds)
    kept = [one.memory["activations"] for one in found]
    assert kept == sorted(kept, reverse=True)
    half = at(recompute="full", recompute_every=2, micro_batch=4)
    assert found[0].iteration_seconds < half.iteration_seconds < found[-1].iteration_seconds


def test_sequence_parallelism_costs_no_time_and_saves_memory() -> None:
    with_, without = at(micro_batch=4), at(micro_batch=4, sp=False)
    assert with_.memory["activations"] < without.memory["activations"]
    assert with_.seconds["pointwise"] < without.seconds["pointwise"]


def test_activations_by_kind_are_all_of_them() -> None:
    for changes in (
        {}, {"recompute": "full", "recompute_every": 2}, {"recompute": "full"}, {"attention": "plain"},
        {"tp": 2, "pp": 4, "dp": 1, "sharding": "ddp", "sp": False},
    ):  # fmt: skip
        one = at(**changes)
        assert sum(one.activations.values()) == pytest.approx(one.memory["activations"], rel=1e-6), changes
    assert set(at(recompute="full").activations) == {"checkpoints", "masks"}  # of the embeddings' dropout
    assert at(attention="plain").activations["scores"] > at().memory["activations"] / 4
    assert "scores" not in at().activations
    assert at(tp=2, pp=4, dp=1, sharding="ddp", sp=False).micro_batches_held == 4
    vit = predict(PRESETS["vit-b16"], A100, Plan(micro_batch=64))
    assert sum(vit.activations.values()) == vit.memory["activations"]


def test_fused_attention_keeps_no_scores() -> None:
    assert at(attention="plain").memory["activations"] > 1.5 * at().memory["activations"]
    assert at(attention="plain").seconds["attention"] > at().seconds["attention"]


def test_what_is_not_hidden_is_paid_for() -> None:
    assert at(overlap=False).seconds["data"] > at().seconds["data"]
    exposed = [at(tp_overlap=kind).seconds["tensor"] for kind in ("none", "weights", "all")]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 1.3 * exposed[1] > 1.3 * exposed[2]


def test_fp8_halves_the_products_and_not_the_rest() -> None:
    plain = predict(GPT, H100, BASE)
    fp8 = predict(GPT, H100, replace(BASE, products="fp8_tensorwise"))
    assert fp8.peak_flops == 2 * plain.peak_flops or fp8.peak_flops == pytest.approx(1979e12)
    assert 0.45 < fp8.seconds["gemm"] / plain.seconds["gemm"] < 0.75
    assert fp8.seconds["attention"] == pytest.approx(plain.seconds["attention"])


def test_compilation_merges_memory_bound_operators() -> None:
    assert at(compile="none").seconds["pointwise"] > at().seconds["pointwise"]
    assert at(compile="whole").seconds["output"] < at().seconds["output"]


def test_offload_frees_the_device_and_costs_time() -> None:
    here, there = at(), at(offload="optimizer")
    assert there.memory["optimizer"] == there.memory["master_weights"] == 0
    assert there.iteration_seconds > here.iteration_seconds
    assert at(offload="activations").memory["activations"] < here.memory["activations"]


def test_schedules_keep_what_they_keep() -> None:
    plan = Plan(pp=4, accumulate=16)
    assert in_flight(replace(plan, schedule="gpipe")) == 16
    assert in_flight(plan) == in_flight(replace(plan, schedule="zero_bubble")) == 4


def test_context_parallelism_splits_tokens() -> None:
    model = replace(PRESETS["llama3-8b"], sequence=131072)
    plan = Plan(precision="O1", sharding="fsdp", attention="flash", compile="blocks", recompute="full", dp=8)
    whole = predict(model, H100, plan)
    split = predict(model, H100, replace(plan, dp=1, cp=8))
    assert split.memory["activations"] == pytest.approx(whole.memory["activations"] / 8, rel=0.01)
    assert split.gpus == whole.gpus
    best = search(model, H100, 16, global_batch=4)[0]
    assert best.plan.cp > 1


def test_every_family_is_predicted() -> None:
    plan = Plan(precision="O1", optimizer="fused", attention="sdpa")
    for model in (
        PRESETS["bert-base"], PRESETS["t5-base"], PRESETS["mixtral-8x7b"], PRESETS["gpt2"],
        PRESETS["vit-b16"],
    ):  # fmt: skip
        for changes in ({}, {"dp": 2, "sharding": "fsdp"}):
            one = predict(model, H100, replace(plan, **changes))  # type: ignore[arg-type]
            assert 0.002 < one.mfu < 0.9
            assert one.memory_bytes > 4 * one.parameters


def test_one_device_and_several_agree_on_a_vision_model() -> None:
    """The operator by operator prediction of one device, and the layouts' prediction of the same."""
    plan = Plan(precision="O3", optimizer="fused", attention="flash", micro_batch=64)
    one = predict(PRESETS["vit-l16"], A100, plan)
    layouts = predict(PRESETS["vit-l16"], A100, replace(plan, sharding="zero1"))
    assert layouts.iteration_seconds == pytest.approx(one.iteration_seconds, rel=0.25)
    assert layouts.parameters == one.parameters


def test_operators_and_layouts_predict_a_cpu_alike() -> None:
    kernels = [
        *(KernelSample(name=name, per_second=rate) for name, rate in (
            ("gelu", 1.1e9), ("gelu_backward", 8e8), ("norm", 2e9), ("norm_backward", 2e9), ("softmax", 7e8),
        )),
        KernelSample(name="attention", per_second=5e10, tokens=197, features=64),
        KernelSample(name="attention_backward", per_second=4.5e10, tokens=197, features=64),
    ]  # fmt: skip
    cpu = Machine(
        name="desk", device="cpu", source="measured", peak_flops={"fp32": 9e10}, memory_bytes=16e9,
        memory_bytes_per_second=2e10, launch_seconds=3e-6, operator_seconds=23e-6, kernels=tuple(kernels),
    )  # fmt: skip
    for name, line in (
        ("vit-s16", "micro_batch=4"),
        ("vit-b16", "micro_batch=1"),
        ("vit-digits", "micro_batch=8"),
    ):
        plan = Plan.parse(f"{line} optimizer=fused host_memory=keep")
        alone = predict(PRESETS[name], cpu, plan)
        layout = predict(PRESETS[name], cpu, replace(plan, sharding="zero1"))
        assert layout.iteration_seconds == pytest.approx(alone.iteration_seconds, rel=0.08), name


def test_a_cpu_is_predicted_by_what_was_measured() -> None:
    cpu = Machine(
        name="laptop", device="cpu", source="measured", peak_flops={"fp32": 2e11}, memory_bytes=16e9,
        memory_bytes_per_second=2e10, launch_seconds=5e-6,
    )  # fmt: skip
    one = predict(PRESETS["gpt2"], cpu, Plan(micro_batch=1))
    least = 3 * 1024 * 2 * 124e6 / 2e11
    assert least < one.iteration_seconds < 4 * least
