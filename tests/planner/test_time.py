"""The roofline against arithmetic done by hand, and against what must hold whatever the constants are."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from helpers.pace import at_reference_pace
from penstock.config.machine import GemmSample, KernelSample, Machine, load_machine
from penstock.config.model import ViTConfig, preset
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.planner import predict
from penstock.planner.constants import DEFAULT
from penstock.planner.describe import describe
from penstock.planner.operators import Op, Workload
from penstock.planner.prediction import predict_workload
from penstock.planner.price import seconds as price
from penstock.planner.rates import product_type, rates_of
from penstock.planner.states import update_bytes, update_launches
from penstock.planner.step import MAPPED_ALONE_BYTES, RETURNED_SHARE, faulted_pages, step
from penstock.planner.traced import as_planned, recorded

CPU = Machine(
    name="toy", device="cpu", source="measured", peak_flops={"fp32": 100e9, "fp32_medium": 200e9, "bf16": 400e9},
    memory_bytes_per_second=10e9, memory_bytes=8e9, launch_seconds=1e-6,
)  # fmt: skip
TINY = ViTConfig(image_size=32, patch_size=8, width=64, depth=2, heads=4, mlp_width=128, classes=10)
ONE_GEMM = Op("a", "gemm", m=1000, n=1000, k=1000, read=8e6, written=4e6)
ONE_COPY = Op("b", "pointwise", read=2000, written=2000)


def _work(*operators: Op, parameters: int = 0, tensors: int = 0, kept: int = 0, working: int = 0) -> Workload:
    return recorded(operators, samples=4, parameters=parameters, tensors=tensors, kept=kept, working=working)


def _seconds(work: Workload, machine: Machine, plan: Plan) -> dict[str, float]:
    return step(as_planned(work, plan), rates_of(machine, plan), plan).seconds


def _rate(machine: Machine, type_: str, m: int, n: int, k: int, *, over_rows: bool = False) -> float:
    """FLOP/s of a product."""
    plan = {"fp32": Plan(), "bf16": Plan(precision="O1")}[type_]
    return 2.0 * m * n * k / rates_of(machine, plan).products.seconds(m, n, k, over_rows=over_rows)


def test_a_product_takes_the_longer_of_computing_and_moving_on_a_gpu_and_both_on_a_cpu() -> None:
    machine = replace(CPU, achievable_flops={"fp32": 100e9})
    seconds = _seconds(_work(*[ONE_GEMM] * 3), machine, Plan(optimizer="fused"))
    assert seconds["gemm"] == pytest.approx(3 * (2e9 / 100e9 + 12e6 / 10e9))
    gpu = replace(load_machine("h100"), peak_flops={"fp32": 1e12}, achievable_flops={"fp32": 1e12})
    for bandwidth in (1e8, 1e15):
        machine = replace(gpu, memory_bytes_per_second=bandwidth)
        rates = rates_of(machine, Plan())
        computing = rates.products.seconds(1000, 1000, 1000)
        expected = max(computing, 12e6 / bandwidth / DEFAULT.memory_share) + DEFAULT.kernel_seconds
        assert price(ONE_GEMM, rates) == pytest.approx(expected)


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


FP8 = "precision=O1 attention=flash optimizer=fused micro_batch=128"


def test_fp8_products_gain_what_their_casts_leave() -> None:
    """In wide layers, whose products outgrow what is scaled and turned; sooner where casts are fused."""
    h100 = load_machine("h100")
    gains = {}
    for compiled in ("", " compile=blocks"):
        for name in ("vit-s16", "vit-b16", "vit-h14"):
            half, eight = (
                predict(preset(name), h100, Plan.parse(FP8 + compiled + more)).iteration_seconds
                for more in ("", " products=fp8_tensorwise")
            )
            gains[name + compiled] = half / eight
    assert gains["vit-s16"] < 1.0 < gains["vit-b16"] < gains["vit-h14"]
    assert all(gains[name] < gains[f"{name} compile=blocks"] for name in ("vit-s16", "vit-b16", "vit-h14"))
    assert gains["vit-b16 compile=blocks"] > 1.0
    assert predict(preset("vit-h14"), h100, Plan.parse(FP8 + " products=fp8_tensorwise")).peak_name == "fp8"


def test_fp8_multiplies_what_the_runtime_converts() -> None:
    h100, plan = load_machine("h100"), Plan.parse(FP8)
    even = Op("addmm", "gemm", m=8192, n=8192, k=8192, read=2.0**29, written=2.0**28, narrow=True)
    # Sums over tokens, of which any number will do.
    backward = even._replace(forward=False, k=8193, weights=8192 * 8192)
    for op, faster in (
        (even, True), (backward, True), (even._replace(n=8200), False), (even._replace(narrow=False), False),
    ):  # fmt: skip
        half, eight = (
            _seconds(_work(op), h100, one)["gemm"] for one in (plan, replace(plan, products="fp8_tensorwise"))
        )
        assert (eight < 0.7 * half) is faster, op
        assert eight <= half
    products = {
        op.name
        for _, op in describe(preset("vit-b16"), Plan.parse(FP8 + " products=fp8_tensorwise")).operators()
        if op.narrow and op.forward
    }
    assert products == {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}


def test_measured_kernels_take_their_time_on_a_cpu_besides_what_they_move() -> None:
    kernels = (
        KernelSample(name="gelu", per_second=1e9), KernelSample(name="gelu_backward", per_second=5e8),
        KernelSample(name="dropout", per_second=2e8),
        KernelSample(name="attention", per_second=40e9, tokens=64, features=64),
        KernelSample(name="attention", per_second=20e9, tokens=16, features=32),
    )  # fmt: skip
    machine = replace(CPU, kernels=kernels)
    gelu = Op("mlp.activation", "activation", read=40_000, written=40_000, elements=10_000)
    moved = 80_000 / 10e9
    rates = rates_of(machine, Plan())
    assert price(gelu, rates) == pytest.approx(moved + 10_000 / 1e9)
    assert price(gelu._replace(forward=False), rates) == pytest.approx(moved + 10_000 / 5e8)
    assert price(gelu, rates_of(CPU, Plan())) == pytest.approx(moved)
    drawn = gelu._replace(kind="dropout")
    assert price(drawn, rates) == pytest.approx(moved + 10_000 / 2e8)
    assert price(drawn._replace(forward=False), rates) == pytest.approx(moved)  # nothing is drawn
    fused = Op("attention", "attention", batch=4, m=16, n=16, k=32, read=1e6, written=1e6)
    assert price(fused, rates) == pytest.approx(fused.flops / 20e9)
    # In other types what was measured in fp32 says nothing, and what was measured in them says all.
    half = Plan(precision="O1")
    assert price(gelu, rates_of(machine, half)) == pytest.approx(moved)
    in_bf16 = tuple(replace(one, dtype="bf16", per_second=one.per_second / 4) for one in kernels)
    machine = replace(CPU, kernels=kernels + in_bf16)
    assert price(gelu, rates_of(machine, half)) == pytest.approx(moved + 10_000 / 2.5e8)
    assert price(fused, rates_of(machine, half)) == pytest.approx(fused.flops / 5e9)
    assert price(fused, rates_of(machine, Plan())) == pytest.approx(fused.flops / 20e9)


def test_an_activation_takes_the_time_that_was_measured_of_its_function() -> None:
    """Its own, fused where the plan fuses it; GELU's where a probe did not measure it."""
    rates = {"gelu": 2e9, "gelu_backward": 1e9, "gelu_tanh": 5e8, "gelu_tanh_backward": 4e8, "silu": 3e9,
             "fused_gelu_tanh": 1.6e9, "fused_gelu_tanh_backward": 1.1e9, "sigmoid": 7e8, "sigmoid_backward": 9e9,
             "fused_silu": 1.3e9}  # fmt: skip
    measured = tuple(KernelSample(name=name, per_second=rate) for name, rate in rates.items())

    def seconds_of(model: str, line: str, *, forward: bool = True, **changes: Any) -> float:
        """Seconds of the activation in a block, less those of what it moves, for each of its elements."""
        plan = Plan.parse(line)
        (block,) = describe(replace(preset(model), **changes), plan, "cpu").blocks
        operators = block.forward if forward else block.backward
        op = next(one for one in operators if one.name == "mlp.activation")
        on_machine, without = (rates_of(replace(CPU, kernels=kernels), plan) for kernels in (measured, ()))
        return (price(op, on_machine) - price(op, without)) / op.elements

    assert seconds_of("bert-base", "") == pytest.approx(1 / rates["gelu"])
    assert seconds_of("gpt2", "") == pytest.approx(1 / rates["gelu_tanh"])
    assert seconds_of("gpt2", "", forward=False) == pytest.approx(1 / rates["gelu_tanh_backward"])
    assert seconds_of("llama-tiny", "") == pytest.approx(1 / rates["silu"])
    assert seconds_of("llama-tiny", "", forward=False) == pytest.approx(1 / rates["gelu_backward"])
    fused = "fuse=bias_activation"
    assert seconds_of("gpt2", fused) == pytest.approx(1 / rates["fused_gelu_tanh"])
    assert seconds_of("gpt2", fused, forward=False) == pytest.approx(1 / rates["fused_gelu_tanh_backward"])
    assert seconds_of("bert-base", fused) == pytest.approx(1 / rates["gelu"])
    assert seconds_of("llama-tiny", fused) == pytest.approx(1 / rates["fused_silu"])
    # A compiler makes the tanh form of exponentials, as the fused kernel does.
    assert seconds_of("gpt2", "compile=blocks") == pytest.approx(1 / rates["fused_gelu_tanh"])
    quick: dict[str, Any] = {
        "mlp": "gelu_quick"
    }  # with an exponential as SiLU has it, where it is one kernel
    assert seconds_of("gpt2", "", **quick) == pytest.approx(1 / rates["sigmoid"])
    assert seconds_of("gpt2", "", forward=False, **quick) == pytest.approx(1 / rates["sigmoid_backward"])
    assert seconds_of("gpt2", "compile=blocks", **quick) == pytest.approx(1 / rates["silu"])
    assert seconds_of("gpt2", fused, **quick) == pytest.approx(1 / rates["fused_silu"])


@pytest.mark.parametrize(("operator", "tensors"), [(0.0, 0), (20e-6, 3)])
def test_pointwise_work_takes_its_traffic_and_its_launches(operator: float, tensors: int) -> None:
    machine, plan = replace(CPU, operator_seconds=operator), Plan(optimizer="fused", accumulate=5)
    seconds = _seconds(_work(ONE_COPY, ONE_COPY, tensors=tensors), machine, plan)
    assert seconds["pointwise"] == pytest.approx(5 * 2 * 4000 / 10e9)
    # Each micro-batch launches both operators; an update takes its time even of no tensors.
    assert seconds["launch"] == pytest.approx(5 * 2 * (operator or 1e-6) + (tensors * 12 + 150) * 1e-6)


def test_a_gpu_hides_launches_behind_work() -> None:
    gpu = replace(load_machine("a100-80g"), launch_seconds=1e-6)
    assert _seconds(_work(ONE_GEMM), gpu, Plan(optimizer="fused"))["launch"] == 0.0
    slow = replace(gpu, launch_seconds=1e-4)
    launches = _seconds(_work(*[ONE_COPY] * 200), slow, Plan(optimizer="fused"))
    assert sum(launches.values()) == pytest.approx(202 * 1e-4)  # 200 operators, the norm and the update
    recorded = _seconds(_work(*[ONE_COPY] * 200), slow, Plan(optimizer="fused", compile="graphs"))
    assert sum(recorded.values()) == pytest.approx(4 * 1e-4)  # both passes, the norm and the update


def test_measured_products_decide_the_rate() -> None:
    samples = (
        GemmSample(dtype="fp32", m=64, n=64, k=64, flops_per_second=10e9),
        GemmSample(dtype="fp32", m=1024, n=1024, k=1024, flops_per_second=90e9),
    )
    machine = replace(CPU, gemm=samples)
    assert _rate(machine, "fp32", 1024, 1024, 1024) == pytest.approx(90e9, rel=1e-3)
    assert _rate(machine, "fp32", 64, 64, 64) == pytest.approx(10e9, rel=1e-3)
    assert _rate(machine, "fp32", 256, 256, 256) == pytest.approx(50e9, rel=1e-3)  # halfway in logarithms
    assert 10e9 <= _rate(machine, "fp32", 4096, 64, 512) <= 90e9


def test_gradients_run_at_the_rate_measured_of_their_form() -> None:
    """A CPU without units for a type can be ten times slower where the factors lie the other way round."""
    rates = {"forward": 80e9, "input": 10e9, "weight": 20e9}
    samples = tuple(
        GemmSample(dtype="fp32", m=64, n=64, k=64, flops_per_second=rate, form=form)  # type: ignore[arg-type]
        for form, rate in rates.items()
    )
    known = rates_of(replace(CPU, gemm=samples), Plan())
    forward = Op("mlp.up", "gemm", m=64, n=64, k=64, weights=4096)
    gradients = forward._replace(forward=False, weights=0), forward._replace(forward=False)
    for op, rate in zip((forward, *gradients), rates.values()):
        assert price(op, known) == pytest.approx(op.flops / rate)
    # Where gradients were not measured, they are as fast as the forward pass.
    assert price(gradients[0], rates_of(replace(CPU, gemm=samples[:1]), Plan())) == pytest.approx(
        forward.flops / 80e9
    )


def test_a_gpu_runs_at_what_it_was_measured_to_sustain() -> None:
    h100 = load_machine("h100")
    loaded = replace(h100, sustained_share=0.5 * DEFAULT.gemm_share_hopper)
    sample = GemmSample(dtype="bf16", m=8192, n=8192, k=8192, flops_per_second=700e12)
    for machine in (h100, replace(h100, gemm=(sample,))):
        calibrated, measured = (
            _rate(replace(machine, sustained_share=share), "bf16", 8192, 8192, 8192)
            for share in (0.0, loaded.sustained_share)
        )
        assert measured == pytest.approx(0.5 * calibrated, rel=0.01)


def test_without_measurement_odd_shapes_are_slower_than_round_ones() -> None:
    gpu = load_machine("h100")
    best = gpu.achievable_flops["bf16"]
    assert 0.7 * best < _rate(gpu, "bf16", 8192, 8192, 8192) <= DEFAULT.gemm_share_hopper * best
    assert _rate(gpu, "bf16", 8192, 129, 8192) < 0.6 * _rate(gpu, "bf16", 8192, 128, 8192)
    assert _rate(gpu, "bf16", 128, 128, 512) < 0.05 * best


def test_tokens_that_fill_no_line_slow_no_gradient_of_a_weight() -> None:
    """Its factors lie with the tokens from row to row: 32 images of 257 tokens are 64 · 128.5 of them."""
    gpu = load_machine("h200")
    even = _rate(gpu, "bf16", 1280, 5120, 8192, over_rows=True)
    assert _rate(gpu, "bf16", 1280, 5120, 8224, over_rows=True) == pytest.approx(even, rel=0.01)
    assert _rate(gpu, "bf16", 1280, 5120, 8224) < 0.85 * even
    line = "precision=O1 attention=flash optimizer=fused micro_batch"
    plans = [Plan.parse(f"{line}={size}") for size in (16, 32, 48, 64, 96, 128)]
    rates = [predict(preset("vit-h14"), gpu, plan).samples_per_second for plan in plans]
    assert rates == sorted(rates)
    # 1.103 times as fast in images per second: the update is shared by more images.
    assert rates[3] < 1.105 * rates[1]


@pytest.mark.parametrize(
    ("line", "cpu", "cuda"),
    [
        ("baseline", "fp32", "fp32"),
        ("matmul=medium", "fp32_medium", "tf32"),
        ("precision=O1", "bf16", "bf16"),
        ("precision=O3 dtype=fp16", "fp16", "fp16"),
    ],
)
def test_products_run_in_the_type_of_the_plan(line: str, cpu: str, cuda: str) -> None:
    for machine, expected in ((CPU, cpu), (load_machine("a100-80g"), cuda)):
        assert product_type(numerics_of(Plan.parse(line)), machine) == expected


def test_optimizer_forms_move_and_launch_what_they_say() -> None:
    def traffic(form: str, *, cpu: bool) -> tuple[float, int]:
        plan = Plan.parse(f"optimizer={form}")
        return update_bytes(plan), update_launches(1_000_000, 100, plan, cpu=cpu)

    assert traffic("loop", cpu=False) == (92, 1200)
    assert traffic("foreach", cpu=False) == (92, 12)
    assert traffic("foreach", cpu=True) == (92, 2350)  # torch loops inside on a CPU
    assert traffic("fused", cpu=False) == (32, 2)
    assert traffic("fused", cpu=True) == (32, 1350)
    assert traffic("contiguous", cpu=False) == (40, 3)
    assert traffic("contiguous", cpu=True) == (40, 650)
    assert update_bytes(Plan.parse("optimizer=fused precision=O3")) == 16
    # A gradient in half becomes one in fp32 (6), and the new weight one in half (6).
    assert update_bytes(Plan.parse("optimizer=fused precision=O2")) == 32 + 12


def test_every_rung_of_precision_is_predicted_faster_on_a_gpu() -> None:
    gpu = load_machine("h100")
    lines = ("baseline", "matmul=high", "precision=O1", "precision=O1 optimizer=fused",
             "precision=O1 optimizer=fused compile=blocks", "precision=O3 optimizer=fused compile=blocks")  # fmt: skip
    speeds = [
        predict(preset("vit-b16"), gpu, Plan.parse(f"{line} micro_batch=64")).samples_per_second
        for line in lines
    ]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 5 * speeds[0]


def test_scores_that_a_kernel_computes_twice_count_as_hardware_flops() -> None:
    gpu = load_machine("a100-80g")
    several = predict(preset("vit-b16"), gpu, Plan.parse("accumulate=3"))
    assert several.samples_per_second == pytest.approx(8 * 3 / several.iteration_seconds)
    flash = predict(preset("vit-b16"), gpu, Plan.parse("precision=O1 attention=flash"))
    assert flash.hfu > flash.mfu  # the scores are computed twice
    plain = predict(preset("vit-b16"), gpu, Plan.parse("precision=O1 attention=plain"))
    assert plain.hfu == plain.mfu
    assert plain.memory_bytes > flash.memory_bytes


def test_fused_attention_in_half_precision_is_slow_on_a_cpu_only() -> None:
    def seconds(machine: Machine, line: str) -> float:
        return predict(preset("vit-s16"), machine, Plan.parse(line)).seconds["attention"]

    assert seconds(CPU, "precision=O1") > 2 * seconds(CPU, "precision=O1 attention=plain")
    assert seconds(CPU, "precision=O1 attention=auto") == seconds(CPU, "precision=O1 attention=plain")
    assert seconds(CPU, "") < seconds(CPU, "attention=plain")
    gpu = load_machine("h100")
    assert seconds(gpu, "precision=O1") < seconds(gpu, "precision=O1 attention=plain")
    # There torch chooses a fused kernel whatever the type and the length.
    assert seconds(gpu, "precision=O1 attention=auto") == seconds(gpu, "precision=O1")
    assert seconds(gpu, "precision=O1 attention=cudnn") < seconds(gpu, "precision=O1")
    assert seconds(gpu, "precision=O1 attention=efficient") > seconds(gpu, "precision=O1")


def test_memory_of_the_moments() -> None:
    def said(work: Workload, line: str) -> dict[str, int]:
        return {
            name: size for name, size in predict_workload(work, CPU, Plan.parse(line)).memory.items() if size
        }

    work = _work(ONE_GEMM, parameters=1000, tensors=4, kept=100_000, working=500)
    assert said(work, "optimizer=fused") == {
        "weights": 4000, "optimizer": 8000, "activations": 100_000, "working": 500
    }  # fmt: skip
    small = _work(ONE_GEMM, parameters=1000, tensors=4, kept=10)
    assert said(small, "optimizer=foreach") == {
        "weights": 4000, "optimizer": 8000, "gradients": 4000, "temporary": 4000
    }  # fmt: skip
    assert said(work, "optimizer=contiguous")["gradients"] == 4000  # their buffer is there throughout
    halved = said(work, "optimizer=fused precision=O3")
    assert (halved["weights"], halved["optimizer"], halved["activations"]) == (2000, 4000, 50_000)
    # The gradients in fp32 for the master weights are there once, beside those in half.
    assert said(small, "optimizer=fused precision=O2") == {
        "weights": 2000, "master_weights": 4000, "optimizer": 8000, "gradients": 2000, "temporary": 4000,
    }  # fmt: skip


def test_a_type_the_machine_lacks_is_refused_with_every_other_reason() -> None:
    with pytest.raises(
        ConfigError, match=r"dtype=fp16 cannot be computed(.|\n)*attention=cudnn exists on GPUs only"
    ):
        predict(TINY, CPU, Plan.parse("precision=O1 dtype=fp16 attention=cudnn"))
    half_only = replace(CPU, peak_flops={"bf16": 1e12}, gemm=())
    with pytest.raises(ConfigError, match=r"computes in fp32, and machine .* has rates for bf16 only"):
        predict(TINY, half_only, Plan())


def test_without_products_measured_as_the_forward_pass_has_them_the_best_rate_stands() -> None:
    gradient = GemmSample(dtype="fp32", m=64, n=64, k=64, flops_per_second=1e9, form="weight")
    assert math.isfinite(predict(TINY, replace(CPU, gemm=(gradient,)), Plan()).iteration_seconds)


def test_rows_of_outputs_that_begin_inside_of_a_vector_take_as_much_longer_as_was_measured() -> None:
    even = GemmSample(dtype="fp32", m=64, n=64, k=64, flops_per_second=1e9)
    odd = GemmSample(dtype="fp32", m=64, n=65, k=64, flops_per_second=0.5e9, form="ragged")
    plain = replace(CPU, gemm=(even,), peak_flops={"fp32": 1e9}, achievable_flops={"fp32": 1e9})
    known = replace(plain, gemm=(even, odd))
    for classes, longer in (
        (1000, 0.0),
        (1001, 2.0 * TINY.width * 1001 / 1e9),
    ):  # of one pooled row of features
        config = replace(TINY, classes=classes)
        seconds = [predict(config, machine, Plan()).iteration_seconds for machine in (plain, known)]
        assert seconds[1] - seconds[0] == pytest.approx(longer * Plan().micro_batch, rel=1e-6, abs=1e-12)


def test_products_of_a_vocabulary_take_as_much_longer_as_was_measured() -> None:
    even = [
        GemmSample(dtype="fp32", m=64, n=64, k=64, flops_per_second=1e9, form=form)  # type: ignore[arg-type]
        for form in ("forward", "input", "weight")
    ]
    shares = {"vocabulary": 0.5, "vocabulary_input": 0.25, "vocabulary_weight": 0.8}
    slow = [
        GemmSample(dtype="fp32", m=64, n=32001, k=64, flops_per_second=share * 1e9, form=form)  # type: ignore[arg-type]
        for form, share in shares.items()
    ]
    plain = replace(CPU, gemm=tuple(even), peak_flops={"fp32": 1e9}, achievable_flops={"fp32": 1e9})
    plain = replace(plain, memory_bytes_per_second=0.0)  # reading the weight is in the measured rate
    for classes in (1000, 16384):
        config = replace(TINY, classes=classes)
        for some in (slow[:1], slow[1:2], slow[2:]):
            known = replace(plain, gemm=(*even, *some))
            before, after = (predict(config, machine, Plan()).iteration_seconds for machine in (plain, known))
            each = 2.0 * TINY.width * classes * Plan().micro_batch / 1e9
            longer = each * (1e9 / some[0].flops_per_second - 1.0) if classes >= 16384 else 0.0
            assert after - before == pytest.approx(longer, rel=1e-6, abs=1e-12), (classes, some[0].form)


@pytest.mark.alone
@pytest.mark.parametrize("machine", [MEASURED, load_machine("h200")], ids=["cpu", "gpu"])
@pytest.mark.parametrize("line", ["optimizer=fused", "precision=O1 dtype=bf16 compile=blocks"])
def test_one_prediction_is_fast(machine: Machine, line: str) -> None:
    """At the pace of the reference machine the promised 0.2 ms where operators are listed already; 3 ms where not."""
    plan = Plan.parse(line)
    for many, bound in ((False, 0.2e-3), (True, 3e-3)):

        def seconds(turn: int, many: bool = many) -> float:
            plans = [
                replace(plan, micro_batch=1 + 10 * turn + i if many else 8, accumulate=1 + 10 * turn + i)
                for i in range(10)
            ]
            begin = time.process_time()
            for one in plans:
                predict(preset("vit-b16"), machine, one)
            return (time.process_time() - begin) / 10

        assert at_reference_pace(seconds, rounds=20) < bound, many


def test_large_results_are_mapped_anew_and_a_share_of_the_rest() -> None:
    """mallopt(3): blocks of 32 MiB and more are mapped on their own, whatever was freed before."""
    large = Op("mm", "gemm", forward=False, m=1, n=1, k=1, written=float(MAPPED_ALONE_BYTES))
    small = large._replace(written=MAPPED_ALONE_BYTES - 1.0)
    plan = Plan(optimizer="fused", accumulate=3)

    def pages(*ops: Op) -> float:
        return faulted_pages(_work(*ops), plan)

    assert pages(large, large) == pytest.approx(3 * 2 * MAPPED_ALONE_BYTES / 4096)
    assert pages(small) == 0
    assert pages(large._replace(in_place=True)) == 0
    pages_kept = 8 << 12
    work = _work(parameters=1024, kept=pages_kept * 4096)
    assert faulted_pages(work, plan) == pytest.approx(RETURNED_SHARE * (3 * pages_kept + 1))
    flat = replace(plan, optimizer="contiguous")
    assert faulted_pages(work, flat) == pytest.approx(RETURNED_SHARE * 3 * pages_kept)
    assert faulted_pages(_work(kept=(64 << 20) // 3), plan) == 0, (
        "the end of the heap stays below the threshold"
    )
    assert faulted_pages(_work(kept=(72 << 20) // 3), plan) == pytest.approx((8 << 20) / 4096)
    machine = replace(CPU, page_seconds=1e-3)
    assert _seconds(work, machine, plan)["pages"] == pytest.approx(1e-3 * faulted_pages(work, plan))
    assert _seconds(work, machine, replace(plan, host_memory="keep"))["pages"] == 0
