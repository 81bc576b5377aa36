"""What steps take of what their operators cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.machine import load_machine
from penstock.config.model import DecoderConfig, ModelConfig, preset
from penstock.config.plan import Plan
from penstock.planner.describe import describe
from penstock.planner.operators import BIASED, Op, Software
from penstock.planner.prediction import Prediction, predict, stage_costs
from penstock.planner.price import fused_seconds, gather_seconds, group_of, reduce_seconds
from penstock.planner.rates import Rates, rates_of
from penstock.planner.step import PartTime, layout_of, part_time, step
from penstock.planner.traffic import BUCKET_BYTES
from penstock.schedules import schedule_of, simulate


def test_a_bias_of_distances_is_written_and_read_where_scores_are_kept() -> None:
    bloom = preset("bloom-176b")
    assert isinstance(bloom, DecoderConfig)
    plan = Plan.parse("precision=O2 attention=plain tp=4 micro_batch=2")
    rates = rates_of(load_machine("a100-80g"), plan)

    def block(model: ModelConfig) -> PartTime:
        (one,) = describe(model, plan).blocks
        return part_time(one, rates, layout_of(plan))

    biased, plain = block(bloom), block(replace(bloom, positions="learned"))
    scores = 2 * bloom.heads / 4 * bloom.sequence**2
    more = biased.forward.attention - plain.forward.attention
    assert more == pytest.approx(4 * scores / rates.memory + rates.kernel_seconds, abs=1e-9)
    assert biased.backward.attention == pytest.approx(plain.backward.attention)


def test_biases_and_fp32_go_through_the_memory_efficient_kernel_of_a_gpu() -> None:
    """Of torch's fused kernels it alone takes numbers to add to the scores, and fp32, as three products in TF32."""
    t5, h100 = preset("t5-small"), load_machine("h100")

    def kernels(line: str) -> tuple[list[Op], Rates]:
        plan = Plan.parse(f"optimizer=fused micro_batch=8 {line}")
        ops = [op for block in describe(t5, plan).blocks for op in (*block.forward, *block.backward)]
        return [op for op in ops if op.kind == "attention"], rates_of(h100, plan)

    ops, rates = kernels("precision=O1 attention=flash")
    efficient = kernels("precision=O1 attention=efficient")[1]
    biased = [op.function == BIASED for op in ops]
    assert biased == [True, True, True, False, False, True], "all but cross attention"
    for op in ops:
        assert not op.causal
        slower = fused_seconds(op, rates) / fused_seconds(op._replace(function=""), rates)
        assert (slower > 1.3) == (op.function == BIASED and not op.forward)
        if op.function:
            assert fused_seconds(op, rates) == fused_seconds(op._replace(function=""), efficient)
    for line in ("matmul=high", "matmul=highest"):
        (ahead, behind, *_), exact = kernels(line)
        products = 4 * ahead.batch * ahead.m * ahead.n * ahead.k
        spent = fused_seconds(ahead, exact), fused_seconds(behind, exact)
        assert products / spent[0] < 495e12 / 3, "three products in TF32, of an H100"
        assert spent[1] / spent[0] == pytest.approx(exact.constants.fused_backward, rel=0.15)


def test_nothing_waits_between_steps_unless_it_is_said() -> None:
    """The wait of published frameworks for the host to read the loss, which Penstock's training does not have."""
    plan = Plan.parse("precision=O1 optimizer=fused compile=blocks micro_batch=64 dp=2")
    rates, alone = rates_of(load_machine("h100"), plan), replace(plan, dp=1)
    waiting, free = (
        step(describe(preset("vit-b16"), plan, software=Software(host_waits=waits)), rates, plan).total
        for waits in (True, False)
    )
    assert waiting - free == pytest.approx(rates.constants.host_wait_seconds, rel=0.01)
    assert free == pytest.approx(step(describe(preset("vit-b16"), alone), rates, alone).total, rel=0.02)


def test_gradients_that_products_add_up_take_no_pass_of_their_own() -> None:
    plan = Plan.parse(
        "precision=O2 optimizer=fused compile=blocks attention=flash gradients=fp32 tp=8 accumulate=8"
    )
    work, rates = describe(preset("gpt-22b"), plan), rates_of(load_machine("h100"), plan)
    apart, within = (
        step(replace(work, software=Software(adds_in_products=adds)), rates, plan).seconds
        for adds in (False, True)
    )
    held = work.parameters
    assert apart["optimizer"] - within["optimizer"] == pytest.approx(8 * held * 10 / rates.memory)


def test_what_deepspeed_s_optimizer_for_bf16_copies_and_sums_is_counted() -> None:
    """Gradients of each micro-batch are written and read in fp32 once more, and replicas sum all of them."""
    plan = Plan.parse(
        "precision=O2 optimizer=fused compile=blocks attention=flash gradients=fp32 tp=8 dp=4 accumulate=8 "
        "sharding=zero1 overlap=false"
    )
    work, rates = describe(preset("gpt-22b"), plan), rates_of(load_machine("a100-80g"), plan)
    plain, copied, summed = (
        step(replace(work, software=software), rates, plan).seconds
        for software in (Software(), Software(casts_gradients=True), Software(sums_whole=True))
    )
    held = work.parameters
    assert copied["optimizer"] - plain["optimizer"] == pytest.approx(8 * held * (4 + 4) / rates.memory)
    assert copied["data"] == plain["data"]
    group, calls = group_of(rates, 4, 8), -(-held * 4 // BUCKET_BYTES)
    more = reduce_seconds(group, 4.0 * held, calls) - gather_seconds(group, 4.0 * held, calls, scatters=True)
    assert summed["data"] - plain["data"] == pytest.approx(more)
    # As many bytes once more through the adapters, and the second half of the start of a large sum.
    assert more == pytest.approx(3 / 4 * 4 * held / group.bandwidth, rel=0.01)


def test_a_window_and_a_shared_norm_are_counted() -> None:
    """A sliding window bounds the keys of a query. Side by side, attention and MLP read one norm."""
    plan = Plan.parse("precision=O2 optimizer=fused compile=blocks attention=flash")
    rates = rates_of(load_machine("h100"), plan)
    long = replace(preset("llama3-8b"), sequence=32768)

    def block(model: ModelConfig) -> PartTime:
        (one,) = describe(model, plan).blocks
        return part_time(one, rates, layout_of(plan))

    whole, windowed = block(long), block(replace(long, window=4096))
    assert 0.15 < windowed.forward.attention / whole.forward.attention < 0.3
    assert windowed.forward.gemm == whole.forward.gemm
    apart, beside = (
        describe(replace(preset("gpt2"), parallel=parallel), plan).blocks[0] for parallel in (False, True)
    )
    norms = [[op.name for op in part.forward if op.kind == "norm"] for part in (apart, beside)]
    assert norms == [["norm1", "norm2"], ["norm1"]]
    assert apart.parameters - beside.parameters == 2 * 768
    residuals = [sum(op.name.endswith("residual") for op in part.forward) for part in (apart, beside)]
    assert residuals == [2, 2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble", "interleaved virtual=2"])
def test_stages_that_share_a_cpu_idle_less(schedule: str) -> None:
    """One that waits leaves its processor to the others, so that on one core nothing is idle."""
    model = replace(preset("gpt2"), depth=8)
    plan = Plan.parse(f"pp=4 accumulate=4 schedule={schedule}")
    cpu = replace(load_machine("h100"), name="cpu", device="cpu", source="measured", launch_seconds=0.0)

    def predicted(alone: float) -> Prediction:
        return predict(model, replace(cpu, alone_speedup=alone), plan)

    assert predicted(0.0).seconds == predicted(1.0).seconds
    taken = [predicted(alone).iteration_seconds for alone in (1.01, 1.3, 2.0, 4.0)]
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < 0.9 * taken[0]
    costs = stage_costs(model, cpu, plan)
    work = simulate(schedule_of(plan), costs).busy
    computed = ("gemm", "attention", "pointwise", "output", "launch", "bubble")
    one = predicted(4.0).seconds
    assert sum(one[name] for name in computed) == pytest.approx(sum(work) / 4, rel=0.01)
