"""Predictions against closed formulas: each thing is priced, and priced once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import penstock
from penstock.config.machine import load_machine
from penstock.config.model import DecoderConfig, preset
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.planner import Prediction, Software, predict, price
from penstock.planner.constants import HOST_LINK_SHARE
from penstock.planner.describe import describe
from penstock.planner.listing import QUANTIZERS
from penstock.planner.rates import rates_of
from penstock.planner.states import device_share, update_bytes
from penstock.planner.step import StepTime, step
from penstock.planner.traffic import HOST_BYTES_PER_SECOND

H100 = load_machine("h100")
HALF = Plan(precision="O2", optimizer="fused", compile="blocks", attention="flash", micro_batch=1)
LLAMA, MIXTRAL = preset("llama3-8b"), preset("mixtral-8x7b")


def at(model: object = LLAMA, **changes: object) -> Prediction:
    return predict(model, H100, replace(HALF, **changes))  # type: ignore[arg-type]


def test_experts_folded_over_all_ranks_of_a_stage_are_whole_and_visited_as_often() -> None:
    """Against experts that tensor parallelism splits: as many FLOPs on a device, and half as many parameters on twice
    as many devices.
    """
    split, folded = (describe(MIXTRAL, replace(HALF, tp=4, dp=2, sp=True, ep=ep)) for ep in (1, 8))
    products, exchanges = (
        [sum(n * value(op) for n, op in work.operators()) for work in (split, folded)]
        for value in (lambda op: op.flops * (op.module == "experts"), lambda op: op.read * (op.kind == "exchange"))
    )  # fmt: skip
    assert products[1] == pytest.approx(products[0])
    held = [sum(part.count * part.experts for part in work.blocks) for work in (split, folded)]
    assert held[1] == held[0] / 2
    moved = MIXTRAL.sequence * MIXTRAL.experts_per_token * MIXTRAL.width * 2 * HALF.micro_batch
    counts = 8 * MIXTRAL.experts  # bytes of visits to each expert, which are sent before tokens
    assert exchanges == [0, MIXTRAL.depth * (4 * moved / 4 + counts)]


def test_expert_parallelism_exchanges_each_visit_four_times() -> None:
    """There and back, in both passes; each device sends its tokens' visits, of which one in eight stays."""
    assert isinstance(MIXTRAL, DecoderConfig)
    rates = rates_of(H100, HALF)
    visits = MIXTRAL.sequence * MIXTRAL.experts_per_token
    moved = visits * MIXTRAL.width * 2.0
    group = price.group_of(rates, 8, 1)
    ramp = rates.constants.ramp_seconds * min(1.0, moved / rates.constants.ramp_bytes) ** 0.5
    each = moved * 7 / 8 / rates.link + group.step + ramp / 2
    together, apart = (at(MIXTRAL, dp=8, sharding="fsdp", ep=ep) for ep in (1, 8))
    counts = price.exchange_seconds(group, 8.0 * MIXTRAL.experts)
    assert apart.seconds["expert"] == pytest.approx(MIXTRAL.depth * (counts + 4 * each))
    assert together.seconds["expert"] == 0
    # While a shared expert computes, the tokens of one exchange in each pass travel.
    shared = at(replace(MIXTRAL, shared_experts=1), dp=8, sharding="fsdp", ep=8)
    travelling = 2 * (1 + rates.collective_share) * each
    assert shared.seconds["expert"] == pytest.approx(MIXTRAL.depth * (counts + travelling))
    # A device multiplies as many tokens, those of others by one expert in place of its own by all.
    work = describe(MIXTRAL, replace(HALF, dp=8, sharding="fsdp", ep=8))
    flops = sum(n * op.flops for n, op in work.operators() if op.name.startswith("experts.up") and op.forward)
    assert flops == 2.0 * MIXTRAL.depth * visits * MIXTRAL.width * 2 * MIXTRAL.mlp_width
    assert apart.mfu * apart.iteration_seconds == pytest.approx(together.mfu * together.iteration_seconds)


def test_tokens_leave_a_node_through_each_devices_own_adapter() -> None:
    """On four nodes of eight: three quarters of what is sent leaves the node, and each device has an eighth of its
    adapters, while a ring over all of them would have the whole."""
    rates = rates_of(H100, HALF)
    group, moved, own = price.group_of(rates, 32, 1), 134e6, rates.node / 8
    latency = group.hop + rates.constants.ramp_seconds / 2
    assert price.exchange_seconds(group, moved) == pytest.approx(moved * 24 / 32 / own + latency)
    assert own == pytest.approx(0.95 * 50e9, rel=1e-3)
    # Of eight places on four nodes 3.6 nodes and 7.18 devices are different.
    nodes, devices = 4 * (1 - 0.75**8), 32 * (1 - (31 / 32) ** 8)
    assert (price.distinct_places(4, 8), price.distinct_places(32, 8)) == (
        pytest.approx(nodes),
        pytest.approx(devices),
    )
    # Sent once, tokens go on inside their node by the multiprocessors that also send them outside.
    across, links = moved * 24 / 32 * nodes / 8 / own, moved * 31 / 32 * devices / 8 / rates.link
    assert price.exchange_seconds(group, moved, 8) == pytest.approx(math.hypot(across, links) + latency)
    node = price.group_of(rates, 8, 1)
    inside = moved * 7 / 8 * 8 * (1 - (7 / 8) ** 8) / 8 / rates.link
    assert price.exchange_seconds(node, moved, 8) == pytest.approx(
        inside + node.hop + rates.constants.ramp_seconds / 2
    )
    assert price.exchange_seconds(node, moved, 8, 1 / 8) == pytest.approx(
        moved * 7 / 8 / 8 / rates.link + node.hop + rates.constants.ramp_seconds / 2
    ), "all experts of a token are on one device"


def test_a_mixture_is_priced_by_what_it_does() -> None:
    """A router multiplies in fp32, an expert's last tile is half full, and one after the other are launched each."""
    work = {experts: describe(MIXTRAL, replace(HALF, experts=experts)) for experts in ("grouped", "loop")}
    (router, up), (_, looped) = (
        [op for op in one.blocks[0].forward if op.name in ("router", "experts.up")] for one in work.values()
    )
    rates = rates_of(H100, HALF)
    wide = router._replace(n=128)
    assert price.seconds(wide, rates) > 3 * price.seconds(wide._replace(exact=False), rates)
    assert (up.launches, looped.launches) == (1, MIXTRAL.experts)
    few = up._replace(m=64.0, batch=128)
    assert price.seconds(few, rates) > price.seconds(few._replace(module="perceptron"), rates)
    apart = price.seconds(few._replace(launches=128), rates)
    assert apart > 128 * rates.kernel_seconds
    assert apart > price.seconds(few, rates)


def test_transformer_engine_scales_and_multiplies_expert_by_expert() -> None:
    """A current scale takes four kernels an expert and product, so that fp8 may not pay; a delayed one one of all."""
    eight, terms = replace(HALF, products="fp8"), MIXTRAL.sequence * MIXTRAL.experts_per_token * MIXTRAL.width
    rates, found = rates_of(H100, eight), {}
    for scaling in QUANTIZERS:
        software = Software(experts_apart=True, scaling=scaling)  # type: ignore[arg-type]
        block = describe(MIXTRAL, eight, software=software).blocks[0]
        found[scaling] = {op.name: op for op in block.forward if op.name.startswith("experts.up")}
    casts = {scaling: ops["experts.up.quantize"] for scaling, ops in found.items()}
    assert [casts[one].launches for one in ("delayed", "current", "blockwise")] == [1, 4 * MIXTRAL.experts, 8]
    assert [casts[one].read / terms for one in ("delayed", "current", "blockwise")] == [2, 4, 2]
    assert {op.written for op in casts.values()} == {2 * terms}
    current, blocks = (found[one]["experts.up"] for one in ("current", "blockwise"))
    assert current.launches == MIXTRAL.experts
    assert price.seconds(current, rates) == price.seconds(current._replace(launches=1), rates), "side by side"
    assert price.seconds(blocks, rates) - price.seconds(current, rates) == pytest.approx(
        blocks.flops / 128 / rates.exact.ceiling
    )
    small, eight = replace(preset("qwen3-30b-a3b"), sequence=4096), replace(eight, dp=16, ep=4)  # type: ignore[type-var]
    half = predict(small, H100, replace(eight, products="plain"), Software(experts_apart=True))
    late, soon = (
        predict(small, H100, eight, Software(experts_apart=True, scaling=one))
        for one in ("current", "delayed")
    )
    assert soon.iteration_seconds < half.iteration_seconds < late.iteration_seconds, "many small experts"


def test_a_host_that_waits_for_counts_cannot_run_ahead() -> None:
    """Forward and backward each take what the host takes at least, and where exchanges are hidden both together."""
    plan = replace(HALF, dp=8, ep=8, accumulate=2)
    rates = rates_of(H100, plan)

    def of(plan: Plan, host: float, hides: bool = False) -> StepTime:
        software = Software(hides_exchange=hides, block_host_seconds=host)
        return step(describe(MIXTRAL, plan, software=software), rates, plan)

    free, hidden = of(plan, 0.0), of(plan, 0.0, hides=True)
    blocks, block = 2 * MIXTRAL.depth, describe(MIXTRAL, plan).blocks[0]
    launched = [
        sum(op.launches for op in ops) * H100.launch_seconds for ops in (block.forward, block.backward)
    ]
    host = (free.forward_seconds + free.backward_seconds) / MIXTRAL.depth
    late = of(plan, host).seconds["launch"] / blocks
    assert late == pytest.approx(host / 2 + launched[0] - free.forward_seconds / MIXTRAL.depth)
    both = (hidden.forward_seconds + hidden.backward_seconds) / MIXTRAL.depth
    waits = of(plan, host, hides=True).seconds["launch"] / blocks
    assert waits == pytest.approx(host + sum(launched) - both)
    assert of(replace(plan, ep=1), 0.9 * host).seconds["launch"] == 0.0, "no counts: the host runs ahead"


def test_of_an_exchange_that_hides_the_profiled_share_is_hidden() -> None:
    plan = replace(HALF, dp=8, ep=8)
    rates, ways = rates_of(H100, plan), (Software(), Software(hides_exchange=True))
    shown, hidden = (step(describe(MIXTRAL, plan, software=one), rates, plan) for one in ways)
    share = 1 - rates.constants.exchange_hidden_share
    assert hidden.seconds["expert"] == pytest.approx(share * shown.seconds["expert"])


def test_routes_of_all_tokens_are_read_before_those_sent_once_leave() -> None:
    plan = replace(HALF, dp=8, ep=8)
    block = describe(MIXTRAL, plan, software=Software(sends_once=True)).blocks[0]
    leaving, *others = [op for op in (*block.forward, *block.backward) if op.kind == "exchange"]
    rates = rates_of(H100, plan)
    routed, plain = (
        price.collective_seconds(op, rates, 8, 1) for op in (leaving, leaving._replace(elements=0.0))
    )
    assert routed - plain == pytest.approx(8 * MIXTRAL.sequence * rates.constants.routing_seconds)
    assert len(others) == 3
    assert not any(op.elements for op in others)


def test_offloaded_activations_go_over_the_link_twice() -> None:
    line = {"dp": 8, "sharding": "fsdp", "micro_batch": 2, "accumulate": 3}
    here, away = at(**line), at(**line, offload="activations")
    blocks = sum(size for kind, size in here.activations.items())
    over = blocks / ((H100.host_bytes_per_second or 0) * HOST_LINK_SHARE)
    exposed = max(0.0, over - here.forward_seconds) + max(0.0, over - here.backward_seconds)
    assert exposed > 0
    assert away.seconds["offload"] == pytest.approx(3 * exposed, rel=1e-6)
    others = {name: seconds for name, seconds in away.seconds.items() if name != "offload"}
    assert others == {name: seconds for name, seconds in here.seconds.items() if name != "offload"}


def test_an_offloaded_update_runs_in_host_memory() -> None:
    line = {"dp": 8, "sharding": "fsdp"}
    away, kept = at(**line, offload="optimizer"), at(**line).parameters / 8
    rates = rates_of(H100, HALF)
    update = kept * update_bytes(replace(HALF, **line)) / HOST_BYTES_PER_SECOND  # type: ignore[arg-type]
    assert away.seconds["optimizer"] == pytest.approx(update, rel=1e-3)
    # Gradients of 4 bytes go one way while weights of 4 come the other, for either pass.
    over = kept * 8 / rates.host - away.forward_seconds - away.backward_seconds
    assert away.seconds["offload"] == pytest.approx(max(0.0, over), rel=1e-3)


def test_fp8_multiplies_and_casts_once_each() -> None:
    model = preset("gpt-22b")
    assert isinstance(model, DecoderConfig)
    plain, eight = at(model), at(model, products="fp8_tensorwise")
    rates = rates_of(H100, replace(HALF, products="fp8_tensorwise"))
    assert rates.narrow is not None
    rows, d = model.sequence, model.width
    saved = cast = 0.0
    for n, k in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)):
        for one in ((rows, n, k), (rows, k, n), (n, k, rows)):
            over_rows = one == (n, k, rows)
            half = rates.products.seconds(*one, over_rows=over_rows)
            saved += half - rates.narrow.seconds(*one, over_rows=over_rows)
        # Inputs forward and gradients backward: read for their largest number, read again, and written in a byte.
        cast += (rows * k + rows * n) * 5.0 / rates.memory + 2 * rates.kernel_seconds
    assert plain.seconds["gemm"] - eight.seconds["gemm"] == pytest.approx(model.depth * saved, rel=1e-6)
    assert eight.seconds["pointwise"] - plain.seconds["pointwise"] == pytest.approx(
        model.depth * cast, rel=1e-6
    )
    same = ("attention", "output", "optimizer", "data")
    assert [eight.seconds[name] for name in same] == [plain.seconds[name] for name in same]


def test_plain_attention_moves_its_scores_eleven_times() -> None:
    """On a chip that multiplies in no time, what is left is traffic.

    Forward: scores are written, softmax reads and writes them, and the values' product reads them. Backward: a product
    writes gradients, one reads the softmax's result, softmax reads both and writes once, and two products read that.
    Each of the six products moves two of queries, keys, values and results besides.
    """
    model = replace(preset("gpt-22b"), dropout=0.0)
    assert isinstance(model, DecoderConfig)
    fast = replace(H100, achievable_flops=dict.fromkeys(H100.peak_flops, 1e30))
    plan = replace(HALF, attention="plain", token_order="batch_second")
    rates = rates_of(fast, plan)
    scores = 2.0 * model.heads * model.sequence**2
    rows = 2.0 * model.sequence * model.width
    moved = 11 * scores + 12 * rows
    seconds = moved / rates.memory + 8 * rates.kernel_seconds
    assert predict(model, fast, plan).seconds["attention"] == pytest.approx(model.depth * seconds, rel=1e-4)


def test_all_keys_gathered_at_once_hide_behind_nothing() -> None:
    model = replace(LLAMA, sequence=131072)
    assert isinstance(model, DecoderConfig)
    ring, gather = (at(model, cp=8, recompute="full", cp_exchange=kind) for kind in ("ring", "gather"))
    rates = rates_of(H100, HALF)
    each = price.gather_seconds(
        price.group_of(rates, 8, 1), 2.0 * model.sequence * model.layers[0].kv_heads * model.layers[0].head_width * 2,
    )  # fmt: skip
    # Forward and again for the backward pass, whose gradients are scattered; recomputation gathers a third time.
    assert gather.seconds["context"] == pytest.approx(3 * model.depth * each)
    assert ring.seconds["context"] == pytest.approx(3 * model.depth * rates.collective_share * each)
    assert gather.seconds["recompute"] > ring.seconds["recompute"]
    # All of them and their gradients are there while a block runs backward, unless another moment needs more.
    narrow = replace(model, mlp_width=1024, vocabulary=64)
    ring, gather = (at(narrow, cp=8, cp_exchange=kind) for kind in ("ring", "gather"))
    assert gather.memory["working"] > ring.memory["working"]
    assert at(cp_exchange="gather").iteration_seconds == at().iteration_seconds


def test_embedding_and_head_are_gathered_and_scattered_beside_the_blocks() -> None:
    line = {"dp": 64, "sharding": "fsdp", "accumulate": 2}
    large, small = at(**line), at(replace(LLAMA, vocabulary=64), **line)
    rates = rates_of(H100, HALF)
    group = price.group_of(rates, 64, 1)

    def ends(words: int) -> float:
        weights = 2.0 * words * 4096 + 4096
        # Each is copied out of and into flat buffers of 2 bytes, its gradient into one of 4, where nccl divides it.
        return (
            price.gather_seconds(group, 2 * weights)
            + price.gather_seconds(group, 4 * weights)
            + weights * 12 / rates.memory
        )

    found = large.seconds["data"] - small.seconds["data"]
    assert found == pytest.approx(2 * (ends(128256) - ends(64)))


def test_copies_of_shards_are_those_of_the_software() -> None:
    """torch's first FSDP divides gradients by a pass of its own, and Megatron's copies nothing."""
    plan = replace(HALF, dp=64, sharding="fsdp")
    second, first, in_place = (
        predict(LLAMA, H100, plan, software).seconds["data"]
        for software in (Software(), Software(divides_gradients=True), Software(shards_in_place=True))
    )
    each = describe(LLAMA, plan).parameters / rates_of(H100, plan).memory
    assert first - second == pytest.approx(8 * each)
    # Weights for both passes, those of embedding and head once, and gradients.
    ends = 2 * 128256 * 4096 + 4096
    assert second - in_place == pytest.approx(16 * each - 4 * ends / rates_of(H100, plan).memory)


def test_linears_gathered_in_fp8_send_and_hold_half() -> None:
    plan = replace(HALF, dp=64, sharding="fsdp", products="fp8_tensorwise", overlap=False)
    level, products = (predict(LLAMA, H100, replace(plan, gather=kind)) for kind in ("level", "products"))
    work, rates = describe(LLAMA, plan), rates_of(H100, plan)
    share, group = device_share(work, plan), price.group_of(rates, 64, 1)
    block = share.block_dense
    assert level.memory["gathered_weights"] - products.memory["gathered_weights"] == pytest.approx(2 * block)
    # Each block twice, with its copies out of and into flat buffers; and once the scales of all weights.
    saved = (
        price.gather_seconds(group, 2 * block) - price.gather_seconds(group, block) + 2 * block / rates.memory
    )
    scales = price.reduce_seconds(group, 4.0 * share.tensors) + 4 * share.sharded / rates.memory
    found = level.seconds["data"] - products.seconds["data"]
    assert found == pytest.approx(2 * 32 * saved - scales, rel=1e-6)


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_parts_of_attention_are_weighed_and_added_up(kind: str) -> None:
    assert isinstance(LLAMA, DecoderConfig)
    plan = replace(HALF, cp=4, cp_exchange=kind)

    def moved(software: Software, line: Plan = plan) -> list[float]:
        (block,) = describe(LLAMA, line, software=software).blocks
        return [
            sum(op.read + op.written for op in operators if op.name == "attention.parts")
            for operators in (block.forward, block.backward)
        ]

    # Of four parts its own takes all queries, twice where two of its pieces see one half, and the others 3 / 4 of them.
    queries = LLAMA.sequence / 4 * LLAMA.width
    keys = 2 * queries * LLAMA.layers[0].kv_heads / LLAMA.heads
    seen = queries * (1.5 + 3 * 0.75)
    assert moved(Software()) == [seen * 42, seen * 18 + 4 * keys * 34]
    assert moved(Software(adds_parts=True)) == [seen * 6, seen * 6 + 4 * keys * 6]
    assert moved(Software(), HALF) == [0, 0]
    both = at(cp=4, cp_exchange=kind).seconds["attention"]
    one = predict(LLAMA, H100, plan, Software(adds_parts=True)).seconds["attention"]
    assert both > one > at().seconds["attention"] / 4


def test_any_share_of_the_blocks_recomputes() -> None:
    line = {"dp": 8, "sharding": "fsdp", "recompute": "full"}
    every, most = at(**line), at(**line, recompute_every=1.25)
    assert most.seconds["recompute"] == pytest.approx(0.8 * every.seconds["recompute"])
    none = at(dp=8, sharding="fsdp")
    kept = 0.8 * every.memory["activations"] + 0.2 * none.memory["activations"]
    assert most.memory["activations"] == pytest.approx(kept, rel=1e-3)
    assert not problems(Plan.parse("recompute=full recompute_every=1.25"), run=True)


def test_a_launch_that_waits_for_its_kernel_costs_the_host_s_time() -> None:
    plain = at()
    blocking = predict(LLAMA, H100, HALF, Software(launch_blocking=True))
    launches = sum(n * op.launches for n, op in describe(LLAMA, HALF).operators())
    more = launches * rates_of(H100, HALF).constants.blocking_seconds
    assert blocking.iteration_seconds - plain.iteration_seconds == pytest.approx(more)


def test_sgd_keeps_and_moves_one_number_of_each_weight_less() -> None:
    adamw, sgd = (at(dp=8, sharding="fsdp", algorithm=name) for name in ("adamw", "sgd"))
    assert sgd.memory["optimizer"] == adamw.memory["optimizer"] / 2
    fused = Plan(optimizer="fused")
    assert update_bytes(replace(fused, algorithm="sgd")) == update_bytes(fused) - 2 * 4
    assert sgd.seconds["optimizer"] < adamw.seconds["optimizer"]


def test_what_a_search_tries_is_said_by_the_package() -> None:
    space = penstock.Space(tp=(8,), pp=(1,), sharding=("zero1",))
    found = penstock.search(preset("gpt-22b"), H100, 16, space=space)
    assert {(one.plan.tp, one.plan.pp, one.plan.sharding) for one in found} == {(8, 1, "zero1")}
