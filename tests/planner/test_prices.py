"""What each setting of a layout costs and spares: nothing is free, and what cannot be is refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from penstock.config import rules
from penstock.config.machine import GemmSample, Machine, load_machine
from penstock.config.model import PRESETS, preset
from penstock.config.plan import Plan
from penstock.errors import ConfigError, OutOfMemory
from penstock.planner import predict, search
from penstock.planner.describe import describe
from penstock.planner.explain import explain, sensitivity, why_others_lose
from penstock.planner.layouts import Space, layouts
from penstock.planner.operators import Op, Software
from penstock.planner.pipeline import in_flight, zero_bubble_idle
from penstock.planner.prediction import Prediction, room
from penstock.planner.price import group_of
from penstock.planner.price import seconds as price
from penstock.planner.rates import rates_of
from penstock.planner.search import Layouts, _even_first, base_of, explore
from penstock.planner.step import layout_of, part_time
from penstock.schedules import Costs, generate, simulate

H100 = load_machine("h100")
BASE = "precision=O2 optimizer=fused attention=flash compile=blocks"


def one(model: str, line: str, machine: Machine = H100) -> Prediction:
    config = PRESETS[model]
    return predict(config, machine, Plan.parse(f"{BASE} {line}"))


@pytest.mark.parametrize(
    "line",
    ["pp=8 accumulate=16", "pp=8 accumulate=4", "pp=8 accumulate=16 schedule=gpipe",
    "pp=2 accumulate=16 schedule=interleaved virtual=16", "pp=4 accumulate=8 schedule=interleaved virtual=2",
    "pp=4 accumulate=4 schedule=interleaved virtual=3"],
)  # fmt: skip
def test_the_first_stage_keeps_what_the_schedules_say(line: str) -> None:
    plan = Plan.parse(line)
    peaks = simulate(generate(plan.schedule, plan.pp, plan.accumulate, plan.virtual)).peak_memory
    assert in_flight(plan) * plan.virtual == pytest.approx(peaks[0])


def test_a_last_stage_that_keeps_many_micro_batches_needs_the_output_besides() -> None:
    line = "pp=2 dp=32 sharding=zero1 micro_batch=1 accumulate=16"
    plain, chunks = one("llama3-8b", line), one("llama3-8b", f"{line} schedule=interleaved virtual=16")
    assert plain.memory["output"] == 0.0 < chunks.memory["output"]
    logits = 8192 * 128256 * 2
    assert chunks.memory["output"] > 1.5 * logits  # they, and what the last norm and the output keep
    line = "pp=8 accumulate=16 micro_batch=1 recompute=full schedule="
    fifo, few = one("llama3-8b", f"{line}gpipe"), one("llama3-8b", f"{line}1f1b")
    assert fifo.memory["output"] > 0
    assert fifo.memory["activations"] > 2 * few.memory["activations"]


@pytest.mark.parametrize("kind", ["elementwise", "operators", "selective", "early", "full"])
def test_blocks_that_do_not_recompute_keep_what_they_would(kind: str) -> None:
    attention = "plain" if kind == "selective" else "flash"
    base = (
        f"precision=O2 optimizer=fused compile=blocks attention={attention} dp=8 sharding=fsdp micro_batch=1"
    )

    def of(more: str) -> Prediction:
        return predict(PRESETS["gpt-22b"], H100, Plan.parse(f"{base} {more}"))

    never, always = of(""), of(f"recompute={kind}")
    half, hardly = of(f"recompute={kind} recompute_every=2"), of(f"recompute={kind} recompute_every=1000")
    for part in ("iteration_seconds", "memory_bytes", "hfu"):
        ends = getattr(never, part), getattr(always, part)
        assert ends[0] != ends[1]
        assert getattr(hardly, part) == pytest.approx(ends[0], rel=0.01)
        assert min(ends) < getattr(half, part) < max(ends)


def test_selective_recomputation_does_nothing_where_no_scores_are_kept() -> None:
    line = "dp=8 sharding=fsdp micro_batch=1"
    none, selective = one("gpt-22b", line), one("gpt-22b", f"{line} recompute=selective")
    assert selective.iteration_seconds == none.iteration_seconds
    assert selective.memory_bytes == none.memory_bytes


def test_what_lies_in_host_memory_is_paid_on_the_way() -> None:
    line = "dp=8 sharding=fsdp micro_batch=1"
    none = one("llama3-8b", line)
    activations = one("llama3-8b", f"{line} offload=activations")
    away = none.memory["activations"] - activations.memory["activations"]
    assert away > 2**34
    exposed = activations.seconds["offload"]
    least = 2 * away / 64e9 - none.forward_seconds - none.backward_seconds
    assert 0 < least < exposed < 2 * away / 40e9
    # Host memory is as slow beside a fast chip, and shards of everything leave.
    states = one("llama3-8b", f"{line} offload=optimizer")
    assert states.memory["weights"] == states.memory["gradients"] == states.memory["optimizer"] == 0
    fast = one("llama3-8b", f"{line} offload=optimizer", load_machine("b200"))
    assert fast.seconds["optimizer"] == pytest.approx(states.seconds["optimizer"])
    assert states.seconds["optimizer"] > 20 * none.seconds["optimizer"]


def test_experts_that_nobody_else_holds_are_updated_and_not_gathered() -> None:
    line = "dp=8 sharding=fsdp micro_batch=1"
    spread, apart = one("mixtral-8x7b", line), one("mixtral-8x7b", f"{line} ep=8")
    assert apart.memory["optimizer"] == pytest.approx(spread.memory["optimizer"], rel=1e-6)
    assert apart.seconds["optimizer"] == pytest.approx(spread.seconds["optimizer"], rel=1e-6)
    assert apart.memory["gathered_weights"] < 0.2 * spread.memory["gathered_weights"]
    assert apart.seconds["data"] < 0.2 * spread.seconds["data"]
    whole, alone = one("mixtral-8x7b", "dp=8 micro_batch=1"), one("mixtral-8x7b", "dp=8 micro_batch=1 ep=8")
    assert alone.seconds["data"] < 0.05 * whole.seconds["data"]


def test_what_would_help_scales_measured_rates_too() -> None:
    product = GemmSample(dtype="bf16", m=8192, n=8192, k=8192, flops_per_second=5e14)
    measured = replace(H100, gemm=(product,), collective_bytes_per_second=1e11)
    for machine in (H100, measured):
        base = base_of(f"{BASE} tp=8 micro_batch=1", PRESETS["gpt-22b"], machine, 8)
        given = {"base": base.plan, "fixed": base.fixed}
        (best,) = search(PRESETS["gpt-22b"], machine, 8, global_batch=8, keep=1, **given)
        gains = {one.words: one.gain for one in sensitivity(PRESETS["gpt-22b"], machine, 8, best, **given)}
        assert gains["matrix products a fifth faster"] > 0.05
        assert gains["links inside a node twice as fast"] > 0.01


def test_a_degree_that_is_odd_is_not_halved() -> None:
    small = replace(H100, memory_bytes=1e9)
    for tp, halves in ((3, False), (2, True)):
        best = one("gpt2", f"tp={tp} micro_batch=8", small)
        words = [*why_others_lose(PRESETS["gpt2"], small, Layouts(), best)]
        assert any(sentence.startswith("tp=") for sentence in words) == halves


def test_keys_go_round_whatever_the_attention() -> None:
    for attention in ("flash", "plain"):
        plan = Plan.parse(f"precision=O2 optimizer=fused tp=8 cp=4 micro_batch=1 attention={attention}")
        assert predict(PRESETS["llama2-7b"], load_machine("b200"), plan).seconds["context"] > 0


def test_reducing_gradients_of_each_micro_batch_is_not_free() -> None:
    line = "dp=128 micro_batch=1 accumulate=8"
    a100 = load_machine("a100-80g")
    states, gradients = (one("mpt-7b", f"{line} sharding={s}", a100) for s in ("zero1", "zero2"))
    assert gradients.seconds["data"] > states.seconds["data"]
    assert gradients.memory["gradients"] < states.memory["gradients"]


def test_more_to_compute_never_makes_a_step_shorter() -> None:
    machine = load_machine("mi300x")
    line = "dp=16 sharding=hsdp shard=8 tp=8 cp=4 micro_batch=2"
    kinds = [
        one("gpt-1t", f"{line} {k}", machine).iteration_seconds
        for k in ("", "recompute=early", "recompute=full")
    ]
    assert all(after > before * (1 - 1e-9) for before, after in itertools.pairwise(kinds))


@pytest.mark.parametrize("heavy", ["first", "last", "any"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 4), (8, 8), (8, 32), (16, 32)])
def test_a_zero_bubble_of_unequal_stages_is_the_simulator_s(
    heavy: str, ranks: int, micro_batches: int
) -> None:
    chance = random.Random(f"{heavy} {ranks} {micro_batches}")
    for _ in range(5):
        forward, into, weight = 1.0, chance.uniform(0.9, 2.2), chance.uniform(0.5, 1.2)
        stages = [[forward, into, weight] for _ in range(ranks)]
        more = chance.uniform(0.2, 2.0)
        if heavy == "any":
            stages = [[cost * chance.uniform(0.8, 1.2) for cost in stage] for stage in stages]
        elif heavy == "last":
            stages[-1] = [cost + more / 3 for cost in stages[-1]]
        else:
            stages[0] = [forward + more / 2, into, weight + more / 2]
        f, i, w = (list(costs) for costs in zip(*stages))
        costs = Costs(forward=f, backward_input=i, backward_weight=w)
        played = float(simulate(generate("zb-h1", ranks, micro_batches), costs).makespan)
        busy = micro_batches * max(sum(stage) for stage in stages)
        idle = zero_bubble_idle([(1, (a, b, c)) for a, b, c in stages], micro_batches)
        assert idle + busy == pytest.approx(played, rel=0.025)
        if heavy != "any":
            first, like, last = stages[0], stages[1 if ranks > 2 else 0], stages[-1]
            runs = [(1, (first[0], first[1], first[2])), (ranks - 2, (like[0], like[1], like[2]))]
            runs.append((1, (last[0], last[1], last[2])))
            assert zero_bubble_idle(runs, micro_batches) == pytest.approx(idle)


def test_a_zero_bubble_of_the_planner_has_its_output_in_the_last_stage() -> None:
    # Eight stages of four blocks, the last with an output over 128,256 words besides.
    line, even = f"{BASE} pp=8 accumulate=8 micro_batch=1", Software(even_stages=True)
    split, whole = (
        predict(PRESETS["llama3-8b"], H100, Plan.parse(f"{line} schedule={kind}"), even)
        for kind in ("zero_bubble", "1f1b")
    )
    assert split.seconds["bubble"] < 0.75 * whole.seconds["bubble"]
    # Before its first pass the last stage waits for seven others' forward passes at least.
    assert split.seconds["bubble"] > 7 * split.forward_seconds


@pytest.mark.parametrize(
    ("model", "line", "words"),
    [
        ("gpt-22b", "pp=8 virtual=6 schedule=interleaved accumulate=12", "not a multiple of plan.pp=8"),
        ("vit-b16", "tp=4 sp=true", None),
        ("llama3-8b", "tp=32 dp=1", None),
        ("llama3-70b", "tp=8", None),
    ],
)
def test_what_cannot_be_split_is_refused(model: str, line: str, words: str | None) -> None:
    config = PRESETS[model]
    said = rules.problems(Plan.parse(line), config)
    assert (words is None) == (not said), said
    assert words is None or words in said[0]


def test_keys_that_cannot_be_shared_out_are_refused() -> None:
    three = replace(PRESETS["llama3-8b"], heads=24, kv_heads=3, width=3072, mlp_width=12288)
    said = rules.problems(Plan(tp=2), three)
    assert len(said) == 1
    assert "3 KV heads" in said[0]
    assert not rules.problems(Plan(tp=6), three)


def test_types_and_kernels_that_a_machine_lacks_are_refused() -> None:
    v100, line = load_machine("v100"), "precision=O1 dtype=fp16 attention=flash optimizer=fused"
    with pytest.raises(ConfigError, match="compute capability"):
        explain(PRESETS["vit-b16"], v100, Plan.parse(line))
    with pytest.raises(ConfigError, match="compute capability"):
        explore(PRESETS["vit-b16"], v100, 8, base=Plan.parse(line))


def test_what_is_fixed_is_not_searched() -> None:
    line = "tp=4 pp=4 micro_batch=2 sharding=fsdp recompute=full schedule=gpipe"
    plan = Plan.parse(f"{BASE} {line}")
    names = frozenset(word.partition("=")[0] for word in line.split())
    found = search(PRESETS["gpt-22b"], H100, 64, global_batch=256, base=plan, fixed=names)
    for prediction in found:
        assert all(getattr(prediction.plan, name) == getattr(plan, name) for name in names)
    groups = Plan.parse(f"{BASE} sharding=hsdp shard=16")
    found = search(PRESETS["llama3-8b"], H100, 64, base=groups, fixed=frozenset({"sharding", "shard"}))
    assert {(p.plan.sharding, p.plan.shard) for p in found} == {("hsdp", 16)}
    alone = Plan.parse(f"{BASE} tp=8 pp=2 sharding=zero1")
    assert search(PRESETS["gpt-22b"], H100, 16, base=alone, fixed=frozenset({"tp", "pp", "sharding"}))
    with pytest.raises(ConfigError, match=r"with tp=3.*divide the heads"):
        search(PRESETS["gpt-22b"], H100, 64, base=Plan(tp=3), fixed=frozenset({"tp"}))


def test_every_kind_of_sharding_is_searched_and_none_is_empty() -> None:
    plans = list(layouts(PRESETS["llama3-8b"], H100, 64, 512, Plan.parse(BASE), Space()))
    assert {plan.sharding for plan in plans if plan.dp > 1} == {"ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert all(1 < plan.shard < plan.dp * plan.cp for plan in plans if plan.sharding == "hsdp")
    assert not any(rules.problems(plan, PRESETS["llama3-8b"]) for plan in plans)
    assert {plan.gather for plan in plans} == {"level"}
    eight = Plan.parse(f"{BASE} products=fp8_tensorwise")
    plans = list(layouts(PRESETS["llama3-8b"], H100, 64, 512, eight, Space()))
    assert {plan.sharding for plan in plans if plan.gather == "products"} == {"fsdp", "hsdp"}
    assert {plan.gather for plan in plans if plan.sharding == "fsdp" and plan.dp > 1} == {"products"}
    kept = layouts(PRESETS["llama3-8b"], H100, 64, 512, eight, Space(), frozenset({"gather"}))
    assert {plan.gather for plan in kept} == {"level"}
    best = search(PRESETS["vit-b16"], load_machine("h200"), 8, global_batch=8192)[0]
    assert best.plan.micro_batch > 64


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "line"),
    [("llama3-8b", "h100", 8, "dp=8 sharding=fsdp micro_batch=2"), ("gpt2-large", "rtx-4090", 1, "")],
)
def test_where_memory_binds_a_search_keeps_products_and_computes_the_rest_again(
    model: str, machine: str, gpus: int, line: str
) -> None:
    """The layout that was the fastest without this way is at least 1.5 % slower."""
    base, chip = base_of(line, PRESETS[model], load_machine(machine), gpus), load_machine(machine)
    others = Space(recompute=("none", "selective", "operators", "early"))
    best, before = (
        search(PRESETS[model], chip, gpus, global_batch=256, base=base.plan, fixed=base.fixed, space=space)[0]
        for space in (None, others)
    )
    assert best.plan.recompute == "elementwise"
    assert best.fits
    assert before.iteration_seconds > 1.015 * best.iteration_seconds


def test_the_best_of_a_search_is_predicted_as_it_is_alone() -> None:
    for model in (PRESETS["vit-s16"], PRESETS["vit-l16"]):
        best = search(model, H100, 1)[0]
        assert best == predict(model, H100, best.plan)
        assert best.tokens_per_second_per_gpu > 0
        assert best.forward_seconds < best.backward_seconds


def test_fitting_leaves_the_same_margin_everywhere() -> None:
    line = "micro_batch=18 dp=6 sharding=fsdp"
    prediction = one("gpt-1.7b", line, load_machine("a100-80g"))
    machine = load_machine("a100-80g")
    assert room(machine) < prediction.memory_bytes < machine.memory_bytes
    assert not prediction.fits


@pytest.mark.parametrize(
    ("model", "machine", "enough"), [("gpt-1t", "h100", 240), ("llama3-8b", "a100-40g", 5)]
)
def test_as_many_devices_as_are_said_to_be_enough_are(model: str, machine: str, enough: int) -> None:
    config, device = PRESETS[model], load_machine(machine)
    with pytest.raises(OutOfMemory, match=f"use {enough} devices or more"):
        search(config, device, 1)
    assert search(config, device, enough, global_batch=enough)
    with pytest.raises(OutOfMemory):
        search(config, device, enough // 2, global_batch=enough // 2)


def test_a_pipeline_s_stage_keeps_its_weights_whole_and_gathers_them_once() -> None:
    line = "pp=4 dp=8 micro_batch=1 accumulate={} recompute=full"
    few, many = (one("llama3-8b", line.format(n) + " sharding=fsdp") for n in (8, 32))
    # 2 bytes of a gathered weight and 4 of a gradient that waits to be reduced, of the fullest stage.
    held = one("llama3-8b", line.format(8)).memory["weights"] / 2
    assert few.memory["gathered_weights"] == pytest.approx(2 * held, rel=1e-6)
    assert few.memory["gradients"] == pytest.approx((4 + 4 / 8) * held, rel=1e-6)
    # Once a step, however many micro-batches.
    assert few.seconds["data"] == many.seconds["data"]
    zero1 = one("llama3-8b", line.format(32) + " sharding=zero1")
    assert many.iteration_seconds == pytest.approx(zero1.iteration_seconds, rel=0.03)
    # A weight of 405B on a stage that cannot hold it whole is not ranked.
    assert not one(
        "llama3-405b", "tp=8 pp=2 dp=64 sharding=fsdp micro_batch=1 accumulate=8 recompute=full"
    ).fits


def test_memory_is_what_the_driver_reports() -> None:
    assert H100.memory_bytes == pytest.approx(79.6 * 2**30, rel=0.001)
    assert 75 * 2**30 < room(H100) < 78 * 2**30
    unknown = replace(H100, memory_bytes=0.0)
    assert one("gpt-1t", "", unknown).fits


def test_embedding_and_head_count_as_blocks_where_only_so_chunks_come_out_even() -> None:
    """126 blocks on 16 stages: 128 pieces are eight of each stage, in one, two or four chunks. Of eight, the first and
    the last of all would have no block."""
    found = search(
        preset("llama3-405b"), H100, 1024, global_batch=512, base=Plan.parse(BASE), keep=None,
        space=Space(tp=(8,), pp=(16,), sharding=("zero1",), recompute=("full",), micro_batch=(1,)),
    )  # fmt: skip
    assert {one.plan.virtual for one in found} == {1, 2, 4}
    by_chunks = {one.plan.virtual: one for one in found}
    assert by_chunks[4].bubble_fraction < by_chunks[2].bubble_fraction < by_chunks[1].bubble_fraction
    # Each chunk costs transfers of its own.
    assert by_chunks[4].seconds["pipeline"] > 1.5 * by_chunks[2].seconds["pipeline"]


def test_products_of_a_head_store_their_results_in_the_open() -> None:
    rates = rates_of(load_machine("a100-80g"), Plan(precision="O2"))
    scores = Op(
        "attention.scores", "bmm", batch=256, m=512, n=512, k=64, read=1e6, written=256 * 512 * 512 * 2.0
    )
    bare = price(scores._replace(written=0.0), rates)
    assert price(scores, rates) == pytest.approx(bare + scores.written / rates.memory)
    linear = scores._replace(kind="gemm", written=1e6)
    assert price(linear, rates) == pytest.approx(price(linear._replace(written=0.0), rates))


@pytest.mark.parametrize(("tokens", "reads"), [(1024, 1), (2048, 2)])
def test_a_long_row_of_softmax_is_read_twice_and_a_mask_for_each_head(tokens: int, reads: int) -> None:
    model = replace(preset("gpt2"), sequence=tokens, dropout=0.0)
    (block,) = describe(model, Plan(precision="O2", attention="plain", micro_batch=1)).blocks
    named = {op.name: op for op in block.forward}
    size = 2.0 * model.heads * tokens**2
    assert (named["attention.softmax"].read, named["attention.softmax"].written) == (reads * size, size)
    assert (named["attention.mask"].read, named["attention.mask"].written) == (2 * size, size)
    assert "attention.scale" not in named
    (fused,) = describe(
        model, Plan(precision="O2", attention="plain", compile="blocks", micro_batch=1)
    ).blocks
    assert next(op for op in fused.forward if op.name == "attention.softmax").read == size


def test_a_scale_per_row_casts_each_factor_for_each_product() -> None:
    def casts(words: str, compiled: str = "blocks") -> float:
        plan = Plan.parse(f"precision=O2 attention=flash compile={compiled} micro_batch=8 {words}")
        (block,) = describe(preset("gpt2"), plan).blocks
        return sum(op.written for op in (*block.forward, *block.backward) if op.kind == "quantize")

    (block,) = describe(preset("gpt2"), Plan(precision="O2", micro_batch=8)).blocks
    products = [op for op in block.forward if op.kind == "gemm"]
    inputs, outputs = (
        sum(op.batch * op.m * size(op) for op in products) for size in (lambda op: op.k, lambda op: op.n)
    )
    weights = sum(op.n * op.k for op in products)
    assert casts("products=fp8_tensorwise") == inputs + outputs
    shards = "products=fp8_tensorwise dp=8 sharding=fsdp"
    assert casts(shards, "none") - casts(f"{shards} gather=products", "none") == weights, "which come in fp8"
    assert casts("products=fp8") == 2 * (inputs + outputs + weights)


def test_what_belongs_to_no_single_product_cannot_be_cut() -> None:
    plan = Plan.parse("precision=O2 attention=flash tp=8 sp=true tp_overlap=all micro_batch=4")
    rates = rates_of(load_machine("h100"), plan)
    (block,) = describe(preset("gpt-22b"), plan).blocks
    apart = replace(block, backward=tuple(op._replace(uncut=op.kind == "scatter") for op in block.backward))
    whole, cut = (part_time(one, rates, layout_of(plan)) for one in (apart, block))
    assert whole.forward == cut.forward
    assert whole.backward.tensor > 2 * cut.backward.tensor


@pytest.mark.parametrize(("lead", "first"), [(0.01, 4), (0.5, 3)])
def test_an_odd_micro_batch_comes_first_only_if_it_wins_by_more_than_the_error(
    lead: float, first: int
) -> None:
    even = one("gpt-22b", "tp=8 sp=true micro_batch=4 recompute=full")
    odd = replace(
        even, plan=replace(even.plan, micro_batch=3), iteration_seconds=even.iteration_seconds / (1 + lead),
    )  # fmt: skip
    single = replace(
        even, plan=replace(even.plan, micro_batch=1), iteration_seconds=2 * even.iteration_seconds
    )
    ranked = _even_first([odd, even, single])
    assert ranked[0].plan.micro_batch == first
    assert sorted(each.plan.micro_batch for each in ranked) == [1, 3, 4]
    assert _even_first([single, odd]) == [single, odd]
    assert _even_first([odd]) == [odd]
    assert _even_first([]) == []


def test_groups_that_cross_leaves_get_what_the_spine_leaves_them() -> None:
    """Rails of 32 nodes whose switches have half as many links up: within them nothing changes."""
    rails = replace(load_machine("h100"), leaf_nodes=32, spine_share=0.5)
    whole, halved = (rates_of(machine, Plan()) for machine in (load_machine("h100"), rails))
    for stride, size, crosses in (
        (8, 32, False), (8, 64, True), (1, 256, False), (1, 512, True), (64, 8, True),
    ):  # fmt: skip
        ratio = group_of(halved, size, stride).bandwidth / group_of(whole, size, stride).bandwidth
        # A ring that enters each node by all adapters is bound by the link between devices, too.
        assert ratio == (1.0 if not crosses else pytest.approx(0.5 if stride > 1 else 0.541, abs=1e-3)), (
            stride,
            size,
        )
    with pytest.raises(ConfigError, match="spine_share is 0"):
        replace(rails, spine_share=0.0)
