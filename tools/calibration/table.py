"""What a published row is, and how the tables are read that lie beside this file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from penstock.config.machine import Machine
from penstock.config.model import DecoderConfig, ModelConfig, preset
from penstock.config.plan import Plan
from penstock.planner.constants import DEFAULT, Constants
from penstock.planner.describe import describe
from penstock.planner.operators import Op, Software, Workload
from penstock.planner.rates import LINE, exponentials_per_second, rates_of
from penstock.planner.step import step

FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure. `predict` gives the planner's, in the same unit, under some constants."""

    table: str
    name: str
    model: str
    """What is left out together in cross-validation."""
    measured: float
    predict: Callable[[Constants], float]
    section: str = ""
    samples: float = 0.0
    """Samples of a step: sections that vary them are ranked by samples per second."""


@cache
def read(table: str) -> tuple[dict[str, str], ...]:
    """The rows of a table; its first line is the source."""
    text = (FOLDER / f"{table}.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()[1:]))


def source(table: str) -> str:
    """Where a table comes from."""
    text = (FOLDER / f"{table}.csv").read_text(encoding="utf-8")
    return text.splitlines()[0].removeprefix("# ").removeprefix('"').removesuffix('"')


def decoder(name: str) -> DecoderConfig:
    """The preset called `name`, which must be a decoder."""
    found = preset(name)
    assert isinstance(found, DecoderConfig)
    return found


TORCH = Software(loss="torch")
"""Software that no source says more of."""

Rewrite = Callable[[Workload, Plan, Machine], Workload]
"""What a source's software makes of the operators that the planner lists."""


def with_fused_loss(work: Workload, plan: Plan, machine: Machine) -> Workload:
    """One kernel of the loss reads the output as it is, and writes its gradient in the same type."""

    def changed(operators: tuple[Op, ...]) -> list[Op]:
        found = []
        for op in operators:
            if op.name == "loss.cast":
                size = op.elements * 2
                kept = size if op.forward else 0.0
                found.append(
                    op._replace(name="loss", read=size, written=0.0 if op.forward else size, kept=kept)
                )
            elif not op.name.startswith("loss."):
                found.append(op)
        return found

    return _rewritten(work, changed)


def as_torch_does(work: Workload, plan: Plan, machine: Machine, *, gathered: float = 1.0) -> Workload:
    """Tensor parallelism as torch's DTensor does it, by its code.

    `gathered` is the share that is sent of what a gather moves in half precision: a half where it is cast to fp8 first.
    A product's gathered inputs are kept for its backward pass, not gathered again. Rows are gathered and scattered
    along the second dimension, of tokens: nccl knows the first alone, so all that is moved is also copied. Products cut
    into pieces (`async_tensor_parallel`) write each piece where it belongs; what is a sum of several products, as the
    inputs' gradients of queries, keys and values are, they cannot cut.
    """

    def changed(operators: tuple[Op, ...]) -> list[Op]:
        found = []
        for op in operators:
            if op.axis != "tensor" or op.kind not in ("gather", "scatter"):
                found.append(op)
                continue
            if op.hides and op.kind == "gather":
                continue
            share = gathered if op.kind == "gather" else 1.0
            found.append(op._replace(read=share * op.read, uncut=op.hides))
            moved = share * op.read
            if plan.tp_overlap != "all" or op.hides:
                found.append(Op(f"{op.name}.copy", "copy", op.forward, read=moved, written=moved))
            elif op.kind == "scatter":
                # The pieces that came from all others are added up when they are all there.
                found.append(Op(f"{op.name}.add", "copy", op.forward, read=moved, written=moved / plan.tp))
        return found

    return _rewritten(work, changed)


def with_layers_apart(
    work: Workload, plan: Plan, machine: Machine, *, shared: float, before: Rewrite | None = None
) -> Workload:
    """Queries, keys and values, and both inputs of a gated perceptron, made by layers of their own, as in torchtitan's
    models: gradients of what these read are added up, by one kernel where blocks are compiled, else two at a time.

    There are `shared` as many heads of keys and values as of queries. Where that is less than one, they are written
    for each query before attention, and their gradients are added up (`repeat_kv` of its `model.py`). `before` rewrites
    the operators first.
    """
    work = work if before is None else before(work, plan, machine)

    def changed(operators: tuple[Op, ...]) -> list[Op]:
        found = []
        for op in operators:
            found.append(op)
            layers = {"attention.qkv.input": 3, "mlp.up.input": 2}.get(op.name, 1)
            if layers > 1:
                reads, writes = (2 * layers - 2, layers - 1) if plan.compile == "none" else (layers, 1)
                found.append(Op("sum", "copy", False, read=reads * op.written, written=writes * op.written))
            if op.name == "attention" and shared < 1:
                written = 2 * op.elements * 2.0
                read = shared * written
                pair = (read, written) if op.forward else (written, read)
                found.append(Op("repeat", "copy", op.forward, read=pair[0], written=pair[1]))
        return found

    return _rewritten(work, changed)


def by_fp32_units(work: Workload, plan: Plan, machine: Machine) -> Workload:
    """Products of scores and values whose rows do not begin at multiples of 16 bytes, without tensor cores. Heads are
    widened to whole cache lines, for what fp32 units load needs no such rows."""

    def changed(operators: tuple[Op, ...]) -> list[Op]:
        return [
            op._replace(exact=True, n=-(-op.n // LINE) * LINE, k=-(-op.k // LINE) * LINE)
            if op.kind == "bmm" and (op.n % 8 or op.k % 8)
            else op
            for op in operators
        ]

    return _rewritten(work, changed)


RANDOM_OPERATIONS = 80.0
"""Integer operations of one random number by Philox: ten rounds of two wide products, which are two operations each,
two exclusive ors and two additions. They make four numbers, but XLA lays the four side by side, and so forms each
alone."""
INTEGERS = 4
"""Integer operations of a multiprocessor in the time of one exponential: 64 and 16 per clock (CUDA C++ Programming
Guide, arithmetic instructions)."""
RANDOM_BYTES = 4.0


def as_xla_does(work: Workload, plan: Plan, machine: Machine) -> Workload:
    """The kernels that XLA made of a step on GPUs in 2023, when its softmax by Triton and cuDNN's attention were off
    unless asked for.

    A reduction ends a kernel. So softmax reads scores for their largest, again for the sum of exponentials and again
    for the result, and its gradient reads both of its inputs twice. A norm reads its rows twice, and its gradient once
    for the sums over rows, once for those over columns and once for the result. Dropout is part of the kernel before
    it, but its random numbers, of four bytes each, are made by a kernel of their own.
    """
    integers = INTEGERS * exponentials_per_second(machine.peak_flops["bf16"], machine.multiprocessors or 1)
    # In bytes that take as long to move.
    made = RANDOM_OPERATIONS / integers * machine.memory_bytes_per_second * DEFAULT.memory_share

    def changed(operators: tuple[Op, ...]) -> list[Op]:
        found = []
        for op in operators:
            if op.kind == "softmax" and op.name.startswith("attention"):
                op = op._replace(read=op.read * (3 if op.forward else 2))
            elif op.kind == "norm":
                op = op._replace(read=op.read * (2 if op.forward else 3))
            elif op.name.endswith("dropout") and op.forward:
                size = op.elements
                found.append(Op("random", "copy", read=made * size, elements=size))
                op = op._replace(read=RANDOM_BYTES * size, written=size)
            elif op.name.endswith("dropout"):
                op = op._replace(read=op.elements, written=0.0)
            found.append(op)
        return found

    return _rewritten(work, changed)


def _rewritten(work: Workload, changed: Callable[[tuple[Op, ...]], Iterable[Op]]) -> Workload:
    parts = [
        replace(part, forward=tuple(changed(part.forward)), backward=tuple(changed(part.backward)))
        for part in work.parts
    ]
    return replace(work, parts=tuple(parts))


def iteration_seconds(
    model: ModelConfig,
    machine: Machine,
    plan: Plan,
    software: Software = TORCH,
    rewrite: Rewrite | None = None,
) -> Callable[[Constants], float]:
    """The planner's seconds of one step under given constants."""
    work = describe(model, plan, machine.device, software)
    if rewrite is not None:
        work = rewrite(work, plan, machine)

    def predict(constants: Constants) -> float:
        rates = rates_of(machine, plan, constants, launch_blocking=software.launch_blocking)
        return step(work, rates, plan).total

    return predict
