"""One operator of a step: what is computed, moved, sent, kept and learned, on one device."""

from __future__ import annotations

from typing import Literal, NamedTuple

OpKind = Literal[
    "gemm", "conv", "bmm", "attention", "norm", "softmax", "activation", "pointwise", "copy", "reduce", "quantize",
    "gather", "scatter", "allreduce", "exchange", "ring",
]  # fmt: skip
Axis = Literal["", "tensor", "expert", "context"]
MATRIX = frozenset(("gemm", "conv", "bmm"))
COLLECTIVE = frozenset(("gather", "scatter", "allreduce", "exchange", "ring"))


class Op(NamedTuple):
    """One operator. Sizes are of one device, bytes of the types that the plan computes in.

    `gemm`, `conv` and `bmm` multiply `batch` pairs (m, k) @ (k, n) in one launch; a `conv` is given as the product that
    it equals. `attention` is a fused kernel: `batch` heads of `m` queries, `n` keys and `k` features. The others move
    `read` and `written` bytes. A collective moves `read` bytes in all, over the devices of its `axis`.
    """

    name: str
    kind: OpKind
    forward: bool = True
    batch: float = 1
    m: float = 0
    n: int = 0
    k: float = 0
    read: float = 0.0
    written: float = 0.0
    elements: float = 0.0
    """Numbers that are computed; of attention, the numbers of all queries."""
    kept: float = 0.0
    """Bytes that a forward operator keeps for the backward pass, or that a backward operator lets go of."""
    group: str = ""
    """The kind of what is kept."""
    weights: int = 0
    """Learned numbers that a forward operator uses, or whose gradients a backward operator makes."""
    tensors: int = 0
    """Tensors that these numbers are in."""
    launches: int = 1
    fp8: bool = False
    """Whether a product multiplies in fp8."""
    causal: bool = False
    window: int = 0
    """Keys that a query may see at the most; 0 is all."""
    axis: Axis = ""
    hides: bool = False
    """Whether a collective can hide behind the gradients of weights."""

    @property
    def flops(self) -> float:
        """Model FLOPs: what is computed twice counts once, and a causal mask leaves nothing out."""
        if self.kind == "attention":
            return (4.0 if self.forward else 8.0) * self.batch * self.m * self.n * self.k
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def repeated_flops(self) -> float:
        """FLOPs that repeat forward work: a fused attention kernel forms the scores again in its backward pass."""
        if self.kind == "attention" and not self.forward:
            return 2.0 * self.batch * self.m * self.n * self.k
        return 0.0

    @property
    def over_rows(self) -> bool:
        """Whether a product sums over rows of tokens, as the gradient of a weight does."""
        return self.kind == "gemm" and not self.forward and self.weights > 0
