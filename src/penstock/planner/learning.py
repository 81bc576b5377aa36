"""Training a part of a model: frozen weights have no gradients, masters or moments, may be stored in few bits, and
adapters (LoRA) are added.

`learning_part` rewrites the operators of a model whose parameters are all trained. Shares of parameters and tensors are
arguments, because only the built model knows which names a pattern matches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from penstock.config.formats import BYTES, PRODUCTS
from penstock.config.run import Lora
from penstock.planner.operators import Module, Op, Part, Workload

_MODULES: dict[str, tuple[Module, ...]] = {
    "attention": ("attention", "cross"),
    "perceptron": ("perceptron",),
    "all": ("attention", "cross", "perceptron"),
}
"""Modules whose linears have adapters, by `Lora.parts`."""
UNPACKING = 6
"""Number of operators that dequantise a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The part of a model that learns."""

    parameters: float = 1.0
    """Share of the model's parameters that learn, adapters included."""
    tensors: float = 1.0
    """Share of the model's tensors that learn."""
    lora: Lora = field(default_factory=Lora)
    """Adapters; rank 0 means none."""
    classes: bool = False
    """Whether the head is trained together with the adapters, as a head over classes is."""


WHOLE = Learning()


@lru_cache(maxsize=256)
def learning_part(work: Workload, how: Learning) -> Workload:
    """The workload of a model that is trained in part. Without adapters, products that make the gradients of frozen
    weights are still counted: only the built model knows which weights are frozen."""
    if how == WHOLE:
        return work
    parts = work.parts
    if how.lora.rank:
        parts = tuple(_adapted(part, how, work) for part in parts)
    form, stored = PRODUCTS[how.lora.base].weights, 0.0
    if form is not None:
        stored = sum(p.count * op.n * op.k for p in parts for op in p.forward if _is_stored(op, how.lora))
        parts = tuple(_stored(part, how.lora, BYTES[form]) for part in parts)
    even = work.even and learning_part(work.even, how)
    work = replace(work, parts=parts, even=even, learned=how.parameters, learned_tensors=how.tensors)
    return work if form is None else replace(work, stored=stored / work.parameters, stored_bytes=BYTES[form])


def _is_stored(op: Op, lora: Lora) -> bool:
    """Whether the weight of a forward product is stored in few bits."""
    return _is_linear(op, "all") and not op.adapter and op.k % PRODUCTS[lora.base].multiple[0] == 0


def _stored(part: Part, lora: Lora, stored_bytes: float) -> Part:
    """A part whose frozen products dequantise their weights, forward and for inputs' gradients, in place of autocast's
    cast."""
    stored = {op.linear: op for op in part.forward if _is_stored(op, lora)}

    def unpack(op: Op, forward: bool) -> Op:
        weights = op.n * op.k
        return Op(
            f"{op.name}.unpack", "pointwise", forward, read=weights * stored_bytes, written=weights * _bytes(op),
            elements=weights, launches=UNPACKING, scratch=True, module=op.module,
        )  # fmt: skip

    forward: list[Op] = []
    for op in part.forward:
        if op.linear not in stored:
            forward.append(op)
        elif op.kind != "copy":
            forward += unpack(op, True), op
    backward: list[Op] = []
    for op in part.backward:
        if op.linear in stored and op.kind == "gemm" and op.form == "input":
            backward.append(unpack(stored[op.linear], False))
        backward.append(op)
    return replace(part, forward=tuple(forward), backward=tuple(backward))


def _adapted(part: Part, how: Learning, work: Workload) -> Part:
    """A part whose own weights are frozen, with adapters."""
    if part.place == "entrance":  # nothing before it learns, so that it has no backward pass
        return replace(part, forward=tuple(op._replace(kept=0.0) for op in part.forward), backward=())
    if part.place == "exit":
        return part if how.classes else replace(part, backward=tuple(_frozen(part.backward)))
    adapted = {op.linear: op for op in part.forward if _is_linear(op, how.lora.parts)}
    rank = how.lora.rank
    # The input of a frozen product is saved only if it is an attention kernel's output, which that kernel needs.
    unneeded = {
        op.linear
        for op in part.forward
        if op.kind == "gemm" and op.weights and op.linear not in adapted and op.group != "attention"
    }

    def kept(op: Op) -> Op:
        return op._replace(kept=0.0) if op.linear in unneeded and op.kind != "copy" else op

    forward: list[Op] = []
    for op in part.forward:
        added = _ahead(op, rank) if op.kind == "gemm" and op.linear in adapted else ()
        forward += kept(op), *added
    matrices = [op for op in forward if op.adapter and op.weights]
    backward: list[Op] = []
    for op in part.backward:
        learns = op.over_rows and op.linear in adapted
        backward += _behind(adapted[op.linear], rank, op.kept) if learns else (kept(op),)
    return replace(
        part, forward=tuple(forward), backward=tuple(_frozen(backward)), tensors=part.tensors + len(matrices),
        parameters=part.parameters + sum(op.weights for op in matrices),
    )  # fmt: skip


def _is_linear(op: Op, parts: str) -> bool:
    """Whether an operator is the forward product of a linear in these parts of a block."""
    return op.kind == "gemm" and op.weights > 0 and op.batch == 1 and op.module in _MODULES[parts]


def _ahead(op: Op, rank: int) -> tuple[Op, ...]:
    """List B · (A · x), its scaling, and the sum with the linear's output."""
    each = _bytes(op)
    inner, outer = op.m * rank, op.m * op.n
    adapter = op._replace(given=0.0, tensors=1, narrow=False, pieces=(), linear="", adapter=True)
    return (
        adapter._replace(
            name=f"{op.name}.lora_A", n=rank, read=(op.m * op.k + rank * op.k) * each, written=inner * each, kept=0.0,
            weights=int(rank * op.k),
        ),
        adapter._replace(
            name=f"{op.name}.lora_B", k=rank, read=(inner + rank * op.n) * each, written=outer * each,
            kept=inner * each, weights=int(rank * op.n),
        ),
        Op(f"{op.name}.lora_sum", "pointwise", read=3 * outer * each, written=2 * outer * each, launches=2,
           module=op.module),
    )  # fmt: skip


def _behind(op: Op, rank: int, kept: float) -> tuple[Op, ...]:
    """List the gradients of both matrices and of their inputs; the last operator frees the `kept` bytes that the
    gradient of the linear's weight would have freed."""
    each = _bytes(op)
    first, second, _ = _ahead(op, rank)
    inner, outer, inputs = op.m * rank, op.m * op.n, op.m * op.k

    def product(name: str, m: float, n: float, k: float, read: float, written: float, weights: int = 0) -> Op:
        return Op(
            name, "gemm", False, 1, m, int(n), k, read * each, written * each, weights=weights, module=op.module,
            adapter=True,
        )  # fmt: skip

    return (
        Op(f"{op.name}.lora_scale", "pointwise", False, read=outer * each, written=outer * each, module=op.module),
        product(f"{second.name}.input", op.m, rank, op.n, outer + rank * op.n, inner),
        product(f"{second.name}.learned", op.n, rank, op.m, outer + inner, rank * op.n, second.weights),
        product(f"{first.name}.input", op.m, op.k, rank, inner + rank * op.k, inputs),
        product(f"{first.name}.learned", rank, op.k, op.m, inner + inputs, rank * op.k, first.weights),
        Op(f"{op.name}.lora_add", "pointwise", False, read=2 * inputs * each, written=inputs * each, in_place=True,
           kept=kept + second.kept, module=op.module),
    )  # fmt: skip


def _bytes(op: Op) -> float:
    """Bytes of an element of a product's output."""
    return op.written / (op.m * op.n)


def _frozen(backward: tuple[Op, ...] | list[Op]) -> Iterator[Op]:
    """Operators of a backward pass without those that make the gradients of frozen weights; the memory that they would
    have freed is freed by the next operator."""
    freed, last = 0.0, None
    for op in backward:
        frozen = op.weights > 0 and not op.adapter
        cast = op.linear != "" and op.kind == "copy"
        if frozen or cast or op.module == "shared_table":
            freed += op.kept
            continue
        if last is not None:
            yield last
        last, freed = op._replace(kept=op.kept + freed), 0.0
    if last is not None:
        yield last._replace(kept=last.kept + freed)
