"""The operations of one forward and backward pass, as eager PyTorch launches them, with FLOPs and memory
traffic.

Shapes: B samples, N tokens, T = B·N rows, D width, M MLP width, H heads, K features per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from penstock.config.model import ViTConfig
from penstock.config.plan import AttentionBackend, Plan

OpKind = Literal["gemm", "bmm", "conv", "pointwise", "norm", "softmax", "copy", "reduce", "quantize"]
Phase = Literal["forward", "backward"]


class Op(NamedTuple):
    """One operation, done `count` times. All other figures are of one time.

    `gemm`, `bmm` and `conv` multiply (m, k) by (k, n); a `bmm` does so for `batch` pairs in one launch, and a
    `conv` is given as the matrix product it equals.
    """

    name: str
    kind: OpKind
    phase: Phase
    count: int = 1  # type: ignore[assignment]  # of the field, not the tuple's method
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    read_elements: int = 0
    written_elements: int = 0
    recomputed_flops: int = 0
    """FLOPs that repeat forward work: part of hardware utilisation (HFU), not of model utilisation (MFU)."""

    @property
    def flops(self) -> int:
        """Model FLOPs of one time."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """The operations of a micro-batch of any size, listed for one sample and for two.

    Every figure is affine in the batch, and no `n` depends on it. Equal to itself alone, so that what follows from it
    may be cached by it.
    """

    one: tuple[Op, ...]
    two: tuple[Op, ...]

    @classmethod
    def of_one_batch(cls, operations: tuple[Op, ...]) -> Operations:
        """Those of a model that was seen with one batch only: the same whatever the batch is said to be."""
        return cls(operations, operations)

    def at(self, batch: int) -> tuple[Op, ...]:
        """The operations of so many samples."""
        more, make = batch - 1, Op._make
        return tuple([
            make((name, kind, phase, count, pairs + more * (b[4] - pairs), m + more * (b[5] - m), n,
                  k + more * (b[7] - k), read + more * (b[8] - read), written + more * (b[9] - written),
                  again + more * (b[10] - again)))
            for (name, kind, phase, count, pairs, m, n, k, read, written, again), b in zip(self.one, self.two)
        ])  # fmt: skip

    def flops(self, batch: int) -> tuple[int, int]:
        """Model FLOPs, and those that the backward pass repeats of the forward pass."""
        (one, again), (more, further) = _flops(self)
        return one + (batch - 1) * more, again + (batch - 1) * further


@lru_cache(maxsize=256)
def _flops(listed: Operations) -> tuple[tuple[int, int], tuple[int, int]]:
    """Model and repeated FLOPs of one sample, and what each further one adds."""
    (one, again), (two, twice) = (
        (sum(op.count * op.flops for op in ops), sum(op.count * op.recomputed_flops for op in ops))
        for ops in (listed.one, listed.two)
    )
    return (one, again), (two - one, twice - again)


def operations(
    config: ViTConfig, batch: int = 1, plan: Plan | None = None, *, device: str = "cuda"
) -> tuple[Op, ...]:
    """Every operation of one forward and one backward pass over `batch` samples, without loss and optimizer.

    `plan` gives the attention backend and the layout; left out, attention is plain and batch first. The model
    FLOPs do not depend on it, the memory traffic and the recomputed FLOPs do.
    """
    plan = Plan(attention="plain") if plan is None else plan
    return listing(config, plan, device=device).at(batch)


def listing(config: ViTConfig, plan: Plan, *, device: str = "cuda") -> Operations:
    """`operations` of any batch."""
    fused = attention_form(plan, config.tokens, device) == "fused"
    return _both(config, fused, plan.layout == "batch_first")


@lru_cache(maxsize=64)
def _both(config: ViTConfig, fused: bool, copies: bool) -> Operations:
    one, two = (_listed(config, batch, fused=fused, copies=copies) for batch in (1, 2))
    return Operations(tuple(one), tuple(two))


def _listed(config: ViTConfig, batch: int, *, fused: bool, copies: bool) -> list[Op]:
    """Forward as it runs, then the gradients of each operation from the last to the first."""
    forward = [
        *_stem(config, batch),
        *(op._replace(count=config.depth) for op in _block(config, batch, fused=fused, copies=copies)),
        *_head(config, batch),
    ]
    return forward + [grad for op in reversed(forward) for grad in _gradients(op, config)]


def attention_form(plan: Plan, tokens: int, device: str) -> Literal["plain", "fused", "math"]:
    """What an attention backend does: keep the scores (`plain`, `math`) or compute them again (`fused`).

    `auto` is taken for plain where it mostly is so: on a CPU, in bf16, up to 512 tokens.
    """
    backend: AttentionBackend = plan.attention
    if backend == "auto":
        half = plan.precision != "O0" and plan.dtype == "bf16"
        backend = "plain" if device == "cpu" and half and tokens <= 512 else "sdpa"
    if backend == "plain":
        return "plain"
    return "math" if backend == "math" else "fused"


def conv_widths(config: ViTConfig) -> list[int]:
    """Output channels of each stride-2 convolution of the conv stem: doubling up to the model's width."""
    halvings = config.patch_size.bit_length() - 1
    return [max(8, config.width >> (halvings - 1 - i)) for i in range(halvings)]


def _gemm(name: str, rows: int, inputs: int, outputs: int) -> Op:
    read = rows * inputs + inputs * outputs + outputs
    return Op(
        name=name, kind="gemm", phase="forward", m=rows, n=outputs, k=inputs,
        read_elements=read, written_elements=rows * outputs,
    )  # fmt: skip


def _elementwise(name: str, kind: OpKind, read: int, written: int) -> Op:
    return Op(name=name, kind=kind, phase="forward", read_elements=read, written_elements=written)


def _stem(config: ViTConfig, batch: int) -> Iterator[Op]:
    rows, d = batch * config.patches, config.width
    pixels = batch * config.channels * config.image_size**2
    if config.stem == "patchify":
        yield _elementwise("stem.patches", "copy", pixels, pixels)
        features = config.channels * config.patch_size**2
    else:
        side, channels = config.image_size, config.channels
        for i, width in enumerate(conv_widths(config)):
            side //= 2
            area = batch * side * side
            yield Op(
                name=f"stem.conv{i}", kind="conv", phase="forward", m=area, n=width, k=9 * channels,
                read_elements=4 * area * channels + 9 * channels * width, written_elements=area * width,
            )  # fmt: skip
            yield _elementwise(f"stem.norm{i}", "norm", area * width, area * width)
            yield _elementwise(f"stem.relu{i}", "pointwise", area * width, area * width)
            channels = width
        yield _elementwise("stem.tokens", "copy", rows * channels, rows * channels)
        features = channels
    yield _gemm("stem.proj", rows, features, d)
    yield _elementwise("positions", "pointwise", rows * d, rows * d)
    tokens = batch * config.tokens * d
    if config.classifier == "token":
        yield _elementwise("class_token", "copy", tokens, tokens)
    if config.dropout:
        yield _elementwise("dropout", "pointwise", tokens, 2 * tokens)


def _block(config: ViTConfig, batch: int, *, fused: bool, copies: bool) -> Iterator[Op]:
    rows, d, m = batch * config.tokens, config.width, config.mlp_width
    yield _elementwise("norm1", "norm", rows * d, rows * d)
    yield _gemm("attention.qkv", rows, d, 3 * d)
    if config.qk_norm:
        yield _elementwise("attention.qk_norm", "norm", 2 * rows * d, 2 * rows * d)
    yield from _attention(config, batch, fused=fused, copies=copies)
    yield _gemm("attention.out", rows, d, d)
    yield from _branch("branch1", config, rows)
    yield _elementwise("norm2", "norm", rows * d, rows * d)
    yield _gemm("mlp.up", rows, d, m)
    yield _elementwise("mlp.activation", "pointwise", rows * m, rows * m)
    if config.dropout:
        yield _elementwise("mlp.dropout", "pointwise", rows * m, 2 * rows * m)
    yield _gemm("mlp.down", rows, m, d)
    yield from _branch("branch2", config, rows)


def _branch(name: str, config: ViTConfig, rows: int) -> Iterator[Op]:
    size = rows * config.width
    if config.dropout:
        yield _elementwise(f"{name}.dropout", "pointwise", size, 2 * size)
    if config.layer_scale is not None:
        yield _elementwise(f"{name}.scale", "pointwise", size, size)
    if config.drop_path:
        yield _elementwise(f"{name}.drop_path", "pointwise", size, size)
    yield _elementwise(f"{name}.residual", "pointwise", 2 * size, size)


def _attention(config: ViTConfig, batch: int, *, fused: bool, copies: bool) -> Iterator[Op]:
    """Two products and a softmax; a fused kernel is given as its two products, without the traffic of
    scores.
    """
    n, k, pairs = config.tokens, config.head_width, batch * config.heads
    size, scores = pairs * n * k, pairs * n * n
    kept = 0 if fused else scores
    if copies and not fused:
        yield _elementwise("attention.split", "copy", 3 * size, 3 * size)
    product = Op(
        name="attention.scores", kind="bmm", phase="forward", batch=pairs, m=n, n=n, k=k,
        read_elements=2 * size, written_elements=kept,
    )  # fmt: skip
    yield product
    if not fused:
        yield _elementwise("attention.softmax", "softmax", scores, scores)
    yield product._replace(
        name="attention.values", n=k, k=n, read_elements=size + kept, written_elements=size
    )
    if not fused:
        yield _elementwise("attention.merge", "copy", size, size)


def _head(config: ViTConfig, batch: int) -> Iterator[Op]:
    d, tokens = config.width, batch * config.tokens * config.width
    pool_first = config.classifier == "pooled" and config.pool_norm == "after"
    norm_all = config.classifier == "pooled" and config.pool_norm == "before"
    if pool_first:
        yield _elementwise("pool", "reduce", tokens, batch * d)
    normed = tokens if norm_all else batch * d
    yield _elementwise("norm", "norm", normed, normed)
    if norm_all:
        yield _elementwise("pool", "reduce", tokens, batch * d)
    yield _gemm("head", batch, d, config.classes)


def _gradients(op: Op, config: ViTConfig) -> Iterator[Op]:
    """The backward operations of one forward operation, in the order in which autograd runs them."""
    if op.kind in ("gemm", "conv"):
        yield from _product_gradients(op, config)
    elif op.kind == "bmm":
        yield from _attention_gradients(op, config)
    elif op.kind in ("softmax", "norm") or op.name in ("mlp.activation",) or ".relu" in op.name:
        # The incoming gradient, and what was kept.
        yield op._replace(phase="backward", read_elements=2 * op.written_elements)
    elif op.name == "stem.patches":
        return  # nobody asks for the gradient of the image
    elif op.kind == "reduce":
        yield op._replace(
            phase="backward", read_elements=op.written_elements, written_elements=op.read_elements
        )
    elif op.name == "positions":
        size = op.written_elements
        yield op._replace(
            phase="backward", read_elements=size, written_elements=config.patches * config.width
        )
    elif op.name.endswith(".scale"):
        size = op.written_elements
        yield op._replace(phase="backward", read_elements=3 * size, written_elements=2 * size)
    elif op.name.endswith(".residual"):
        # The sum of the gradients of both branches.
        yield op._replace(phase="backward")
    elif op.name.endswith("dropout"):
        size = op.read_elements
        yield op._replace(phase="backward", read_elements=2 * size, written_elements=size)
    else:
        yield op._replace(phase="backward")


def _product_gradients(op: Op, config: ViTConfig) -> Iterator[Op]:
    """(m, k) @ (k, n): the input's gradient (m, n) @ (n, k) and the weight's (n, m) @ (m, k)."""
    rows, outputs, inputs = op.m, op.n, op.k
    output, weight = op.written_elements, inputs * outputs
    source = op.read_elements - weight - (outputs if op.kind == "gemm" else 0)
    first = op.name in ("stem.conv0",) or (op.name == "stem.proj" and config.stem == "patchify")
    if not first:
        yield op._replace(
            name=f"{op.name}.input", phase="backward", m=rows, n=inputs, k=outputs,
            read_elements=output + weight, written_elements=source,
        )  # fmt: skip
    yield op._replace(
        name=f"{op.name}.weight", phase="backward", m=outputs, n=inputs, k=rows,
        read_elements=output + source, written_elements=weight,
    )  # fmt: skip
    if op.kind == "gemm":
        yield Op(
            name=f"{op.name}.bias", kind="reduce", phase="backward", count=op.count,
            read_elements=output, written_elements=outputs,
        )  # fmt: skip


def _attention_gradients(op: Op, config: ViTConfig) -> Iterator[Op]:
    """Two products for each of the forward pass, and for a fused kernel the scores once more."""
    pairs, n, k = op.batch, config.tokens, config.head_width
    size, scores = pairs * n * k, pairs * n * n
    values = op.name == "attention.values"
    fused = op.written_elements == 0 if not values else op.read_elements == size
    kept = 0 if fused else scores
    left = op._replace(
        name=f"{op.name}.left", phase="backward", m=n, n=n if values else k, k=k if values else n,
        read_elements=size + (size if values else kept), written_elements=kept if values else size,
        recomputed_flops=2 * scores * k if fused and not values else 0,
    )  # fmt: skip
    yield left
    yield left._replace(
        name=f"{op.name}.right", m=n, n=k, k=n,
        read_elements=kept + size, written_elements=size, recomputed_flops=0,
    )  # fmt: skip
    if not values:
        # Gradients of q, k and v are stacked into one of the packed projection.
        yield Op(
            name="attention.stack", kind="copy", phase="backward", count=op.count,
            read_elements=3 * size, written_elements=3 * size,
        )  # fmt: skip
