"""Roles: what each part of a model is for, as data.

Code that treats parts differently (weight decay, sharding, fp8, conversion) looks at roles, never at names or classes.
A role names a module, or a parameter that has no module of its own. In an `Anatomy`, names are qualified from the
model's root. In the declaration of a family they are relative, and `placed` puts a prefix before them.

Shapes of weights: (out, in), as `nn.Linear` has them; experts put a dimension of experts first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

Split = Literal["column", "row", "none"]
Kind = Literal["token", "position", "segment", "class", "register", "mask", "relative", "sink", "shift"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Role:
    """A part of a model. An object of this class itself is a part whose role is not known, only its position."""

    name: str
    """Qualified name of the module, or of the parameter itself."""


@dataclass(frozen=True, slots=True)
class Linear(Role):
    """A product with a weight, and the axis along which it may be split over devices (Shoeybi et al., "Megatron-LM",
    2019, section 3).

    `column`: each device has some of the outputs. `row`: each has some of the inputs, and outputs are summed.
    """

    split: Split = "none"
    fused: tuple[int, ...] = (1,)
    """Relative sizes of the matrices concatenated in the outputs; each is split by itself."""
    transposed: bool = False
    """Whether the weight is stored as (in, out)."""
    bias: str | None = None
    """Name of a bias that another module holds."""
    counts: tuple[str, ...] = ()
    """Attributes of the module that count its outputs; if outputs are split over n devices, each is divided by n."""


@dataclass(frozen=True, slots=True)
class Head(Linear):
    """The linear that computes the model's outputs: logits over classes or over the vocabulary."""

    split: Split = "column"


@dataclass(frozen=True, slots=True)
class Modulation(Linear):
    """The linear that maps a sample's condition to shifts, scales and gates, which are the same for all its tokens."""


@dataclass(frozen=True, slots=True)
class Embedding(Role):
    """A table of learned vectors.

    `token`: one row per entry of the vocabulary, over which it can be split; `position`, `segment`: one row per
    position or kind of segment; `class`, `register`: tokens added to the sample's own; `mask`: the token in place of
    masked ones; `relative`: biases of attention scores, one column per head; `sink`: a logit per head, in the softmax's
    denominator; `shift`: biases of the queries and values of each head.
    """

    kind: Kind

    @property
    def split_dim(self) -> int | None:
        """The dimension that can be split: the vocabulary of tokens, the heads of relative biases, sinks and shifts."""
        return {"token": 0, "relative": 1, "sink": 0, "shift": 0}.get(self.kind)


@dataclass(frozen=True, slots=True)
class Norm(Role):
    """A normalisation, with its scale and shift."""


@dataclass(frozen=True, slots=True)
class Scale(Role):
    """A learned factor per feature of a residual branch: LayerScale."""


@dataclass(frozen=True, slots=True)
class Dropout(Role):
    """A module that draws random numbers while training. It holds no parameters."""


@dataclass(frozen=True, slots=True)
class Stem(Role):
    """The module that turns inputs such as images into tokens."""


@dataclass(frozen=True, slots=True)
class Pooler(Role):
    """The module that turns all tokens of a sample into one vector."""


@dataclass(frozen=True, slots=True)
class Compound(Role):
    """A part made of other parts, which own its parameters. Its name is empty if no single module holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Compound):
    """Multi-head attention: the linears before and after it, and their number of heads."""

    projections: tuple[Linear, ...]
    """The linears of queries, keys and values in this order; fused ones are one linear."""
    out: Linear
    heads: int
    kv_heads: int
    """Number of KV heads: equal to `heads`, or smaller if several query heads share one."""
    latents: tuple[Linear, ...] = ()
    """Linears to the latents that projections read instead of tokens, stored in full on each device: for queries, if
    there is one, and for keys and values."""
    norms: tuple[Norm, ...] = ()
    """Norms of queries and keys over the features of a head, or norms of latents."""
    relative: Embedding | None = None
    sinks: Embedding | None = None
    shift: Embedding | None = None
    cross: bool = False
    """Whether keys and values come from another sequence."""
    counts: tuple[str, ...] = ()
    """Attributes of the module that count heads or their features: see `Linear.counts`."""

    @property
    def readers(self) -> tuple[Linear, ...]:
        """The linears that read the attention's tokens, not a memory or a latent."""
        if self.latents:
            return (*self.projections[: 2 - len(self.latents)], *self.latents)
        return self.projections[:1] if self.cross else self.projections


@dataclass(frozen=True, slots=True, kw_only=True)
class Perceptron(Compound):
    """down(activation(up(x))), or down(activation(gate(x)) · up(x))."""

    up: Linear
    """A gate that is fused with it comes first in its outputs."""
    down: Linear
    gate: Linear | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Compound):
    """A mixture of perceptrons: each token visits some of them (Shazeer et al., ICLR 2017).

    `up`, `gate` and `down` name tensors whose first dimension is the experts; they can be split along it too.
    """

    router: Linear | None
    """None if experts are given with each sample."""
    up: Linear
    down: Linear
    gate: Linear | None = None
    count: int
    shared: Perceptron | None = None
    """The perceptron that every token visits too."""


def walk(part: Any) -> Iterator[Role]:
    """All roles in a tree of roles, blocks and stacks, each before those inside it."""
    if isinstance(part, tuple):
        for each in part:
            yield from walk(each)
    elif is_dataclass(part):
        if isinstance(part, Role):
            yield part
        for field in fields(part):
            yield from walk(getattr(part, field.name))


def placed(part: T, prefix: str) -> T:
    """A tree of roles with `prefix`, which ends in a dot or is empty, before every name."""
    if isinstance(part, tuple):
        return tuple(placed(each, prefix) for each in part)  # type: ignore[return-value]
    if not is_dataclass(part) or not prefix:
        return part
    changes: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name in ("name", "bias") and isinstance(value, str):
            changes[field.name] = f"{prefix}{value}" if value else prefix[:-1]
        else:
            changes[field.name] = placed(value, prefix)
    return replace(part, **changes)  # type: ignore[type-var]


def owned(role: Role) -> tuple[str, ...]:
    """Names of this role's parameters; empty if they belong to the roles inside it."""
    if isinstance(role, Compound | Dropout):
        return ()
    loose = (role.bias,) if isinstance(role, Linear) and role.bias is not None else ()
    return (role.name, *loose)
