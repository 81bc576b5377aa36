"""Times and layouts: bubbles, collectives, tiles, the search, and what is said of the impossible."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from helpers.pace import at_reference_pace, pace
from penstock.config import rules
from penstock.config.machine import load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.planner import predict, search
from penstock.planner.describe import describe, totals
from penstock.planner.operators import Software
from penstock.planner.pipeline import evenly, stage_blocks, stage_counts
from penstock.planner.price import exposed_seconds, gather_seconds, group_of, reduce_seconds
from penstock.planner.rates import rates_of
from penstock.planner.search import base_of, explore
from penstock.schedules import Costs, generate, simulate

A100 = load_machine("a100-80g")
HALF = Plan(precision="O2", optimizer="fused", compile="blocks", attention="flash")


def test_a_search_begins_with_attention_that_the_model_has() -> None:
    bases = {name: base_of(None, PRESETS[name], A100, 8) for name in ("gpt2", "gpt-oss-20b")}
    assert {name: base.plan.attention for name, base in bases.items()} == {
        "gpt2": "flash",
        "gpt-oss-20b": "sdpa",
    }


def test_what_is_put_off_takes_memory_on_the_last_stage() -> None:
    plan = replace(HALF, tp=8, pp=8, accumulate=16, recompute="full")
    model = PRESETS["gpt-22b"]
    split = predict(model, A100, replace(plan, schedule="zero_bubble"))
    assert split.memory["activations"] > predict(model, A100, plan).memory["activations"]


@pytest.mark.parametrize(
    ("depth", "stages", "blocks"),
    [(96, 8, (12, 12, 12)), (70, 12, (5, 6, 5)), (106, 12, (8, 9, 8)), (10, 4, (2, 3, 2)), (11, 4, (3, 3, 2))],
)  # fmt: skip
def test_blocks_fall_on_stages(depth: int, stages: int, blocks: tuple[int, int, int]) -> None:
    counts = evenly(depth, stages)
    assert (counts[0], max(counts), counts[-1]) == blocks
    assert sum(counts) == depth


@pytest.mark.parametrize(
    ("name", "pp", "virtual"), [("llama3-8b", 8, 1), ("llama3-8b", 4, 4), ("gpt-22b", 5, 1)]
)
def test_devices_are_predicted_with_the_blocks_that_they_run(name: str, pp: int, virtual: int) -> None:
    model = PRESETS[name]
    counts = stage_counts(totals(model), pp * virtual)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = replace(HALF, pp=pp, virtual=virtual, schedule=schedule, accumulate=pp, micro_batch=2)
    runs = stage_blocks(describe(model, plan), pp, virtual).runs
    assert [blocks for count, blocks in runs for _ in range(count)] == [
        sum(counts[at::pp]) for at in range(pp)
    ]
    # An output as large as several blocks leaves the last device fewer of them.
    assert (runs[-1][1] < runs[0][1]) == (name == "llama3-8b")
    even = predict(model, A100, plan, Software(even_stages=True))
    faster = predict(model, A100, plan).iteration_seconds / even.iteration_seconds
    assert faster < 0.98 if name == "llama3-8b" else faster == 1.0


def test_devices_of_an_encoder_decoder_hold_what_their_blocks_have() -> None:
    model = replace(PRESETS["t5-base"], sequence=512, decoder_sequence=64)
    plan = replace(HALF, pp=4, accumulate=4)
    work, counts = totals(model), stage_counts(totals(model), 4)
    blocks = [part.learned for stack in work.stacks for part in stack for _ in range(part.count)]
    at = [sum(counts[:stage]) for stage in range(5)]
    held = [sum(blocks[begin:end]) for begin, end in pairwise(at)]
    mean = sum(blocks) / len(blocks)
    found = stage_blocks(describe(model, plan), 4, 1, "learned")
    assert found.first * mean == pytest.approx(held[0])
    assert found.middle * mean == pytest.approx(max(held[1:3]))
    assert found.last * mean == pytest.approx(held[-1])
    # Few tokens in the decoder: its blocks are cheap, and most of them lie together.
    assert counts[-1] > counts[0]


def test_full_recomputation_repeats_a_forward_pass_on_all_devices() -> None:
    plan = replace(HALF, tp=8, sp=True, pp=8, dp=2, sharding="zero1", accumulate=32, recompute="full")
    one = predict(PRESETS["gpt-175b"], A100, plan)
    assert one.hfu / one.mfu == pytest.approx(4 / 3, rel=0.02)
    assert one.gpus == 128
    assert one.global_batch == 8 * 32 * 2


def test_a_large_collective_is_bound_by_the_slowest_link() -> None:
    rates = rates_of(A100, HALF)
    inside = group_of(rates, 8, 1)
    assert gather_seconds(inside, 8e9) == pytest.approx(7 / 8 * 8e9 / rates.link, rel=0.01)
    assert reduce_seconds(inside, 8e9) == pytest.approx(2 * gather_seconds(inside, 8e9), rel=0.01)
    # Eight groups of one member per node share a node's adapters: an eighth each.
    across = group_of(rates, 4, 8)
    assert across.bandwidth == pytest.approx(rates.node / 8)
    assert group_of(rates, 32, 1).bandwidth == pytest.approx(rates.node)


def test_more_latency_for_more_members_and_none_for_one() -> None:
    rates = rates_of(A100, HALF)
    times = [reduce_seconds(group_of(rates, size, 8), 1e4) for size in (1, 2, 4, 16, 64)]
    assert times[0] == 0.0
    assert times == sorted(times)


def test_only_sums_go_by_trees() -> None:
    """A ring's steps add up, in nccl's all-gather and reduce-scatter on any number of nodes."""
    rates = rates_of(A100, HALF)
    small, large = (group_of(rates, size, 1) for size in (128, 512))
    assert gather_seconds(large, 1.0) == pytest.approx(511 * large.step, rel=0.01)
    assert gather_seconds(large, 1.0) > 3.9 * gather_seconds(small, 1.0)
    assert reduce_seconds(large, 1.0) < 2 * reduce_seconds(small, 1.0)


def test_waves_are_whole() -> None:
    """One tile more than the multiprocessors hold costs another wave."""
    rates = rates_of(A100, HALF)
    full = rates.products.seconds(256 * 108, 128, 4096)
    more = rates.products.seconds(256 * 109, 128, 4096)
    assert more > 1.15 * full
    assert rates.products.seconds(8192, 8192, 8192) == pytest.approx(
        2 * 8192**3 / rates.product_rate, rel=0.06
    )


def test_a_product_of_few_deep_tiles_is_cut_along_its_depth() -> None:
    """150 tiles on 108 multiprocessors are two waves, but in four parts of a quarter's depth they are 5.6 of 6."""
    rates = rates_of(A100, HALF)
    deep = rates.products.seconds(1280, 3840, 16384)
    ideal = 2 * 1280 * 3840 * 16384 / rates.product_rate
    assert deep < 1.2 * ideal
    shallow = rates.products.seconds(1280, 3840, 1024) / (2 * 1280 * 3840 * 1024 / rates.product_rate)
    assert shallow > 1.15


def test_what_hides_slows_what_it_hides_behind() -> None:
    rates = rates_of(A100, HALF)
    assert rates.collective_share == pytest.approx(20 / 108)
    assert exposed_seconds(rates, 1.0, 10.0) == pytest.approx(20 / 108)
    assert exposed_seconds(rates, 3.0, 1.0) == 2.0


def test_rows_that_cross_lines_are_slower() -> None:
    """A width of 14,400 over 8 devices is 1,800 = 8 · 225 numbers; 13,824 over 8 is 1,728 = 64 · 27."""
    rates = rates_of(A100, HALF)
    bad = rates.products.seconds(2048, 14400, 1800) / (14400 * 1800)
    good = rates.products.seconds(2048, 13824, 1728) / (13824 * 1728)
    assert bad > 1.15 * good


@pytest.mark.parametrize(
    ("line", "words"),
    [("tp=7", "plan.tp=7 cannot split the model's 96 attention heads evenly"), ("sp=true", "plan.tp=1"),
    ("pp=97", "plan.pp=97 leaves stages without a block"),
    ("pp=16 virtual=8 schedule=interleaved accumulate=16", "plan.pp=16 times plan.virtual=8 leaves stages without"),
    ("pp=8 virtual=2", "needs plan.schedule=interleaved"),
    ("pp=8 virtual=5 schedule=interleaved", "does not divide the model's 96 blocks"),
    ("ep=4 dp=4", "splits experts, but the model has none"), ("cp=3", "cannot split the model's 2048 tokens evenly"),
    ("dp=8 sharding=hsdp shard=3", "does not divide the replicas, plan.dp=8")],
)  # fmt: skip
def test_impossible_degrees_name_the_constraint(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        predict(PRESETS["gpt-175b"], A100, Plan.parse(line))


def test_every_layout_found_is_legal_and_fits() -> None:
    model = PRESETS["gpt-175b"]
    found = explore(model, A100, 512, global_batch=1152, keep=None)
    assert found.tried > 300
    assert found.too_large > 100
    times = [one.iteration_seconds for one in found]
    # The fastest has micro-batches of three, by less than the error; an even one comes before it.
    assert times[1:] == sorted(times[1:])
    best, odd = found[:2]
    assert (best.plan.micro_batch % 2, odd.plan.micro_batch) == (0, 3)
    assert best.interval is not None
    assert times[1] < times[0] <= times[1] * (1 + best.interval.spread)
    for one in found:
        assert not rules.problems(one.plan, model)
        assert one.plan.gpus == 512
        assert one.plan.global_batch == 1152
        assert one.memory_bytes < A100.memory_bytes
        assert Plan.parse(one.plan.line()) == one.plan
    best = found[0]
    assert predict(model, A100, best.plan).iteration_seconds == pytest.approx(best.iteration_seconds)


@pytest.mark.parametrize("wrong", [{"global_batch": 0}, {"global_batch": -8}, {"keep": 0}])
def test_a_search_for_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} .*at least 1"):
        search(PRESETS["gpt2"], A100, 8, **wrong)


def test_what_fits_nowhere_says_what_would_make_it_fit() -> None:
    with pytest.raises(
        OutOfMemory, match=r"fits in no layout on 8 a100-80g.*To make it fit: use \d+ devices or more"
    ):
        search(PRESETS["gpt-175b"], A100, 8)
    with pytest.raises(ConfigError, match="No layout has 11 devices"):
        search(PRESETS["gpt-175b"], A100, 11, global_batch=100)


@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_one_prediction_and_a_whole_search_are_fast(schedule: str) -> None:
    """The promised bounds: 0.2 ms, at the pace of the reference machine, and 2 s of one core."""
    model = PRESETS["gpt-1t"]
    base = replace(HALF, schedule=schedule, precision="O2")
    plan = replace(base, tp=8, sp=True, pp=64, dp=6, sharding="zero1")

    def seconds(turn: int) -> float:
        # Layouts that no round before has met.
        plans = [replace(plan, accumulate=512 + 10 * turn + i) for i in range(10)]
        begin = time.process_time()
        for one in plans:
            predict(model, A100, one)
        return (time.process_time() - begin) / 10

    assert at_reference_pace(seconds, rounds=40) < 0.2e-3
    begin = time.process_time()
    assert search(model, A100, 3072, global_batch=3072, base=base)
    assert time.process_time() - begin < 2.0 * pace()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "name", "p", "m", "v"),
    [("1f1b", "1f1b", 4, 16, 1), ("gpipe", "gpipe", 4, 8, 1), ("interleaved", "interleaved", 4, 16, 2)]
    + [("zero_bubble", "zb-h1", p, m, 1) for p, m in ((8, 16), (4, 64), (8, 8), (6, 3), (2, 9))],
)
def test_the_bubble_is_the_simulator_s(
    schedule: str, name: str, p: int, m: int, v: int, recompute: str
) -> None:
    """What a prediction uses, against the schedule played through with the predicted times."""
    model = replace(PRESETS["gpt-22b"], vocabulary=1, positions="none")
    plan = replace(HALF, tp=8, pp=p, accumulate=m, virtual=v, schedule=schedule, recompute=recompute)
    one = predict(model, A100, plan)
    forward, weight = one.forward_seconds / v, one.weight_gradient_seconds / v
    costs = Costs(forward=forward, backward_input=one.backward_seconds / v - weight, backward_weight=weight)
    played = float(simulate(generate(name, p, m, v), costs).bubble_over_ideal)  # type: ignore[arg-type]
    if schedule != "zero_bubble":
        assert one.bubble_fraction == pytest.approx(played, rel=0.02)
        return
    # Its small entrance makes the first stage a little slower than the others.
    assert 1 + one.bubble_fraction == pytest.approx(1 + played, rel=0.01)
    whole = predict(model, A100, replace(plan, schedule="1f1b"))
    assert 0.0 < one.bubble_fraction < whole.bubble_fraction
    assert one.iteration_seconds < whole.iteration_seconds
