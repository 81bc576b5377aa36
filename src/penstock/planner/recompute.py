"""Recomputation: the operators that run again, the memory that a part then keeps, and the choice under a memory budget.

A block recomputes in one of these ways; words joined by a plus apply together.

| way | keeps | runs again |
|---|---|---|
| `selective` | all but scores | operators on scores; a fused kernel has none |
| `attention`, `mlp` | the input of that part | that part, up to the last tensor that gradients need |
| `early` | the block's input | the block, up to that tensor, as torch's own checkpointing |
| `full` | the block's input | the whole block |
| `operators` | fused attention and every other product with weights | all else, as torch's per-operator policy |
| `elementwise` | attention and every product | norms, activations, dropout and sums |
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

from penstock.config.model import ModelConfig, stacks
from penstock.config.plan import Plan
from penstock.planner.operators import COLLECTIVE, MATRIX, Op, Part, Workload
from penstock.planner.pipeline import most_blocks
from penstock.report.units import GIB

CHOICES = ("selective", "mlp", "selective+mlp", "attention", "attention+mlp", "elementwise", "early")
"""Ways that a budget chooses from."""
FLOPS_PER_BYTE = 100.0
"""FLOPs that take as long as moving one byte, by which a budget compares operators: between a CPU's 10 and an H100's
300. It only orders choices."""
KEPT_PRODUCTS = {"operators": 2, "elementwise": 1}
"""Ways that keep the output of one in n products, with n."""
_LINK = 10.0
"""Factor by which moving a byte between devices is slower."""


class Recompute(NamedTuple):
    """Recomputation as set in a Plan."""

    kind: str = "none"
    """One of the ways above, `none`, or `budget`."""
    share: float = 1.0
    """Share of the blocks that recompute."""
    compiled: bool = False
    """Whether a result that no gradient needs is dropped."""
    layers_apart: bool = False
    """Whether `pieces` of a product count one by one."""
    chosen: tuple[tuple[Part, tuple[tuple[str, int], ...]], ...] = ()
    """Number of blocks of each kind that recompute in each way, where a budget has chosen."""

    @classmethod
    def of(cls, plan: Plan, work: Workload | None = None) -> Recompute:
        """The recomputation of a plan; a budget chooses from the operators of `work`."""
        compiled = plan.compile != "none"
        if plan.recompute != "budget":
            layers_apart = work is not None and work.software.layers_apart
            return cls(plan.recompute, 1 / plan.recompute_every, compiled, layers_apart)
        assert work is not None
        chosen = choose(work, allowed_bytes(work, plan), compiled)
        return cls("budget", 1.0, compiled, chosen=chosen)

    def ways(self, part: Part) -> tuple[Recompute, ...]:
        """The ways in which the blocks of a part recompute; their shares add up to 1."""
        if part.block is None or self.kind == "none":
            return (NOTHING,)
        if self.kind == "budget":
            counts = dict(self.chosen)[part]
            return tuple(Recompute(kind, count / part.count, self.compiled) for kind, count in counts)
        return (self, Recompute("none", 1 - self.share)) if self.share < 1 else (self,)


NOTHING = Recompute()


@lru_cache(maxsize=8192)
def computed_again(part: Part, how: Recompute) -> tuple[Op, ...]:
    """The forward operators of a part that its backward pass runs a second time."""
    if part.block is None or how.kind == "none":
        return ()
    if how.kind == "full":
        return part.forward
    if how.kind == "early":
        return part.forward[: _last_needed(part.forward)]
    if how.kind in KEPT_PRODUCTS:
        return _by_policy(part.forward, how)[0]
    again: list[Op] = []
    for word in how.kind.split("+"):
        if word == "selective":
            again += [op for op in part.forward if op.scores]
            continue
        for module in _modules(part.forward):
            if module.kind == word:
                again += module.operators[: _last_needed(module.operators)]
    return tuple(again)


@lru_cache(maxsize=8192)
def kept_by(part: Part, how: Recompute) -> dict[str, float]:
    """Bytes that a part keeps from forward to backward, by kind."""
    kind = "none" if part.block is None else how.kind
    if kind in ("full", "early"):
        return {"checkpoints": part.entering}
    if kind in KEPT_PRODUCTS:
        return {"inputs": part.entering} | _by_policy(part.forward, how)[1]
    words = kind.split("+")
    by_kind: dict[str, float] = {}
    for module in _modules(part.forward):
        if module.kind in words:
            by_kind["inputs"] = by_kind.get("inputs", 0.0) + module.entering
            continue
        for op in module.operators:
            kept_bytes = op.given if "selective" in words and op.scores else op.kept
            if kept_bytes:
                by_kind[op.group] = by_kind.get(op.group, 0.0) + kept_bytes
    return by_kind


class _Module(NamedTuple):
    """Consecutive operators of a block that are all in its attention, all in its perceptron, or in neither."""

    kind: str
    operators: tuple[Op, ...]
    entering: float
    """Bytes of its input."""


@lru_cache(maxsize=8192)
def _modules(operators: tuple[Op, ...]) -> tuple[_Module, ...]:
    kinds = [_WRAPPED.get(op.module, "") for op in operators]
    modules = []
    for kind, run in itertools.groupby(range(len(operators)), kinds.__getitem__):
        numbers = list(run)
        run_operators = tuple(operators[i] for i in numbers)
        product = next((op for op in run_operators if op.kind == "gemm"), None)
        before = operators[numbers[0] - 1] if numbers[0] else None
        # Autocast gives a module the fp32 output of the norm, which its first product casts.
        cast = before is not None and before.module == "norm" and before.kind == "copy"
        entering = (before.read if cast and before else product.kept if product else 0.0) if kind else 0.0
        modules.append(_Module(kind.removesuffix(".cross"), run_operators, entering))
    return tuple(modules)


_WRAPPED = {
    "attention": "attention", "cross": "attention.cross", "router": "mlp", "experts": "mlp", "perceptron": "mlp",
}  # fmt: skip
"""The name in `Plan.recompute` of the part of a block that contains an operator, by the operator's module."""


def allowed_bytes(work: Workload, plan: Plan) -> float:
    """Bytes that one micro-batch may keep in all blocks, so that the fullest stage stays within the budget."""
    allowed = plan.budget * GIB
    if plan.pp > 1 and work.depth:
        allowed *= work.depth / max(most_blocks(work, plan))
    return allowed


@lru_cache(maxsize=4096)
def choose(
    work: Workload, allowed: float, compiled: bool = False
) -> tuple[tuple[Part, tuple[tuple[str, int], ...]], ...]:
    """How many blocks of each kind recompute in which way, so that all together keep at most `allowed` bytes, or as
    little as they can.

    A knapsack problem in which each block has one of several choices. The choices are on a convex curve of bytes and
    cost, and the steps along all curves are taken in order of cost per freed byte: that is optimal except for the last
    block that moves (Sinha and Zoltners, "The Multiple-Choice Knapsack Problem", 1979).
    """
    curves = [_curve(part, compiled) for part in work.blocks]
    counts = [[part.count] + [0] * (len(curve) - 1) for part, curve in zip(work.blocks, curves)]
    steps = sorted(
        ((after.cost - before.cost) / (before.kept - after.kept), at, rank)
        for at, curve in enumerate(curves)
        for rank, (before, after) in enumerate(itertools.pairwise(curve))
    )
    kept = sum(part.count * curve[0].kept for part, curve in zip(work.blocks, curves))
    for _, at, rank in steps:
        if kept <= allowed:
            break
        freed = curves[at][rank].kept - curves[at][rank + 1].kept
        moving = min(counts[at][rank], math.ceil((kept - allowed) / freed))
        counts[at][rank] -= moving
        counts[at][rank + 1] += moving
        kept -= moving * freed
    return tuple(
        (part, tuple((point.kind, count) for point, count in zip(curve, by_choice) if count))
        for part, curve, by_choice in zip(work.blocks, curves, counts)
    )


class _Point(NamedTuple):
    kept: float
    cost: float
    """Cost in FLOPs: see `FLOPS_PER_BYTE`."""
    kind: str


@lru_cache(maxsize=8192)
def _curve(part: Part, compiled: bool) -> tuple[_Point, ...]:
    """The ways of one block on the convex curve of bytes and cost, each keeping less than the previous."""
    points = [_Point(sum(kept_by(part, NOTHING).values()), 0.0, "none")]
    for kind in CHOICES:
        how = Recompute(kind, compiled=compiled)
        cost = sum(map(_cost, computed_again(part, how)))
        points.append(_Point(sum(kept_by(part, how).values()), cost, kind))
    curve: list[_Point] = []
    for point in sorted(points, key=lambda point: (point.cost, point.kept)):
        if curve and point.kept >= curve[-1].kept:
            continue
        while len(curve) > 1 and _slope(curve[-2], curve[-1]) >= _slope(curve[-2], point):
            curve.pop()
        curve.append(point)
    return tuple(curve)


def _slope(before: _Point, after: _Point) -> float:
    return (after.cost - before.cost) / (before.kept - after.kept)


def _cost(op: Op) -> float:
    if op.kind in COLLECTIVE:
        return FLOPS_PER_BYTE * _LINK * op.read
    return op.flops + FLOPS_PER_BYTE * (op.read + op.written)


def every_nth(plan: Plan, depth: int) -> list[str]:
    """The recomputation of each of `depth` blocks without a budget: one block of every n; if n is not whole, the first
    block at or after each multiple of n."""
    turns = {math.ceil(turn * plan.recompute_every) for turn in range(depth)}
    return [plan.recompute if index in turns else "none" for index in range(depth)]


def block_kinds(model: ModelConfig, plan: Plan, work: Workload) -> list[str]:
    """The recomputation of each block of a model under a Plan, in execution order. A budget's choices for blocks of one
    kind are spread evenly, so that each stage of a pipeline has its share."""
    if plan.recompute != "budget":
        return every_nth(plan, work.depth)
    chosen = dict(Recompute.of(plan, work).chosen)
    ways: list[str] = []
    for stack, parts in zip(stacks(model), work.stacks, strict=True):
        words = {part.block.layer: _spread_evenly(dict(chosen[part])) for part in parts if part.block}
        ways += [next(words[layer]) for layer in stack.layers]
    return ways


def _spread_evenly(counts: dict[str, int]) -> itertools.chain[str]:
    """Each word repeated by its count, interleaved as evenly as possible."""
    total, used = sum(counts.values()), dict.fromkeys(counts, 0)
    order = []
    for place in range(1, total + 1):
        word = max(counts, key=lambda one: counts[one] * place / total - used[one])
        used[word] += 1
        order.append(word)
    return itertools.chain(order)


def _last_needed(operators: tuple[Op, ...]) -> int:
    """Number of operators that run until everything kept exists: a product keeps its input, others their output."""
    for i in range(len(operators) - 1, -1, -1):
        if operators[i].kept:
            return i if operators[i].kind == "gemm" else i + 1
    return 0


def _by_policy(operators: tuple[Op, ...], how: Recompute) -> tuple[tuple[Op, ...], dict[str, float]]:
    """Operators that run again, and kept bytes by kind, for the ways in `KEPT_PRODUCTS`."""
    every = KEPT_PRODUCTS[how.kind]
    again: list[Op] = []
    by_kind: dict[str, float] = {}
    products = [op for op in operators if op.kind == "gemm" and op.weights]
    turn = 0
    for op in operators:
        if op.kind == "attention":
            by_kind["attention"] = by_kind.get("attention", 0.0) + op.written
            by_kind["scores"] = by_kind.get("scores", 0.0) + op.batch * op.m * 4.0
            continue
        if op.kind not in MATRIX or (every > 1 and not op.weights):
            again.append(op)
            continue
        pieces = (how.layers_apart and op.pieces) or (op.n,)
        stays = sum(piece for i, piece in enumerate(pieces) if (turn + i) % every == 0)
        turn += len(pieces)
        if op is products[-1] and how.compiled:
            # The block's own output is not needed again.
            continue
        if stays:
            group = "mlp" if _WRAPPED.get(op.module) == "mlp" else "attention"
            by_kind[group] = by_kind.get(group, 0.0) + op.written * stays / op.n
        if stays < op.n:
            again.append(op._replace(n=op.n - stays, written=op.written * (1 - stays / op.n)))
    return tuple(again), by_kind
