"""How the weights of linear layers are kept for inference: all forms but `fp8` on a CPU, `fp8` on a GPU.

| form | what it is | what changes |
|---|---|---|
| `plain` | as the model has them | nothing |
| `packed` | in oneDNN's blocked layout for this processor, in the model's own type | rounding only |
| `int8` | weights in int8 with a scale for each output; inputs rounded to int8 with one for each row | results |
| `int8_weights` | weights in int8 with a scale for each output; products in bf16 | results |
| `int4` | weights in 4 bits with a scale and an offset for each 32 inputs | results |
| `fp8` | weights of blocks in fp8 with a scale for each output; inputs rounded to fp8 with one for each row | results |

Of 30 M weights with 4 rows of inputs on one core of an AMD EPYC with AVX512 and VNNI: plain fp32 20 ms, packed 6,
packed bf16 3.2, int8 1.2, int8_weights 3.8, int4 3. Weights in int8 or int4 alone pay off for a few rows only, as one
text has them.

Inputs in 8 bits lose most behind a norm, where few features are far larger than the others. `careful` products there
are in bf16, whose weights take twice the memory. A CPU without bf16 units rounds what the first rounding left once more
instead, and multiplies twice.

`fp8` has a scale for each row of inputs and none for all of them, which would let a text change with its neighbours.

A packed layer cannot be trained, saved or moved to another device.
"""

from __future__ import annotations

import itertools
import warnings
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.decoding import Weights
from penstock.cpu import this_cpu
from penstock.errors import ConfigError, EnvironmentProblem
from penstock.infer.shortlist import Shortlist
from penstock.models.anatomy import anatomy_of
from penstock.models.roles import Attention, Linear, Perceptron
from penstock.parallel.parts import in_place_of
from penstock.precision.fp8 import rows_in_fp8, scaled_product
from penstock.precision.fp8_linear import fp8_problem, kept_from_fp8

ROUNDED: tuple[Weights, ...] = ("int8", "int8_weights", "int4", "fp8")
"""Forms that change results."""
_GROUP = 32
"""Inputs that share a scale in `int4`."""
_WIDTH = 16
"""`int4` needs a number of outputs that is a multiple of this."""
_ROWS = 32
"""Rows of inputs that oneDNN lays weights out for; those for one row serve others badly."""
_FEW = 16
"""Rows of inputs up to which products with `int8_weights` read them as they are."""


class Packed(nn.Module):
    """A linear layer whose weights are kept in another form: (…, in) to (…, out)."""

    wide = False
    """Whether `kernel` returns fp32, whatever it is given."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape  # of a split layer, this rank's
        self.dtype = linear.weight.dtype
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.number = next(_numbers)
        _known[self.number] = self

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self.out_features)
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        """(N, in) to (N, out), for N of at least 1."""
        raise NotImplementedError

    def kernel(self, x: Tensor) -> Tensor:
        """(…, in) to (…, out) by what torch.compile cannot look into."""
        raise NotImplementedError

    def called(self, x: Tensor) -> Tensor:
        """`kernel`; in compiled code as one operation."""
        if torch.compiler.is_compiling():
            return torch.ops.penstock.packed(x, self.number)  # type: ignore[no-any-return]
        return self.kernel(x)


_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Packed] = weakref.WeakValueDictionary()
torch.library.define("penstock::packed", "(Tensor x, int number) -> Tensor")


@torch.library.impl("penstock::packed", "CPU")
def _called(x: Tensor, number: int) -> Tensor:
    return _known[number].kernel(x)


@torch.library.register_fake("penstock::packed")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, number: int) -> Tensor:
    layer = _known[number]
    return x.new_empty((*x.shape[:-1], layer.out_features), dtype=torch.float32 if layer.wide else x.dtype)


class OneDnn(Packed):
    """Weights in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x) if x.numel() else x.new_empty(*x.shape[:-1], self.out_features)

    def kernel(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x.contiguous(), self.weight, self.bias, "none", [], ""
        )
        return found


class Int8(Packed):
    """Weights and inputs in int8."""

    wide = True

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scales = _scales(weight)
        with warnings.catch_warnings():
            # torch will take its quantised tensors out one day; the kernel that takes this one is its fastest so far.
            warnings.simplefilter("ignore", UserWarning)
            zeros = torch.zeros(len(weight), dtype=torch.int64)
            weight = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
            self.weight = torch.ops.quantized.linear_prepack(weight, None)
        # Without VNNI, sums of two products of whole bytes do not fit 16 bits.
        self.narrow = not this_cpu().vnni

    def product(self, x: Tensor) -> Tensor:
        # The kernel has one scale for all rows. So each is divided by its largest number first: one row with an outlier
        # would leave the others few levels.
        sizes = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
        found = self.multiplied(x.float() / sizes)
        found = found * sizes if self.bias is None else torch.addcmul(self.bias, found, sizes)
        return found.to(x.dtype)

    def multiplied(self, x: Tensor) -> Tensor:
        """Rows (N, in) of numbers from −1 to 1 by the weights, in fp32."""
        return self.called(x)

    def kernel(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic.default(x, self.weight, self.narrow)  # type: ignore[no-any-return]


class Int8Twice(Int8):
    """The same with inputs in twice 8 bits."""

    def multiplied(self, x: Tensor) -> Tensor:
        """See `Int8`."""
        low, high = x.aminmax()
        # The kernel's own levels, among which is zero: so it rounds these numbers to themselves.
        levels = 127 if self.narrow else 255
        step = ((high.clamp(min=0.0) - low.clamp(max=0.0)) / levels).clamp(min=1e-12)
        coarse = (x / step).round() * step
        return super().multiplied(coarse) + super().multiplied(x - coarse)


class Bf16(OneDnn):
    """Weights and products in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        Packed.__init__(self, linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().bfloat16(), _ROWS)
        self.bias = None if self.bias is None else self.bias.bfloat16()

    def kernel(self, x: Tensor) -> Tensor:
        return super().kernel(x.bfloat16()).to(x.dtype)


class Int8Weights(Packed):
    """Weights in int8, products in bf16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        weight = linear.weight.detach().float()
        scales = _scales(weight)
        self.weight = (weight / scales[:, None]).round().to(torch.int8)
        self.scales = scales.to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        half = x.to(torch.bfloat16)
        if len(x) <= _FEW:
            found = torch._weight_int8pack_mm(half, self.weight, self.scales).to(x.dtype)
        else:
            weight = self.weight.to(torch.bfloat16) * self.scales[:, None]
            found = F.linear(half, weight).to(x.dtype)
        return found if self.bias is None else found + self.bias


class Int4(Packed):
    """Weights in 4 bits, in groups."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        groups = linear.weight.detach().float().unflatten(1, (-1, _GROUP))  # type: ignore[no-untyped-call]
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scales = ((high - low) / 15).clamp(min=1e-6)
        numbers = ((groups - low) / scales).round().clamp(0, 15).to(torch.int32).flatten(1)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        # The kernel reads a number n as (n − 8) · scale + offset.
        told = torch.cat([scales, low + 8 * scales], dim=-1)
        self.scales = told.transpose(0, 1).contiguous().to(self.dtype)

    def product(self, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            x.contiguous(), self.weight, _GROUP, self.scales.to(x.dtype)
        )
        return found if self.bias is None else found + self.bias


class Fp8(Packed):
    """Weights and inputs in fp8 (e4m3), products in bf16."""

    emulate = False
    """Whether the same numbers are multiplied in fp32: the reference."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        self.weight, scales = rows_in_fp8(linear.weight.detach())
        self.scales = scales.t()
        self.bias = None if self.bias is None else self.bias.to(torch.bfloat16)

    def product(self, x: Tensor) -> Tensor:
        rows, scales = rows_in_fp8(x)
        return scaled_product(
            rows,
            self.weight.t(),
            scales,
            self.scales,
            torch.bfloat16,
            bias=self.bias,
            fast=True,
            emulate=self.emulate,
        ).to(x.dtype)


def _scales(weight: Tensor) -> Tensor:
    """The scale of int8 for each output (out,): the value of 1."""
    return weight.abs().amax(1).clamp(min=1e-12) / 127


_FORMS: dict[str, type[Packed]] = {
    "packed": OneDnn, "int8": Int8, "int8_weights": Int8Weights, "int4": Int4, "fp8": Fp8,
}  # fmt: skip


@torch.no_grad()
def pack(model: nn.Module, weights: Weights, *, careful: bool = False) -> nn.Module:
    """The model with all its linear layers, by role, in a form.

    Layers that `int4` cannot hold are `packed`, or stay as they are where this CPU packs no bf16. Layers that training
    leaves out of fp8 (`penstock.precision.fp8_linear.convert_to_fp8`) stay as they are. `careful` is for outputs that
    are compared as numbers and not only by which is the largest.

    Raises ConfigError for a form that does not suit the device or the type.
    """
    if weights == "plain":
        return model
    first = next(model.parameters())
    if weights == "fp8":
        return _in_fp8(model, first.device)
    if first.device.type != "cpu":
        raise ConfigError(
            f"weights={weights} is for a CPU, but the model is on {first.device}; choose weights=plain, or fp8 on "
            "a GPU that has it."
        )
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise EnvironmentProblem(
            "This torch was built without oneDNN, whose layout is asked for; use weights=plain."
        )
    if first.dtype == torch.bfloat16 and weights == "packed" and not this_cpu().packs_bf16:
        raise ConfigError(
            "weights=packed: oneDNN lays bf16 weights out only on a CPU with AVX-512; choose weights=plain, or "
            "precision=O0, whose fp32 weights it packs."
        )
    tied: dict[int, nn.Module] = {}
    anatomy = anatomy_of(model)
    normed = {linear.name for part in anatomy.parts(Attention) for linear in part.projections}
    normed |= {linear.name for part in anatomy.parts(Perceptron) for linear in (part.up, part.gate) if linear}
    here = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for role in list(anatomy.parts(Linear)):
        if role.name not in here:  # in a block that another rank has
            continue
        linear = model.get_submodule(role.name)
        if isinstance(linear, nn.Linear):
            exact = careful and weights == "int8" and role.name in normed
            form = (
                (Bf16 if this_cpu().bf16 and this_cpu().packs_bf16 else Int8Twice)
                if exact
                else _FORMS[weights]
            )
            found = tied.setdefault(id(linear), _packed(linear, form))
            _put(model, role.name, found)
        elif isinstance(linear, Shortlist) and isinstance(linear.rows, nn.Linear):
            linear.rows = _packed(linear.rows, _FORMS[weights])
    return model


def _in_fp8(model: nn.Module, device: torch.device) -> nn.Module:
    remedy = "choose weights=plain, or on a CPU int8"
    if problem := fp8_problem(device, "rowwise", remedy=remedy):
        raise ConfigError(f"weights=fp8: {problem}")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    kept = dict(kept_from_fp8(linears, anatomy_of(model)))
    if len(kept) == len(linears):
        raise ConfigError(
            f"No linear layer of this {type(model).__name__} has sides that are multiples of 16, as fp8 "
            f"needs; {remedy}."
        )
    for name, linear in linears.items():
        if name not in kept:
            _put(model, name, _packed(linear, Fp8))
    return model


def _packed(linear: nn.Linear, form: type[Packed]) -> nn.Module:
    if form is Int4 and (linear.in_features % _GROUP or linear.out_features % _WIDTH):
        if linear.weight.dtype == torch.bfloat16 and not this_cpu().packs_bf16:
            return linear
        form = OneDnn
    return in_place_of(linear, form(linear))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


def suited(model: nn.Module, weights: Weights, *, own: bool) -> Weights:
    """The form that `auto` means: `packed` on a CPU where it is faster and the model is nobody else's (`own`), else
    `plain`.
    """
    if weights != "auto":
        return weights
    first = next(model.parameters())
    known = first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and this_cpu().packs_bf16)
    on_cpu = first.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "packed" if own and on_cpu and known else "plain"
