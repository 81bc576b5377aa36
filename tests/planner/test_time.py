"""The roofline against arithmetic done by hand, and against what must hold whatever the constants are."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from penstock.config.machine import GemmSample, KernelSample, Machine, load_machine
from penstock.config.model import PRESETS, ViTConfig
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner import predict
from penstock.planner.constants import DEFAULT
from penstock.planner.estimate import estimate
from penstock.planner.operations import Op, Operations
from penstock.planner.prediction import parameter_tensors, predict_workload, workload
from penstock.planner.prices import Line
from penstock.planner.products import gemm_rate
from penstock.planner.rates import compute_type
from penstock.planner.time import (
    MAPPED_ALONE_BYTES,
    RETURNED_SHARE,
    Workload,
    faulted_pages,
    optimizer_traffic,
    step_parts,
    step_seconds,
)

CPU = Machine(
    name="toy", device="cpu", source="measured", peak_flops={"fp32": 100e9, "fp32_medium": 200e9, "bf16": 400e9},
    memory_bytes_per_second=10e9, memory_bytes=8e9, launch_seconds=1e-6,
)  # fmt: skip
TINY = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=4, mlp_width=128, classes=10)
ONE_GEMM = Op(name="a", kind="gemm", phase="forward", count=3, m=1000, n=1000, k=1000, read_elements=2_000_000,
              written_elements=1_000_000)  # fmt: skip
ONE_COPY = Op(name="b", kind="pointwise", phase="forward", count=2, read_elements=500, written_elements=500)


def _work(*operations: Op, parameters: int = 0, tensors: int = 0) -> Workload:
    listed = Operations.of_one_batch(operations)
    return Workload(listed=listed, samples=4, parameters=parameters, tensors=tensors, activation_bytes=0)


def test_a_product_takes_the_longer_of_computing_and_moving_on_a_gpu_and_both_on_a_cpu() -> None:
    machine = replace(CPU, achievable_flops={"fp32": 100e9})
    seconds = step_seconds(_work(ONE_GEMM), machine, Plan(optimizer="fused"))
    assert seconds["gemm"] == pytest.approx(3 * (2e9 / 100e9 + 12e6 / 10e9))
    gpu = replace(load_machine("h100"), peak_flops={"fp32": 1e12}, achievable_flops={"fp32": 1e12})
    for bandwidth in (1e8, 1e15):
        machine = replace(gpu, memory_bytes_per_second=bandwidth)
        computing = 2e9 / gemm_rate(machine, "fp32", 1000, 1000, 1000)
        seconds = step_seconds(_work(ONE_GEMM), machine, Plan(optimizer="fused"))
        assert seconds["gemm"] == pytest.approx(3 * max(computing, 12e6 / bandwidth))


MEASURED = replace(
    CPU, operator_seconds=2e-6, page_seconds=1e-4, peak_flops={"fp32": 100e9, "bf16": 400e9},
    gemm=tuple(
        GemmSample(dtype=dtype, m=m, n=n, k=k, flops_per_second=rate * faster)  # type: ignore[arg-type]
        for dtype, faster in (("fp32", 1), ("bf16", 3))
        for m, n, k, rate in ((64, 64, 64, 1e9), (512, 512, 512, 3e10), (2048, 512, 512, 6e10), (512, 4096, 64, 2e10),
                              (64, 4096, 4096, 4e10), (4096, 4096, 4096, 9e10))
    ),
    kernels=tuple(
        KernelSample(name=name, per_second=rate, tokens=tokens, features=features)
        for name, rate, tokens, features in (
            ("gelu", 1e8, 0, 0), ("softmax", 2e8, 0, 0), ("norm_backward", 3e8, 0, 0), ("bmm", 2e10, 64, 32),
            ("bmm", 4e10, 256, 64), ("attention", 3e10, 197, 64),
        )
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "machine", [CPU, MEASURED, load_machine("h100"), load_machine("a100-80g")], ids=lambda m: m.name
)
@pytest.mark.parametrize(
    "line",
    ["precision=O0 attention=plain", "precision=O1", "precision=O3 attention=flash", "compile=blocks",
     "precision=O1 attention=plain compile=blocks fp8=true",
     "precision=O1 attention=plain compile=whole layout=batch_second accumulate=3"],
)  # fmt: skip
def test_a_batch_is_priced_as_each_of_its_operations_is(machine: Machine, line: str) -> None:
    """`predict` adds up once for all batches what grows evenly; here each operation is priced as of one batch only."""
    if "fp8" in line and "fp8" not in machine.peak_flops:
        machine = replace(machine, peak_flops=machine.peak_flops | {"fp8": 2 * machine.peak_flops["bf16"]})
    for name in ("vit-digits", "vit-b16"):
        for batch in (1, 2, 5, 48, 1000):
            plan = replace(Plan.parse(line), micro_batch=batch)
            work = workload(PRESETS[name], machine, plan)
            alone = replace(work, listed=Operations.of_one_batch(work.operations))
            (parts, forward), (expected, first) = (step_parts(each, machine, plan) for each in (work, alone))
            # What compilation merges reads as much as the largest of it, be it another in a larger batch.
            assert parts == pytest.approx(expected, rel=1e-3 if plan.compile != "none" else 1e-9, abs=1e-12)
            assert forward == pytest.approx(first, rel=1e-4)
            assert work.listed.flops(batch) == alone.listed.flops(batch)


FP8 = "precision=O1 attention=flash optimizer=fused micro_batch=128"


def test_fp8_products_gain_what_their_casts_leave() -> None:
    """In wide layers, whose products outgrow what is scaled and turned; as for the same model predicted by blocks."""
    h100 = load_machine("h100")
    gains = {}
    for name in ("vit-s16", "vit-b16", "vit-h14"):
        half, eight = (Plan.parse(FP8 + more) for more in ("", " fp8=true"))
        by_operators, by_blocks = (
            [told(PRESETS[name], h100, plan).iteration_seconds for plan in (half, eight)]
            for told in (predict, estimate)
        )
        gains[name] = by_operators[0] / by_operators[1]
        assert gains[name] == pytest.approx(by_blocks[0] / by_blocks[1], rel=0.06)
    assert gains["vit-s16"] < 1.0 < gains["vit-b16"] < gains["vit-h14"]
    assert predict(PRESETS["vit-h14"], h100, eight).peak_name == "fp8"


def test_fp8_multiplies_what_the_runtime_converts() -> None:
    h100, plan = load_machine("h100"), Plan.parse(FP8)
    even = ONE_GEMM._replace(
        name="addmm", count=1, m=8192, n=8192, k=8192, read_elements=2**27, written_elements=2**26
    )
    backward = even._replace(phase="backward", k=8193)  # sums over tokens, of which any number will do
    for op, faster in ((even, True), (backward, True), (even._replace(n=8200), False), (
        even._replace(name="head"), True), (even._replace(name="stem.proj"), False),
        (even._replace(kind="conv"), False),
    ):  # fmt: skip
        half, eight = (step_seconds(_work(op), h100, one)["gemm"] for one in (plan, replace(plan, fp8=True)))
        assert (eight < 0.7 * half) is faster, op
        assert eight <= half


def test_fp8_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no rate for fp8"):
        predict(PRESETS["vit-b16"], load_machine("a100-80g"), Plan.parse(FP8 + " fp8=true"))
    with pytest.raises(ConfigError, match="replaces the bf16 products"):
        predict(PRESETS["vit-b16"], load_machine("h100"), Plan(fp8=True))


def test_measured_kernels_take_their_time_on_a_cpu_besides_what_they_move() -> None:
    kernels = (
        KernelSample(name="gelu", per_second=1e9),
        KernelSample(name="gelu_backward", per_second=5e8),
        KernelSample(name="attention", per_second=40e9, tokens=64, features=64),
        KernelSample(name="attention", per_second=20e9, tokens=16, features=32),
    )
    machine = replace(CPU, kernels=kernels)
    gelu = Op(
        name="mlp.activation",
        kind="pointwise",
        phase="forward",
        read_elements=10_000,
        written_elements=10_000,
    )
    moved = 80_000 / 10e9
    fused = Plan(optimizer="fused")
    assert step_seconds(_work(gelu), machine, fused)["pointwise"] == pytest.approx(moved + 10_000 / 1e9)
    back = step_seconds(_work(gelu._replace(phase="backward")), machine, fused)["pointwise"]
    assert back == pytest.approx(moved + 10_000 / 5e8)
    assert step_seconds(_work(gelu), CPU, fused)["pointwise"] == pytest.approx(moved)
    scores = Op(name="attention.scores", kind="bmm", phase="forward", batch=4, m=16, n=16, k=32)
    values = scores._replace(name="attention.values", n=32, k=16)
    for op in (scores, values):
        assert step_seconds(_work(op), machine, fused)["attention"] == pytest.approx(op.flops / 20e9)
    traced = scores._replace(name="attention._scaled_dot_product_flash_attention_for_cpu", k=64)
    assert step_seconds(_work(traced), machine, fused)["attention"] == pytest.approx(traced.flops / 20e9)


def test_an_operator_of_a_training_step_costs_what_was_measured_of_it() -> None:
    machine = replace(CPU, operator_seconds=20e-6)
    seconds = step_seconds(_work(ONE_COPY, tensors=3), machine, Plan(optimizer="fused", accumulate=5))
    assert seconds["launch"] == pytest.approx(5 * 2 * 20e-6 + 3 * 4 * 1e-6)


def test_pointwise_work_takes_its_traffic_and_its_launches() -> None:
    seconds = step_seconds(_work(ONE_COPY), CPU, Plan(optimizer="fused", accumulate=5))
    assert seconds["pointwise"] == pytest.approx(5 * 2 * 4000 / 10e9)
    # The fused update of no tensors launches nothing; each micro-batch launches both operations.
    assert seconds["launch"] == pytest.approx(5 * 2 * 1e-6)


def test_a_gpu_hides_launches_behind_work() -> None:
    gpu = replace(load_machine("a100-80g"), launch_seconds=1e-6)
    assert step_seconds(_work(ONE_GEMM), gpu, Plan(optimizer="fused"))["launch"] == 0.0
    launches = step_seconds(_work(*[ONE_COPY] * 100), gpu, Plan(optimizer="fused"))
    assert sum(launches.values()) == pytest.approx(202 * 1e-6)  # 200 operations, the norm and the update


def test_measured_products_decide_the_rate() -> None:
    samples = (
        GemmSample(dtype="fp32", m=64, n=64, k=64, flops_per_second=10e9),
        GemmSample(dtype="fp32", m=1024, n=1024, k=1024, flops_per_second=90e9),
    )
    machine = replace(CPU, gemm=samples)
    assert gemm_rate(machine, "fp32", 1024, 1024, 1024) == pytest.approx(90e9, rel=1e-3)
    assert gemm_rate(machine, "fp32", 64, 64, 64) == pytest.approx(10e9, rel=1e-3)
    assert gemm_rate(machine, "fp32", 256, 256, 256) == pytest.approx(50e9, rel=1e-3)  # halfway in logarithms
    assert 10e9 <= gemm_rate(machine, "fp32", 4096, 64, 512) <= 90e9


def test_without_measurement_odd_shapes_are_slower_than_round_ones() -> None:
    gpu = load_machine("h100")
    best = gpu.achievable_flops["bf16"]
    assert 0.85 * best < gemm_rate(gpu, "bf16", 8192, 8192, 8192) <= DEFAULT.gemm_share * best
    assert gemm_rate(gpu, "bf16", 8192, 129, 8192) < 0.6 * gemm_rate(gpu, "bf16", 8192, 128, 8192)
    assert gemm_rate(gpu, "bf16", 128, 128, 512) < 0.05 * best


def test_tokens_that_fill_no_line_slow_no_gradient_of_a_weight() -> None:
    """Its factors lie with the tokens from row to row: 32 images of 257 tokens are 64 · 128.5 of them."""
    gpu = load_machine("h200")
    even = gemm_rate(gpu, "bf16", 1280, 5120, 8192, over_rows=True)
    assert gemm_rate(gpu, "bf16", 1280, 5120, 8224, over_rows=True) == pytest.approx(even, rel=0.01)
    assert gemm_rate(gpu, "bf16", 1280, 5120, 8224) < 0.85 * even
    rates = [
        predict(
            PRESETS["vit-h14"], gpu, Plan.parse(f"precision=O1 attention=flash optimizer=fused micro_batch={size}")
        ).samples_per_second
        for size in (16, 32, 48, 64, 96, 128)
    ]  # fmt: skip
    assert rates == sorted(rates)
    assert rates[3] < 1.1 * rates[1]


@pytest.mark.parametrize(
    ("line", "cpu", "cuda"),
    [
        ("baseline", "fp32", "fp32"),
        ("matmul=medium", "fp32_medium", "tf32"),
        ("precision=O1", "bf16", "bf16"),
        ("precision=O3 dtype=fp16", "fp16", "fp16"),
    ],
)
def test_compute_type(line: str, cpu: str, cuda: str) -> None:
    assert compute_type(Plan.parse(line), CPU) == cpu
    assert compute_type(Plan.parse(line), load_machine("a100-80g")) == cuda


def test_optimizer_forms_move_and_launch_what_they_say() -> None:
    def traffic(form: str, device: str) -> tuple[float, int]:
        return optimizer_traffic(1_000_000, 100, Plan.parse(f"optimizer={form}"), device)

    assert traffic("loop", "cuda") == (92e6, 1200)
    assert traffic("foreach", "cuda") == (92e6, 12)
    assert traffic("foreach", "cpu") == (92e6, 1200)  # torch loops inside on a CPU
    assert traffic("fused", "cuda") == (32e6, 2)
    assert traffic("fused", "cpu") == (32e6, 400)
    assert traffic("contiguous", "cpu") == (40e6, 3)
    halved = optimizer_traffic(1_000_000, 100, Plan.parse("optimizer=fused precision=O3"), "cuda")
    assert halved[0] == 16e6
    masters = optimizer_traffic(1_000_000, 100, Plan.parse("optimizer=fused precision=O2"), "cuda")
    assert masters[0] == 32e6 + 12e6


def test_every_rung_of_precision_is_predicted_faster_on_a_gpu() -> None:
    gpu = load_machine("h100")
    lines = ("baseline", "matmul=high", "precision=O1", "precision=O1 optimizer=fused",
             "precision=O1 optimizer=fused compile=blocks", "precision=O3 optimizer=fused compile=blocks")  # fmt: skip
    speeds = [
        predict(PRESETS["vit-b16"], gpu, Plan.parse(f"{line} micro_batch=64")).samples_per_second
        for line in lines
    ]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 5 * speeds[0]


def test_a_prediction_adds_up_and_keeps_physics() -> None:
    gpu = load_machine("a100-80g")
    for line in ("baseline", "precision=O1 optimizer=fused attention=flash", "attention=plain accumulate=3"):
        p = predict(PRESETS["vit-b16"], gpu, Plan.parse(line))
        assert sum(p.seconds.values()) == pytest.approx(p.iteration_seconds)
        assert sum(p.memory.values()) == p.memory_bytes
        assert 0 < p.mfu <= p.hfu < 1
        assert p.samples_per_second == pytest.approx(8 * p.plan.accumulate / p.iteration_seconds)
        assert p.fits
    flash = predict(PRESETS["vit-b16"], gpu, Plan.parse("precision=O1 attention=flash"))
    assert flash.hfu > flash.mfu  # the scores are computed twice
    plain = predict(PRESETS["vit-b16"], gpu, Plan.parse("precision=O1 attention=plain"))
    assert plain.hfu == plain.mfu
    assert plain.memory_bytes > flash.memory_bytes


def test_fused_attention_in_half_precision_is_slow_on_a_cpu_only() -> None:
    def seconds(machine: Machine, line: str) -> float:
        return predict(PRESETS["vit-s16"], machine, Plan.parse(line)).seconds["attention"]

    assert seconds(CPU, "precision=O1") > 2 * seconds(CPU, "precision=O1 attention=plain")
    assert seconds(CPU, "precision=O1 attention=auto") == seconds(CPU, "precision=O1 attention=plain")
    assert seconds(CPU, "") < seconds(CPU, "attention=plain")
    gpu = load_machine("h100")
    assert seconds(gpu, "precision=O1") < seconds(gpu, "precision=O1 attention=plain")
    # There torch chooses a fused kernel whatever the type and the length.
    assert seconds(gpu, "precision=O1 attention=auto") == seconds(gpu, "precision=O1")
    assert seconds(gpu, "precision=O1 attention=cudnn") < seconds(gpu, "precision=O1")
    assert seconds(gpu, "precision=O1 attention=efficient") > seconds(gpu, "precision=O1")


def test_memory_tells_what_does_not_fit() -> None:
    small = replace(load_machine("v100"), memory_bytes=1e9)
    assert not predict(PRESETS["vit-h14"], small, Plan()).fits


def test_memory_of_the_moments() -> None:
    work = Workload(
        listed=Operations.of_one_batch((ONE_GEMM,)), samples=1, parameters=1000,
        tensors=4, activation_bytes=100_000, working_bytes=500
    )  # fmt: skip
    begun = predict_workload(work, CPU, Plan(optimizer="fused")).memory
    assert begun == {
        "weights": 4000, "optimizer": 8000, "gradients": 0, "activations": 100_000, "working": 500, "temporary": 0,
    }  # fmt: skip
    small = replace(work, activation_bytes=10)
    ended = predict_workload(small, CPU, Plan(optimizer="foreach")).memory
    assert ended == {
        "weights": 4000, "optimizer": 8000, "gradients": 4000, "activations": 0, "working": 0, "temporary": 4000,
    }  # fmt: skip
    flat = predict_workload(work, CPU, Plan(optimizer="contiguous")).memory
    assert flat["gradients"] == 4000  # their buffer is there throughout
    halved = predict_workload(work, CPU, Plan(optimizer="fused", precision="O3")).memory
    assert (halved["weights"], halved["optimizer"]) == (2000, 4000)
    masters = predict_workload(small, CPU, Plan(optimizer="fused", precision="O2")).memory
    assert masters == {
        "weights": 2000, "master_weights": 4000, "optimizer": 8000, "gradients": 6000, "activations": 0, "working": 0,
        "temporary": 0,
    }  # fmt: skip


def test_a_type_the_machine_lacks_is_refused_with_what_it_has() -> None:
    with pytest.raises(ConfigError, match=r"no rate for fp16.*fp32, fp32_medium, bf16"):
        predict(TINY, CPU, Plan.parse("precision=O1 dtype=fp16"))


def test_a_slower_memory_or_a_larger_batch_never_makes_a_step_shorter() -> None:
    base = predict(TINY, CPU, Plan()).iteration_seconds
    assert predict(TINY, replace(CPU, memory_bytes_per_second=5e9), Plan()).iteration_seconds > base
    assert predict(TINY, CPU, Plan(micro_batch=16)).iteration_seconds > base
    assert math.isfinite(predict(TINY, replace(CPU, memory_bytes_per_second=0.0), Plan()).iteration_seconds)


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        replace(TINY, classifier="pooled", qkv_bias=False, qk_norm=True, layer_scale=1e-5),
        replace(TINY, stem="conv"),
    ],
)
def test_parameter_tensors_are_those_of_the_module(config: ViTConfig) -> None:
    from penstock.models import create

    assert parameter_tensors(config) == len(list(create(config, device="meta").parameters()))


@pytest.mark.alone
@pytest.mark.parametrize("machine", [MEASURED, load_machine("h200")], ids=["cpu", "gpu"])
@pytest.mark.parametrize("line", ["optimizer=fused", "precision=O1 dtype=bf16 compile=blocks"])
def test_one_prediction_by_operators_is_fast(machine: Machine, line: str) -> None:
    """The promised 0.2 ms, the best of some rounds, for batches that no round before has met."""
    plan = Plan.parse(line)
    rounds = []
    for turn in range(40):
        plans = [replace(plan, micro_batch=1 + 10 * turn + i) for i in range(10)]
        begin = time.process_time()
        for one in plans:
            predict(PRESETS["vit-b16"], machine, one)
        rounds.append((time.process_time() - begin) / 10)
    assert min(rounds) < 0.2e-3


def test_predicting_needs_no_torch() -> None:
    code = (
        "import sys; from penstock.planner import predict; from penstock.config.machine import load_machine; "
        "from penstock.config.model import PRESETS; from penstock.config.plan import Plan; "
        "predict(PRESETS['vit-b16'], load_machine('h100'), Plan()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_large_results_are_mapped_anew_and_a_share_of_the_rest() -> None:
    """mallopt(3): blocks of 32 MiB and more are mapped on their own, whatever was freed before."""
    size = MAPPED_ALONE_BYTES // 4
    large = Op(name="mm", kind="gemm", phase="backward", count=2, m=1, n=1, k=1, written_elements=size)
    small = large._replace(written_elements=size - 1)
    plan = Plan(optimizer="fused", accumulate=3)
    machine = replace(CPU, page_seconds=1e-3)

    def pages(op: Op) -> float:
        return step_seconds(_work(op), machine, plan)["pages"] / 1e-3

    assert pages(large) == pytest.approx(3 * 2 * MAPPED_ALONE_BYTES / 4096)
    assert pages(small) == 0
    assert pages(large._replace(name="add_")) == 0
    growing = [(2, Line(0.0, MAPPED_ALONE_BYTES / 3))]
    assert faulted_pages(_work(), growing, plan) == pytest.approx(3 * 2 * MAPPED_ALONE_BYTES / 4096)
    assert faulted_pages(replace(_work(), samples=3), growing, plan) == 0
    work = replace(_work(parameters=1024), activation_bytes=8 * 4096)
    assert faulted_pages(work, [], plan) == pytest.approx(RETURNED_SHARE * (3 * 8 + 1))
    flat = replace(plan, optimizer="contiguous")
    assert faulted_pages(work, [], flat) == pytest.approx(RETURNED_SHARE * 3 * 8)
    assert step_seconds(work, machine, plan)["pages"] == pytest.approx(1e-3 * faulted_pages(work, [], plan))
    assert step_seconds(work, machine, replace(plan, host_memory="keep"))["pages"] == 0
