"""What is foretold of several processes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.config.machine import Link, Machine, load_machine
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.ladder.measure import rank_machine
from penstock.ladder.space import Corrected, expected_gain
from penstock.planner import Prediction, predict
from penstock.planner.price import group_of, reduce_seconds
from penstock.planner.rates import rates_of

MODEL = PRESETS["vit-s16"]
CPU = Machine(
    name="toy", device="cpu", source="measured", peak_flops={"fp32": 1e11}, memory_bytes_per_second=2e10,
    memory_bytes=8e9,
)  # fmt: skip
LINK = Link(collective_bytes_per_second=1e9, collective_seconds=1e-3)


def _predicted(line: str, machine: Machine = CPU, link: Link = LINK) -> Prediction:
    plan = Plan.parse(line)
    return predict(MODEL, rank_machine(machine, plan.gpus, link), plan)


def test_ranks_share_a_cpu() -> None:
    half = rank_machine(CPU, 2, LINK)
    assert half.peak_flops == {"fp32": 5e10}
    assert half.memory_bytes_per_second == 1e10
    assert half.memory_bytes == 4e9
    alone = predict(MODEL, CPU, Plan())
    both = _predicted("dp=2", link=Link(collective_bytes_per_second=1e15))
    # With a link that costs nothing, two halves of a CPU are one CPU.
    assert both.samples_per_second == pytest.approx(alone.samples_per_second, rel=1e-3)


def test_communication_is_the_planners() -> None:
    found = _predicted("dp=2")
    plan = Plan.parse("dp=2")
    group = group_of(rates_of(rank_machine(CPU, 2, LINK), plan), 2, 1)
    assert group.bandwidth == 1e9
    gradients = 4.0 * found.parameters
    calls = -(-gradients // (25 * 2**20))
    assert found.seconds["data"] == pytest.approx(reduce_seconds(group, gradients, calls))
    assert found.seconds["data"] > calls * LINK.collective_seconds + gradients / 1e9
    # Shards send half as much again (gather twice, scatter once), in three collectives for each block.
    shards = _predicted("dp=2 sharding=fsdp")
    assert shards.seconds["data"] > 1.4 * found.seconds["data"]
    assert shards.seconds["optimizer"] == pytest.approx(found.seconds["optimizer"] / 2)
    assert _predicted("dp=2 sharding=fsdp accumulate=2").seconds["data"] == pytest.approx(
        2 * shards.seconds["data"]
    )


def test_shards_keep_no_copies_of_the_whole_for_autocast() -> None:
    machine = replace(CPU, peak_flops={"fp32": 1e11, "bf16": 1e11})
    words = "dp=2 precision=O1 micro_batch=64"  # so many samples that the peak is that of their activations
    replicas, shards = _predicted(words, machine), _predicted(f"{words} sharding=fsdp", machine)
    copies = replicas.activations["cast_weights"]
    # Of the blocks' matrices: four of attention, and two of the MLP, four times as wide.
    assert copies == 2 * MODEL.depth * 12 * MODEL.width**2
    assert shards.memory["activations"] == replicas.memory["activations"] - copies
    assert sum(shards.activations.values()) == pytest.approx(shards.memory["activations"])


def test_memory_of_replicas_and_shards() -> None:
    alone = predict(MODEL, CPU, Plan())
    replicas, shards, groups = (
        _predicted(f"dp=4 {words}") for words in ("", "sharding=fsdp", "sharding=hsdp shard=2")
    )
    assert replicas.memory["buckets"] == 4 * alone.parameters
    for part in ("weights", "optimizer"):
        assert shards.memory[part] == alone.memory[part] / 4
        assert groups.memory[part] == alone.memory[part] / 2
    assert shards.memory["activations"] == alone.memory["activations"]
    assert shards.memory_bytes < groups.memory_bytes < replicas.memory_bytes
    both = replace(CPU, peak_flops={"fp32": 1e11, "bf16": 1e11})
    half, masters = (_predicted(f"dp=4 sharding=fsdp {words}", both) for words in ("", "precision=O2"))
    assert masters.memory["master_weights"] == 0
    assert masters.memory["weights"] == half.memory["weights"]
    assert masters.memory["gathered_weights"] == half.memory["gathered_weights"] // 2


def test_on_gpus_communication_hides() -> None:
    h100 = load_machine("h100")
    line, fast = "dp=4 micro_batch=256 precision=O1 attention=auto", Link(collective_bytes_per_second=3e11)
    found = _predicted(line, h100, fast)
    slow = _predicted(line, h100, Link(collective_bytes_per_second=1e9))
    group = group_of(rates_of(rank_machine(h100, 4, fast), found.plan), 4, 1)
    whole = reduce_seconds(group, 4.0 * found.parameters)
    assert found.seconds["data"] < 0.2 * whole
    assert slow.seconds["data"] > 0.1  # 88 MB of gradients, twice over 1 GB/s, less the backward pass
    assert found.gpus == 4
    assert found.samples_per_second == pytest.approx(4 * 256 / found.iteration_seconds)


def test_a_correction_carries_over_to_settings_that_share_choices() -> None:
    corrected = Corrected()
    exact = {("", "", ""): 0.0, ("half", "", ""): -0.5, ("", "fused", ""): 0.0}
    corrected.learn({key: (error, 0.0) for key, error in exact.items()})
    assert corrected.mean(("half", "", "")) == pytest.approx(-0.5, abs=0.02)
    assert -0.5 < corrected.mean(("half", "", "whole")) < -0.2
    assert corrected.mean(("", "fused", "whole")) == pytest.approx(0.0, abs=0.1)
    # What was measured is known; what shares nothing new is better known than what does.
    assert corrected.deviation(("half", "", "")) < 0.02
    assert corrected.deviation(("half", "fused", "")) < corrected.deviation(("half", "fused", "whole"))


def test_what_was_measured_badly_corrects_little() -> None:
    corrected = Corrected()
    corrected.learn({("",): (0.0, 0.0), ("half",): (-0.5, 1.0)})
    assert -0.05 < corrected.mean(("half",)) < 0
    assert corrected.deviation(("half",)) > 0.1


def test_the_expected_gain_is_that_of_a_normal_variable_above_zero() -> None:
    rng = random.Random(0)
    drawn = [max(0.0, rng.gauss(-0.05, 0.1)) for _ in range(100_000)]
    assert expected_gain(-0.05, 0.1) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert expected_gain(0.2, 0.0) == 0.2
    assert expected_gain(-0.2, 0.0) == 0.0
