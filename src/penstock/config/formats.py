"""Formats: how numbers are stored, and how linear layers multiply and store them. Types are strings, so planning needs
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_e5m2", "int8", "int4"]
HalfDtype = Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a number is stored."""

    dtype: str
    """The torch type that stores it. Two `int4` numbers share one byte."""
    bits: int
    group: int = 0
    """Number of elements that share a scale of 16 bits. 0: there are no scales, or a scale serves at least a whole row,
    so that its bytes do not count."""
    offsets: bool = False
    """Whether the elements of a group also share an offset of 16 bits."""

    @property
    def bytes(self) -> float:
        """Bytes of one number, including its part of a scale and an offset."""
        return self.bits / 8 + (2 * (1 + self.offsets) / self.group if self.group else 0.0)


FORMATS: dict[Dtype, Format] = {
    "fp64": Format(dtype="float64", bits=64), "fp32": Format(dtype="float32", bits=32),
    "tf32": Format(dtype="float32", bits=32), "bf16": Format(dtype="bfloat16", bits=16),
    "fp16": Format(dtype="float16", bits=16), "fp8": Format(dtype="float8_e4m3fn", bits=8),
    "fp8_e5m2": Format(dtype="float8_e5m2", bits=8), "int8": Format(dtype="int8", bits=8),
    "int4": Format(dtype="uint8", bits=4, group=32, offsets=True),
}  # fmt: skip
BYTES: dict[Dtype, float] = {name: format.bytes for name, format in FORMATS.items()}
"""Bytes of one number of each format."""
HALVES: tuple[HalfDtype, ...] = ("bf16", "fp16")
"""The formats of half precision."""

_HALF = "O1 with dtype={0} is autocast, and O2 keeps weights in {0} with fp32 masters."
_LEVELS_OF: dict[str, str] = {
    **dict.fromkeys(
        ("bf16", "bfloat16", "bf16-mixed", "bf16-true", "half", "mixed", "amp"), _HALF.format("bf16")
    ),
    **dict.fromkeys(("fp16", "float16", "16", "16-mixed", "16-true"), _HALF.format("fp16")),
    **dict.fromkeys(("fp32", "float32", "32", "32-true", "full", "no"), "O0 is fp32 throughout."),
    "tf32": "O0 with matmul=high multiplies in TF32.",
    "fp8": "O1 with products=fp8 multiplies in fp8.",
}


def level_of(word: str) -> str:
    """A hint on the levels of precision for a type, or another program's word for it, after a space; else ""."""
    return f" {level}" if (level := _LEVELS_OF.get(word.lower())) else ""


Products = Literal[
    "plain", "packed", "fp8", "fp8_tensorwise", "int8", "int8_all", "int8_pact", "int8_weights", "int4"
]
ProductPass = Literal["forward", "input", "weight"]
"""The products of a linear layer in training: outputs, gradients of inputs, gradients of weights."""
Scales = Literal["none", "tensorwise", "rowwise", "groups"]
Weights = Literal["auto", "plain", "packed", "int8", "int8_weights", "int4", "fp8"]
"""Forms in which the weights of a trained model can be stored for inference."""
StoredFormat = Literal["int8", "int8_weights", "int4"]
"""Forms of quantised weights in a folder."""
BaseWeights = Literal["plain", "int8_weights", "int4"]
"""Forms in which frozen weights may be stored in training."""
Lossy = Literal["int8", "fp8", "int4"]
"""Types of a server's weights that change results; each is also the form in which layers store them."""
WeightType = Literal["auto", "fp32", "bf16", "fp16", Lossy]
"""Types of weights that a server may be chosen for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """How a linear layer multiplies and stores its weights."""

    weights: Dtype | None
    """The format in which its weights are multiplied; None: the model's own, so that results do not change."""
    scales: Scales = "none"
    """The elements that share a scale: a whole tensor, each row over which a product sums, or each group of a row."""
    devices: tuple[str, ...] = ()
    """Kinds of devices that support it in inference, where a row's results must not depend on other rows."""
    capability: tuple[int, int] = (0, 0)
    """The lowest compute capability of NVIDIA GPUs that support it."""
    multiple: tuple[int, int] = (1, 1)
    """Numbers of inputs and outputs must be multiples of these; other layers do not use the format."""
    linears: Literal["all", "blocks"] = "all"
    """Which linear layers use it: all with the role of a linear, or those inside the blocks except routers."""
    trains: tuple[str, ...] = ()
    """Kinds of devices that support it in training, where weights are also kept unrounded."""
    passes: tuple[ProductPass, ...] = ()
    """The products of training that use this format; the rest use the compute type."""
    saved_inputs: Dtype | None = None
    """The format in which inputs are saved for the backward pass; None: the compute type."""
    clips: bool = False
    """Whether each layer's inputs have one scale with a learned limit."""
    splits: bool = False
    """Whether ranks that split a layer may each round their part separately."""

    @property
    def group(self) -> int:
        """Number of inputs that share a scale; 0: all inputs of an output, or all of a tensor."""
        return FORMATS[self.weights].group if self.weights else 0

    @property
    def serves(self) -> bool:
        """Whether a trained model can be stored in this form."""
        return bool(self.devices)


_ALL: tuple[ProductPass, ...] = ("forward", "input", "weight")
PRODUCTS: dict[Products, Product] = {
    "plain": Product(weights=None, devices=("cpu", "cuda"), trains=("cpu", "cuda"), splits=True),
    "packed": Product(weights=None, devices=("cpu",)),
    "fp8": Product(
        weights="fp8", scales="rowwise", devices=("cuda",), capability=(9, 0), multiple=(16, 16), linears="blocks",
        trains=("cuda",), passes=_ALL
    ),
    "fp8_tensorwise": Product(
        weights="fp8", scales="tensorwise", capability=(8, 9), multiple=(16, 16), linears="blocks", trains=("cuda",),
        passes=_ALL, saved_inputs="fp8"
    ),
    "int8": Product(
        weights="int8", scales="rowwise", devices=("cpu",), capability=(8, 0), trains=("cpu", "cuda"),
        passes=("forward", "input"), saved_inputs="int8", splits=True
    ),
    "int8_all": Product(
        weights="int8", scales="rowwise", capability=(8, 0), trains=("cpu", "cuda"), passes=_ALL, saved_inputs="int8",
        splits=True
    ),
    "int8_pact": Product(
        weights="int8", scales="rowwise", capability=(8, 0), trains=("cpu", "cuda"), passes=("forward", "input"),
        saved_inputs="int8", clips=True, splits=True
    ),
    "int8_weights": Product(weights="int8", scales="rowwise", devices=("cpu",)),
    "int4": Product(weights="int4", scales="groups", devices=("cpu",), multiple=(32, 16)),
}  # fmt: skip
LOSSY: tuple[Lossy, ...] = get_args(Lossy)
STORED_FORMATS: tuple[StoredFormat, ...] = get_args(StoredFormat)
