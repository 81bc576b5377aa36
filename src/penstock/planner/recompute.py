"""What a recomputing backward pass runs again, and what a part then keeps."""

from __future__ import annotations

from functools import lru_cache

from penstock.planner.operators import Op, Part


@lru_cache(maxsize=8192)
def computed_again(part: Part, recompute: str, *, compiled: bool = True) -> tuple[Op, ...]:
    """The forward operators of a block that its backward pass runs a second time.

    `full` runs all; `early` stops where all that is needed is there, as torch's own checkpointing does; `selective`
    runs what keeps scores; `operators` runs all but attention and every other product, as torch's per-operator policy.
    """
    if recompute == "full":
        return part.forward
    if recompute == "early":
        return part.forward[: _last_needed(part.forward)]
    if recompute == "selective":
        return tuple(_scores(part.forward))
    if recompute == "operators":
        return _by_policy(part.forward, compiled)[0]
    return ()


@lru_cache(maxsize=8192)
def kept_by(part: Part, recompute: str, *, compiled: bool = True) -> dict[str, float]:
    """Bytes that a part keeps from forward to backward, by kind."""
    if recompute in ("full", "early") and part.block:
        return {"checkpoints": part.entering}
    if recompute == "operators" and part.block:
        return {"inputs": part.entering} | _by_policy(part.forward, compiled)[1]
    left = set(map(id, _scores(part.forward))) if recompute == "selective" and part.block else set()
    kept: dict[str, float] = {}
    for op in part.forward:
        if op.kept and not (id(op) in left and op.group == "scores"):
            kept[op.group] = kept.get(op.group, 0.0) + op.kept
    return kept


def _last_needed(operators: tuple[Op, ...]) -> int:
    """How many operators run until everything is kept: a product keeps what it reads, others what they make."""
    for i in range(len(operators) - 1, -1, -1):
        if operators[i].kept:
            return i if operators[i].kind == "gemm" else i + 1
    return 0


def _scores(operators: tuple[Op, ...]) -> list[Op]:
    """Scores, softmax, dropout and values of attention that keeps its scores; none of a fused kernel."""
    return [op for op in operators if op.name.startswith("attention") and _is_of_scores(op)]


def _is_of_scores(op: Op) -> bool:
    return (
        op.kind == "bmm"
        or op.group == "scores"
        or op.name.endswith((".scale", ".mask", ".bias", ".cast", ".round"))
    )


def _by_policy(operators: tuple[Op, ...], compiled: bool) -> tuple[tuple[Op, ...], dict[str, float]]:
    """What is run again and what is kept where every other product and attention are kept. Packed projections count as
    the products that they pack. A result that no gradient needs is dropped by a compiler."""
    again: list[Op] = []
    kept: dict[str, float] = {}
    turn = 0
    products = [op for op in operators if op.kind == "gemm" and op.weights]
    for op in operators:
        if op.kind == "attention":
            kept["attention"] = kept.get("attention", 0.0) + op.written
            kept["scores"] = kept.get("scores", 0.0) + op.batch * op.m * 4.0
            continue
        if op.kind != "gemm" or not op.weights:
            again.append(op)
            continue
        group = "mlp" if op.name.startswith(("mlp", "experts", "shared")) else "attention"
        pieces = _pieces(op, operators)
        stays = 0
        for piece in pieces:
            turn += 1
            if turn % 2:
                stays += piece
        if op is products[-1] and compiled:
            stays, pieces = 0, ()
        if stays:
            kept[group] = kept.get(group, 0.0) + op.written * stays / op.n
        if pieces and stays < op.n:
            share = 1 - stays / op.n
            again.append(op._replace(n=op.n - stays, written=op.written * share, weights=op.weights))
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
