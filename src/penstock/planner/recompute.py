"""What a recomputing backward pass runs again, and what a part then keeps."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from penstock.config.plan import Plan
from penstock.planner.operators import Op, Part


class Recompute(NamedTuple):
    """What a Plan says of recomputation.

    `full` runs all of a block again; `early` stops where all that is needed is there, as torch's own checkpointing
    does; `selective` runs what keeps scores; `operators` runs all but attention and every other product, as torch's
    per-operator policy.
    """

    kind: str = "none"
    share: float = 1.0
    """Of the blocks."""
    compiled: bool = False
    """Whether a result that no gradient needs is dropped."""

    @classmethod
    def of(cls, plan: Plan) -> Recompute:
        """That of a plan."""
        return cls(plan.recompute, 1 / plan.recompute_every, plan.compile != "none")


NOTHING = Recompute()


@lru_cache(maxsize=8192)
def computed_again(part: Part, how: Recompute) -> tuple[Op, ...]:
    """The forward operators of a part that its backward pass runs a second time."""
    if part.block is None:
        return ()
    if how.kind == "full":
        return part.forward
    if how.kind == "early":
        return part.forward[: _last_needed(part.forward)]
    if how.kind == "selective":
        return tuple(op for op in part.forward if _is_of_scores(op))
    if how.kind == "operators":
        return _by_policy(part.forward, how.compiled)[0]
    return ()


@lru_cache(maxsize=8192)
def kept_by(part: Part, how: Recompute) -> dict[str, float]:
    """Bytes that a part keeps from forward to backward, by kind."""
    kind = "none" if part.block is None else how.kind
    if kind in ("full", "early"):
        return {"checkpoints": part.entering}
    if kind == "operators":
        return {"inputs": part.entering} | _by_policy(part.forward, how.compiled)[1]
    kept: dict[str, float] = {}
    for op in part.forward:
        if op.kept and not (kind == "selective" and op.group == "scores"):
            kept[op.group] = kept.get(op.group, 0.0) + op.kept
    return kept


def _last_needed(operators: tuple[Op, ...]) -> int:
    """How many operators run until everything is kept: a product keeps what it reads, others what they make."""
    for i in range(len(operators) - 1, -1, -1):
        if operators[i].kept:
            return i if operators[i].kind == "gemm" else i + 1
    return 0


def _is_of_scores(op: Op) -> bool:
    """Whether it makes scores, their softmax or dropout, or the values, where scores are kept: not a fused kernel."""
    small = (".scale", ".mask", ".bias", ".cast", ".round")
    return op.name.startswith("attention") and (
        op.kind == "bmm" or op.group == "scores" or op.name.endswith(small)
    )


def _by_policy(operators: tuple[Op, ...], compiled: bool) -> tuple[tuple[Op, ...], dict[str, float]]:
    """What is run again and what is kept where every other product and attention are kept. Packed projections count as
    the products that they pack."""
    again: list[Op] = []
    kept: dict[str, float] = {}
    products = [op for op in operators if op.kind == "gemm" and op.weights]
    turn = 0
    for op in operators:
        if op.kind == "attention":
            kept["attention"] = kept.get("attention", 0.0) + op.written
            kept["scores"] = kept.get("scores", 0.0) + op.batch * op.m * 4.0
            continue
        if op.kind != "gemm" or not op.weights:
            again.append(op)
            continue
        pieces = _pieces(op, operators)
        stays = sum(piece for i, piece in enumerate(pieces) if (turn + i) % 2 == 0)
        turn += len(pieces)
        if op is products[-1] and compiled:
            # Nobody needs the block's own result again.
            continue
        if stays:
            group = "mlp" if op.name.startswith(("mlp", "experts", "shared")) else "attention"
            kept[group] = kept.get(group, 0.0) + op.written * stays / op.n
        if stays < op.n:
            again.append(op._replace(n=op.n - stays, written=op.written * (1 - stays / op.n)))
    return tuple(again), kept


def _pieces(op: Op, operators: tuple[Op, ...]) -> tuple[int, ...]:
    """Widths of the products that a packed projection holds."""
    if op.name.endswith(".qkv"):
        a = int(next(one for one in operators if one.name.endswith(".out")).k)
        kv = (op.n - a) // 2
        return (a, kv, kv)
    if op.name.endswith(".kv"):
        return (op.n // 2, op.n // 2)
    if op.name.endswith(".up"):
        down = next(one for one in operators if one.name == op.name[:-2] + "down")
        pieces = int(op.n // down.k)
        return (op.n // pieces,) * pieces
    return (op.n,)
