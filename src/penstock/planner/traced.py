"""Operators that were recorded from a model in fp32, converted to how a Plan would run them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from penstock.config.formats import BYTES, PRODUCTS, Product
from penstock.config.numerics import Numerics, numerics_of
from penstock.config.plan import Plan
from penstock.planner.operators import MATRIX, Op, Part, Workload

_ALONE = MATRIX | {"attention"}
_COMPUTING = ("norm", "softmax", "activation")
"""Kinds of operators that take longer on a CPU than moving their bytes."""


def recorded(
    operators: Iterable[Op], *, samples: int, parameters: int, tensors: int, kept: int, working: int, units: int = 1
) -> Workload:  # fmt: skip
    """The workload of a model that was recorded with a single batch; `kept` and `working` are bytes of activations."""
    operators = tuple(operators)
    part = Part(
        "model", 1, tuple(op for op in operators if op.forward), tuple(op for op in operators if not op.forward),
        parameters=parameters, tensors=tensors,
    )  # fmt: skip
    return Workload(parts=(part,), samples=samples, units=units, kept_bytes=kept, working_bytes=working)


def as_planned(work: Workload, plan: Plan) -> Workload:
    """`work` in the types of a plan, with its casts, and with merged operators if the plan compiles."""
    return _as_planned(work, numerics_of(plan), plan.compile != "none")


@lru_cache(maxsize=256)
def _as_planned(work: Workload, numerics: Numerics, compiled: bool) -> Workload:
    product, stream = BYTES[numerics.compute], BYTES[numerics.residual]
    parts = []
    for part in work.parts:
        passes = []
        for run in (part.forward, part.backward):
            # A compiled loss reads half logits directly and casts them in its kernel.
            exact = product == 2 and not compiled
            ops = [op if exact and op.module == "loss" else _retyped(op, stream, product) for op in run]
            if exact:
                ops = [each for op in ops for each in _with_cast(op)]
            if numerics.gathered == "fp32" and product == 2:
                ops = [*_casts(ops, part), *ops]
            if compiled:
                ops = _merged(ops)
            if numerics.products != "plain":
                row = PRODUCTS[numerics.products]
                ops = [op._replace(narrow=_is_narrow(op, row)) for op in ops]
                ops = [*_quantized(ops), *ops]
            passes.append(tuple(ops))
        parts.append(replace(part, forward=passes[0], backward=passes[1]))
    kept_bytes = None
    if work.kept_bytes is not None:
        exact_bytes = 0.0
        if product == 2 and not compiled:
            exact_bytes = sum(
                op.written for part in work.parts for op in part.forward if _makes_logarithms(op)
            )
        kept_bytes = exact_bytes + (work.kept_bytes - exact_bytes) * product / 4
    return replace(work, parts=tuple(parts), kept_bytes=kept_bytes)


def _retyped(op: Op, stream: float, product: float) -> Op:
    """Traffic in the types of a plan: norms move the residual stream, products their factors, other operators some of
    both."""
    if op.kind == "norm":
        size = stream
    elif op.kind in ("dropout", "torch_dropout", "pointwise", "copy", "reduce"):
        size = (stream + product) / 2
    else:
        size = product
    return op._replace(read=op.read * size / 4, written=op.written * size / 4) if size != 4 else op


def _makes_logarithms(op: Op) -> bool:
    """Whether the operator makes a loss's log-probabilities, which are kept for the backward pass, or their gradient.
    Op lists and libraries compute a loss from logits in fp32."""
    return op.module == "loss" and op.kind == "softmax"


def _with_cast(op: Op) -> list[Op]:
    """An operator with the cast of half logits to fp32 before a loss, or of their gradient back after it."""
    if not _makes_logarithms(op):
        return [op]
    size = op.elements
    if op.forward:
        return [Op("cast.logits", "copy", read=2 * size, written=4 * size, elements=size), op]
    return [op, Op("cast.logits", "copy", False, read=4 * size, written=2 * size, elements=size)]


def _casts(operators: Iterable[Op], part: Part) -> list[Op]:
    """Casts that autocast adds: each weight to half and its gradient back, and the output of each norm to half."""
    casts, forward = [], True
    for op in operators:
        forward = op.forward
        if op.kind == "norm":
            size = op.elements
            casts.append(Op("cast.norm", "copy", forward, read=4 * size, written=2 * size, elements=size))
    moved = 2.0 * part.parameters
    read, written = (2 * moved, moved) if forward else (moved, 2 * moved)
    casts.append(Op("cast.weights", "copy", forward, read=read, written=written, launches=part.tensors))
    return casts


def _merged(operators: Iterable[Op]) -> list[Op]:
    """Neighbouring operators that a compiler merges into one kernel: it reads the largest operator's input, and
    computes all of them."""
    merged: list[Op] = []
    for alone, neighbours in groupby(operators, _stands_alone):
        group = list(neighbours)
        if alone or len(group) == 1:
            merged += group
            continue
        merged.append(Op(
            "+".join(op.name for op in group), "pointwise", group[0].forward, read=max(op.read for op in group),
            written=max(op.written for op in group), elements=max(op.elements for op in group),
        ))  # fmt: skip
        merged += [op._replace(read=0.0, written=0.0, launches=0) for op in group if op.kind in _COMPUTING]
    return merged


def _stands_alone(op: Op) -> bool:
    """Whether no compiler merges the operator with its neighbours: a product, attention, a fused operator."""
    return op.kind in _ALONE or op.fused


def _is_narrow(op: Op, row: Product) -> bool:
    """Whether a product runs in 8 bits if the plan says so: it is of a linear in a block, and both its sizes fit."""
    sizes = (op.m, op.n) if op.over_rows else (op.n, op.k)
    return op.narrow and op.form in row.passes and not any(size % row.multiple[0] for size in sizes)


def _quantized(operators: Iterable[Op]) -> list[Op]:
    """Operators that 8 bits add to each product, as `describe` lists them for its own products."""
    added = []
    for op in operators:
        if not op.narrow:
            continue
        rows, weights = op.m * op.k, op.n * op.k
        if op.over_rows:
            cast, turned = 0.0, rows + weights
        else:
            cast, turned = (rows + weights, 0.0) if op.forward else (rows, float(weights))
        added.append(Op(
            "quantize", "quantize", op.forward, read=4 * cast + turned, written=cast + turned, elements=cast + turned
        ))  # fmt: skip
    return added
