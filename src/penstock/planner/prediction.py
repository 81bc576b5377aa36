"""Predicted cost of a Plan before it runs: time, memory and utilisation of one optimizer step, and how sure it is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import resources
from itertools import accumulate, pairwise

from penstock.config import rules
from penstock.config.formats import Products
from penstock.config.machine import Machine
from penstock.config.model import ModelConfig, with_stacks
from penstock.config.plan import Plan
from penstock.config.stack import Stack
from penstock.planner import price
from penstock.planner.describe import describe, totals
from penstock.planner.learning import WHOLE, Learning, learning_part
from penstock.planner.loads import EVEN
from penstock.planner.memory import forward_bytes, memory, pass_bytes
from penstock.planner.operators import PENSTOCK, Part, Software, Workload
from penstock.planner.pipeline import in_flight, stage_counts
from penstock.planner.rates import Rates, rates_of
from penstock.planner.recompute import NOTHING, Recompute, computed_again
from penstock.planner.step import PAGE_BYTES, KindSeconds, StepTime, layout_of, mapped_alone, part_time, step
from penstock.planner.terms import joined, storing
from penstock.planner.traced import as_planned
from penstock.planner.traffic import transfer_seconds
from penstock.report.page import cell
from penstock.report.units import duration
from penstock.schedules import Costs, play_shared, schedule_of

CONTEXT_BYTES = 0.9 * 2**30
"""Bytes that one process uses on a GPU before any tensor: its context, and the handles and workspaces of libraries."""
MARGIN = 0.98
"""Share of a device's memory that a prediction may fill: 13 of the 14 published rows of tensors' memory are predicted
within 1.8 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Time and memory of one optimizer step. Seconds are the slowest device's, bytes the fullest device's."""

    plan: Plan
    machine: str
    iteration_seconds: float
    """One optimizer step: `plan.accumulate` micro-batches and one update."""
    samples_per_second: float
    """Samples per second over all devices."""
    memory_bytes: int
    """Peak, without the memory that allocator and libraries add on one device; with a margin for it on several."""
    fits: bool
    """Whether `memory_bytes` is within `room`: the machine's memory minus what the CUDA context and libraries take."""
    model_flops_per_second_per_gpu: float
    """FLOPs of the model's forward and backward passes, with full attention; recomputation is not counted."""
    mfu: float
    """Model FLOP/s as a share of `peak_flops`."""
    hfu: float
    """The same with recomputed FLOPs included."""
    peak_flops: float
    """The machine's peak in the type in which the plan computes linear layers."""
    peak_name: str
    seconds: dict[str, float]
    """`iteration_seconds` by part."""
    memory: dict[str, int]
    """`memory_bytes` by part."""
    activations: dict[str, int] = field(default_factory=dict)
    """`memory["activations"]` by kind."""
    micro_batches_held: float = 1.0
    """Micro-batches whose activations the pipeline's first stage holds at its high-water mark; 1 without a pipeline."""
    gpus: int = 1
    global_batch: int = 0
    """Samples of one optimizer step, over all devices."""
    tokens_per_sample: int = 0
    parameters: int = 0
    bubble_fraction: float = 0.0
    """Idle seconds of the pipeline over its busy seconds: (p-1)/(v m) for equal stages, less under zero_bubble."""
    forward_seconds: float = 0.0
    """Forward pass of the slowest stage, for one micro-batch."""
    backward_seconds: float = 0.0
    """Backward pass of that stage, recomputation included."""
    weight_gradient_seconds: float = 0.0
    """Part of `backward_seconds` for the gradients of weights, which a zero-bubble schedule defers."""
    memory_limit_bytes: int = 0
    """The machine's memory; 0 where it is unknown."""
    interval: Interval | None = None
    """The error of earlier predictions of this kind."""

    def _repr_html_(self) -> str:
        """HTML for a notebook."""
        return cell(self)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens over all devices, per device."""
        return self.samples_per_second * self.tokens_per_sample / self.gpus

    def days(self, samples: float) -> float:
        """Days to train on `samples` samples."""
        return samples / self.samples_per_second / 86400

    def gpu_hours(self, samples: float) -> float:
        """Device hours to train on `samples` samples."""
        return samples / self.samples_per_second / 3600 * self.gpus


def room(machine: Machine) -> float:
    """Bytes that a layout may take on one device: infinite where the machine's memory is unknown."""
    if not machine.memory_bytes:
        return math.inf
    return MARGIN * machine.memory_bytes - (CONTEXT_BYTES if machine.device == "cuda" else 0.0)


def predict(
    model: ModelConfig, machine: Machine, plan: Plan, software: Software = PENSTOCK, *, real: float = 1.0,
    words: float = 1.0, uneven: Mapping[int, float] = EVEN, learns: Learning = WHOLE,
) -> Prediction:  # fmt: skip
    """Predict one optimizer step of `model` under `plan` on the devices of `machine` that the plan takes.

    `software` states differences from Penstock's own training; `real` and `words` describe a batch, and `uneven` how
    evenly experts are visited: see `describe`. `learns` is the trained part of the model, if not all of it.

    Raises ConfigError, with every reason, if the machine cannot run the plan or the layout is impossible.
    """
    _refuse(model, machine, plan)
    work = describe(model, plan, machine, software, real=real, words=words, uneven=uneven)
    work = work if learns == WHOLE else learning_part(work, learns)
    rates = rates_of(machine, plan, launch_blocking=software.launch_blocking)
    return prediction_of(work, machine, plan, rates, totals(model).parameters)


def predict_pass(
    model: ModelConfig, machine: Machine, plan: Plan, *, weights: Products = "plain", heads: bool = False
) -> float:
    """Seconds of one forward pass in inference, without loss and dropout, over `plan.micro_batch` samples on one
    device, each operator launched by Python.

    Linear layers of blocks, and with `heads` also of heads, store their weights in the form `weights`. If `machine` has
    no rate of such layers, `penstock.planner.terms.assumption` names the rate used instead.

    Raises ConfigError as `predict` does.
    """
    model = with_stacks(model, _without_chance)
    _refuse(model, machine, plan)
    work = describe(model, plan, machine, storing=storing(machine, weights, heads=heads))
    rates = rates_of(machine, plan, weights=weights)
    busy = launches = mapped = 0.0
    for part in work.parts:
        operators = [op for op in joined(part, machine, plan, weights) if op.module != "loss"]
        busy += part.count * sum(price.seconds(op, rates) for op in operators)
        launches += part.count * sum(op.launches for op in operators)
        mapped += part.count * sum(mapped_alone(op) for op in operators)
    if not rates.cpu:  # launches run ahead of the device
        return max(busy, launches * machine.launch_seconds)
    pages = mapped / PAGE_BYTES if plan.host_memory == "release" else 0.0
    return (
        busy + launches * (machine.operator_seconds or machine.launch_seconds) + pages * machine.page_seconds
    )


def predict_pass_bytes(model: ModelConfig, machine: Machine, plan: Plan) -> tuple[int, float]:
    """The number of parameters in the pass of `predict_pass`, and the peak bytes of all other tensors in it.

    Raises ConfigError as `predict` does.
    """
    model = with_stacks(model, _without_chance)
    _refuse(model, machine, plan)
    work = describe(model, plan, machine)
    return work.parameters, forward_bytes(work)


def _without_chance(stack: Stack) -> Stack:
    return replace(stack, dropout=0.0, attention_dropout=None, mlp_dropout=None, drop_path=0.0)


def predict_workload(work: Workload, machine: Machine, plan: Plan) -> Prediction:
    """Predict, as `predict` does, from known operators: from `describe`, or recorded from a model in fp32."""
    _refuse(None, machine, plan)
    work = work if work.kept_bytes is None else as_planned(work, plan)
    return prediction_of(work, machine, plan, rates_of(machine, plan), work.parameters)


@lru_cache(maxsize=4096)
def _refuse(model: ModelConfig | None, machine: Machine, plan: Plan) -> None:
    """Raise ConfigError with every reason why there is nothing to predict."""
    rules.require(plan, model, machine)


def prediction_of(
    work: Workload, machine: Machine, plan: Plan, rates: Rates, parameters: int, *,
    parts: dict[str, float] | None = None,
) -> Prediction:  # fmt: skip
    """Predict, as `predict` does, for a layout known to be possible; `parts` is its memory if that is known already."""
    time = step(work, rates, plan)
    share_processors(time, work, rates, plan)
    seconds = time.total
    parts = memory(work, plan, cpu=rates.cpu) if parts is None else parts
    needed_bytes = int(sum(parts.values()))
    useful, repeated = work.model_flops, repeated_flops(work, Recompute.of(plan, work))
    # All devices of a replica share one micro-batch.
    rate = plan.accumulate / (plan.pp * seconds)
    kinds, activations = pass_bytes(work, plan).activations, parts["activations"]
    kept = sum(kinds.values())
    return Prediction(
        plan=plan, machine=machine.name, iteration_seconds=seconds, samples_per_second=plan.global_batch / seconds,
        memory_bytes=needed_bytes, fits=needed_bytes <= room(machine), model_flops_per_second_per_gpu=useful * rate,
        mfu=useful * rate / rates.peak, hfu=(useful + repeated) * rate / rates.peak, peak_flops=rates.peak,
        peak_name=rates.peak_name, seconds=time.seconds, memory={name: int(size) for name, size in parts.items()},
        activations={name: int(activations * size / kept) for name, size in kinds.items() if size and activations},
        micro_batches_held=in_flight(plan) if plan.pp > 1 else 1.0, gpus=plan.gpus, global_batch=plan.global_batch,
        tokens_per_sample=work.tokens, parameters=parameters, bubble_fraction=time.bubble_fraction,
        forward_seconds=time.forward_seconds, backward_seconds=time.backward_seconds,
        weight_gradient_seconds=time.weight_gradient_seconds, memory_limit_bytes=int(machine.memory_bytes),
        interval=interval_of(vision=work.vision, machine=machine),
    )  # fmt: skip


@lru_cache(maxsize=8192)
def repeated_flops(work: Workload, how: Recompute = NOTHING) -> float:
    """FLOPs of one micro-batch that are recomputed."""
    again = 0.0
    for part in work.parts:
        again += part.count * sum(op.repeated_flops for op in (*part.forward, *part.backward))
        for way in how.ways(part):
            again += part.count * way.share * sum(op.flops for op in computed_again(part, way))
    return again


ROWS_OF = ("a100-40g", "a100-80g", "h100", "h200", "h800")
"""Machines whose chip has published rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Range of measured over predicted seconds for rows of one kind: four of five are between `low` and `high`."""

    low: float
    high: float
    spread: float
    """Difference between two rows of one model that error alone can cause: four of five errors are within it of their
    model's mean. Layouts that differ by no more than this are called equal."""
    rows: int
    words: str

    def seconds(self, predicted: float) -> str:
        """The interval around a prediction, for a reader."""
        low, high = (duration(bound * predicted, 3) for bound in (self.low, self.high))
        return f"{low} to {high} (80 % interval, from the errors on {self.words})"


def interval_of(*, vision: bool, machine: Machine) -> Interval:
    """The interval of predictions of language or vision models on a machine.

    For a chip without published rows it is the widest interval of its kind, and its text calls it a guess.
    """
    table = _intervals()
    if machine.device == "cpu":
        return table["cpu"]
    hopper = "fp8" in machine.peak_flops
    interval = table["vision" if vision else "hopper" if hopper else "ampere"]
    if machine.source == "measured" or machine.name.removesuffix(" (changed)") in ROWS_OF:
        return interval
    measured = (table["vision"], table["hopper"], table["ampere"])
    return Interval(
        low=min(one.low for one in measured), high=max(one.high for one in measured),
        spread=max(one.spread for one in measured), rows=0,
        words=f"rows of other chips, for none was made on {machine.name}: a guess",
    )  # fmt: skip


@cache
def _intervals() -> dict[str, Interval]:
    text = resources.files("penstock.planner").joinpath("intervals.json").read_text(encoding="utf-8")
    return {kind: Interval(**values) for kind, values in json.loads(text).items()}


def stage_costs(model: ModelConfig, machine: Machine, plan: Plan) -> Costs:
    """Seconds of each stage's passes and transfers for one micro-batch, on a device of `machine`."""
    return costs_of(describe(model, plan, machine), rates_of(machine, plan), plan)


def costs_of(work: Workload, rates: Rates, plan: Plan) -> Costs:
    """Costs as from `stage_costs`, of a described model."""
    machine, layout = rates.machine, layout_of(plan, work)
    host = (machine.operator_seconds or machine.launch_seconds) if rates.cpu else 0.0

    def passes(part: Part) -> tuple[float, float, float]:
        time = part_time(part, rates, layout)
        ahead, behind = (host * sum(op.launches for op in side) for side in (part.forward, part.backward))
        return time.forward.total + ahead, time.back - time.weights + behind, time.weights

    edges = [0, *accumulate(stage_counts(work, plan.pp * plan.virtual))]
    ends = [passes(part) for part in work.parts if part.block is None]

    def column(number: int) -> list[float]:
        """One of the three, of each stage."""
        blocks = work.each(lambda part: passes(part)[number])
        stages = [sum(blocks[begin:end]) for begin, end in pairwise(edges)]
        stages[0] += ends[0][number]
        stages[-1] += ends[-1][number]
        return stages

    return Costs(
        forward=column(0), backward_input=column(1), backward_weight=column(2),
        transfer=transfer_seconds(work, rates, plan),
    )  # fmt: skip


def share_processors(time: StepTime, work: Workload, rates: Rates, plan: Plan) -> None:
    """Correct a pipeline's computing and idle times where its stages share a CPU: while one stage waits, the others
    compute faster."""
    alone = rates.machine.alone_speedup
    if not rates.cpu or plan.pp == 1 or alone <= 1:
        return
    costs = replace(costs_of(work, rates, plan), transfer=0.0)
    works = play_shared(schedule_of(plan), costs, 1.0).busy
    slowest = works.index(max(works))
    shared = play_shared(schedule_of(plan), costs, alone)
    busy = shared.busy[slowest]
    for name in (*KindSeconds._fields, "recompute", "output", "launch"):
        time.seconds[name] *= busy / works[slowest]
    time.seconds["bubble"] = shared.makespan - busy
    time.bubble_fraction = time.seconds["bubble"] / busy
