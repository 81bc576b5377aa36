"""The levels O0 to O3 as data: what each property of mixed precision is, and which combinations make no sense.

The naming is NVIDIA Apex's; the mechanisms are those of Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from reprlib import repr as brief
from typing import Any, Literal, get_args

import torch

from penstock.config.convert import nearest, present
from penstock.config.formats import PRODUCTS, HalfDtype, Products, level_of
from penstock.config.numerics import numerics_of
from penstock.config.plan import Plan
from penstock.config.removed import removal
from penstock.config.run import Lists
from penstock.cpu import this_cpu
from penstock.dtypes import DTYPES, HALVES
from penstock.errors import ConfigError
from penstock.precision.lists import OpLists, default_lists

Level = Literal["O0", "O1", "O2", "O3"]
Width = Literal["fp32", "half"]
Master = Literal["none", "copy"]
Outputs = Literal["fp32", "keep"]

LEVELS: tuple[Level, ...] = get_args(Level)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": get_args(Width),
    "autocast": (False, True),
    "norms": get_args(Width),
    "master": get_args(Master),
    "outputs": get_args(Outputs),
    "products": tuple(name for name, row in PRODUCTS.items() if row.trains and not row.clips),
}

_APEX = {
    "opt_level": 'precision="O1"',
    "cast_model_type": "dtype",
    "patch_torch_functions": "autocast",
    "keep_batchnorm_fp32": 'norms="fp32", or norms="half" for False',
    "master_weights": 'master="copy", or master="none" for False',
    "cast_model_outputs": 'outputs="keep", or outputs="fp32"',
    "num_losses": "losses",
    "min_loss_scale": 'scaler={"floor": …}',
    "max_loss_scale": 'scaler={"ceiling": …}',
    "enabled": 'precision="O0" for False, and leave it out for True',
    "verbosity": "nothing: leave it out; logging tells what was done",
}
_FP32 = torch.finfo(torch.float32)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Every property of how a model is trained in mixed precision. Made by `properties_of`."""

    level: Level
    dtype: torch.dtype | None
    """The half-width type, or None where nothing is half."""
    weights: Width
    """Type of the weights that the forward pass reads, and so of the gradients."""
    autocast: bool
    """Whether each operation runs in the type that the op lists give it, or in that of its arguments."""
    norms: Width
    """Type of the weights and arithmetic of normalisation layers."""
    master: Master
    """Where the fp32 value of a half weight lives: nowhere, or in a copy."""
    loss_scale: float | Literal["dynamic"]
    """Factor of the loss before the backward pass, so that small gradients do not vanish in fp16."""
    outputs: Outputs
    """Whether floating outputs of the model are turned to fp32, for losses that are computed outside."""
    products: Products
    """How linear layers multiply: see `penstock.config.formats.PRODUCTS`."""
    lists: OpLists | None = None
    """An `OpLists`; None for the default of the dtype."""

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled at all."""
        return self.loss_scale != 1.0

    @property
    def relisted(self) -> bool:
        """Whether an operation is in another list than by default; modules apart."""
        if self.lists is None or self.dtype is None:
            return False
        defaults = [default_lists(self.dtype, place).policies() for place in ("cpu", "cuda")]
        return self.lists.policies() not in defaults

    @property
    def dtype_name(self) -> str:
        """`bf16`, `fp16`, or `fp32` where nothing is half."""
        return "fp32" if self.dtype is None else HALVES[self.dtype]

    def describe(self) -> str:
        """One line that says all that differs from plain fp32."""
        if self.level == "O0":
            return "O0: fp32 throughout"
        half = self.dtype_name
        parts = [f"weights {half if self.weights == 'half' else 'fp32'}"]
        parts.append("each operation by the op lists" if self.autocast else f"compute {half}")
        parts.append(f"norms {half if self.norms == 'half' else 'fp32'}")
        if self.master != "none":
            parts.append("fp32 master weights")
        parts.append("no loss scale" if not self.scales else f"loss scale {self.loss_scale}")
        if self.products != "plain":
            parts.append(f"matrix products in {self.products}")
        return f"{self.level} in {half}: " + ", ".join(parts)


def properties_of(
    level: str, *, dtype: str | torch.dtype = "auto", device: torch.device | str = "cpu", **overrides: Any
) -> Precision:
    """The properties of a level, with overrides; `dtype` is bf16, fp16 or auto, which chooses by the hardware.

    Overrides are the fields of `Precision`; None leaves the level's own. Raises ConfigError with every contradiction.
    """
    checked = _level(level)
    device = torch.device(device)
    overrides = dict(present(Plan, name, value) for name, value in overrides.items())
    unknown = [name for name in overrides if name not in _OVERRIDES]
    if unknown:
        raise ConfigError(
            [
                f"{name} is Apex's name; write {_APEX[name]}."
                if name in _APEX
                else f"{name} is no property of a precision level.{nearest(name, _OVERRIDES)} "
                f"There are {', '.join(_OVERRIDES)}."
                for name in unknown
            ]
        )
    overrides = {name: value for name, value in overrides.items() if value is not None}
    problems = [
        removal(Plan, name, value, name)
        or f"{name} is {brief(value)}, but must be one of {', '.join(map(repr, _CHOICES[name]))}."
        for name, value in overrides.items()
        if name in _CHOICES and value not in _CHOICES[name]
    ]
    if not isinstance(overrides.get("lists", OpLists()), OpLists):
        problems.append(
            f"lists is a {type(overrides['lists']).__name__}, but must be an OpLists: take "
            "penstock.precision.lists.default_lists(torch.bfloat16), or that of torch.float16, and add to it with "
            "with_(…)."
        )
    if "loss_scale" in overrides:
        problems += _scale_problems(overrides["loss_scale"])
    if problems:
        raise ConfigError(problems)
    half = _dtype(checked, dtype, device)
    base = precision_of(Plan(precision=checked, dtype=HALVES[half]) if half else Plan())
    if checked == "O3":
        # As in Apex, a script that asks for O3 need not scale its loss; Penstock's own step does in fp16.
        base = replace(base, loss_scale=1.0)
    if overrides.get("weights") == "fp32" and base.weights == "half":
        # fp32 weights need no master and no half norms.
        overrides = {"master": "none", "norms": "fp32", "autocast": True, **overrides}
    properties = replace(base, **overrides)
    if problems := list(_contradictions(properties)):
        raise ConfigError(problems)
    return properties


def precision_of(plan: Plan, lists: Lists | None = None, device: torch.device | str = "cpu") -> Precision:
    """The properties of a Plan's level in training, as its `Numerics` have them. `lists` are added to the op lists of
    its type on a device. Raises ConfigError where the level has no op lists, or an operation is not known.
    """
    numerics = numerics_of(plan)
    half = DTYPES[numerics.compute] if numerics.half else None
    chosen: OpLists | None = None
    if lists is not None and lists != Lists():
        if half is None or not numerics.by_lists:
            raise ConfigError(
                f"recipe.lists has no effect with plan.precision={plan.precision}, which has no op lists; use "
                "precision=O1 or O2, or leave it out."
            )
        chosen = default_lists(half, torch.device(device).type).with_(**asdict(lists))
    return Precision(
        level=plan.precision,
        dtype=half,
        weights="fp32" if numerics.weights == "fp32" else "half",
        autocast=numerics.by_lists,
        norms="fp32" if numerics.norms == "fp32" else "half",
        master="none" if numerics.masters == "shards" else numerics.masters,
        loss_scale="dynamic" if numerics.loss_scale else 1.0,
        outputs="keep" if half is None else "fp32",
        products=numerics.products,
        lists=chosen,
    )


_OVERRIDES = tuple(f.name for f in fields(Precision) if f.name not in ("level", "dtype"))


def _level(level: str) -> Level:
    for known in LEVELS:
        if level == known:
            return known
    text = str(level)
    if len(text) == 2 and text[0] in "0oº" and text[1] in "0123":
        what = "a zero" if text[0] == "0" else "a small o"
        raise ConfigError(
            f'precision={text!r} begins with {what}; the levels are written with the capital letter O: "O{text[1]}".'
        )
    raise ConfigError(
        f'There is no precision {brief(text)}; choose "O0" (fp32), "O1" (each operation by lists), "O2" (half weights '
        f'with fp32 master weights) or "O3" (half throughout).{level_of(text)}'
    )


def _dtype(level: Level, dtype: str | torch.dtype, device: torch.device) -> torch.dtype | None:
    """The half type; None at O0."""
    name = next((n for d, n in HALVES.items() if dtype in (n, d)), dtype)
    if level == "O0":
        if name != "auto":
            raise ConfigError(
                f"dtype={name} has no effect with O0, which computes in fp32; leave it out or choose O1."
            )
        return None
    if name == "auto":
        chosen, why = auto_dtype(device)
        _once(f"dtype=auto chose {chosen}: {why}.")
        if device.type == "cpu" and this_cpu().bf16 is False:
            _once(
                "This CPU has no units for bf16 (AVX512-BF16 or AMX on x86), so that half precision is up to ten times "
                'slower than fp32 here. For speed choose precision="O0"; the half levels serve to study numerics.',
                logging.WARNING,
            )
        return DTYPES[chosen]
    if name not in HALVES.values():
        synonyms = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": 'precision="O0"'}
        meant = synonyms.get(str(dtype).removeprefix("torch."))
        hint = f"write {meant}" if meant else "choose bf16, fp16 or auto"
        raise ConfigError(f"dtype={brief(dtype)} is not known; {hint}.")
    if name == "fp16" and device.type == "cpu":
        _once(
            "fp16 on a CPU is emulated and several times slower than fp32: it serves to study numerics. "
            "For speed use dtype=bf16 where the CPU has it, or O0.",
            logging.WARNING,
        )
    return DTYPES[name]  # type: ignore[index]


def auto_dtype(device: torch.device) -> tuple[HalfDtype, str]:
    """The type that dtype=auto chooses on a device, and why."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8 or torch.version.hip is not None:
            return "bf16", "this GPU multiplies bf16 at the full rate, and bf16 needs no loss scale"
        return "fp16", f"this GPU, of compute capability {major}.{minor}, has fast fp16 and no fast bf16"
    if device.type == "cpu":
        return "bf16", "CPUs have units for bf16 or none at all" + (
            ", and this one has none" if this_cpu().bf16 is False else ""
        )
    return "bf16", "bf16 has the range of fp32 and needs no loss scale"


def _scale_problems(value: Any) -> Iterator[str]:
    if value == "dynamic":
        return
    if isinstance(value, str) and re.fullmatch(r"[0-9.]+(e[+-]?[0-9]+)?", value):
        yield f"loss_scale is the string {brief(value)}; write the number {value[:30]}."
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        yield f'loss_scale is {brief(value)}, but must be "dynamic" or a finite number above 0, such as 1024.0.'
    elif not _FP32.tiny <= value <= _FP32.max:
        yield (
            f"loss_scale is {brief(value)}, which is beyond the numbers of fp32, in which losses are scaled; choose "
            f"one from {_FP32.tiny:.2g} to {_FP32.max:.2g}, such as 1024.0."
        )


def _contradictions(p: Precision) -> Iterator[str]:
    if p.dtype is None:
        for name, plain in (
            ("weights", "fp32"), ("autocast", False), ("norms", "fp32"), ("master", "none"),
            ("products", "plain"),
        ):  # fmt: skip
            if getattr(p, name) != plain:
                yield f"{name}={getattr(p, name)!r} contradicts O0, in which nothing is half; choose O1, O2 or O3."
        if p.lists is not None:
            yield (
                "lists have no effect with O0, in which every operation runs in fp32; leave them out, or choose O1 "
                "or O2."
            )
        if p.scales:
            yield "loss_scale contradicts O0: fp32 gradients do not vanish; leave it out."
        return
    if p.weights == "fp32" and p.master != "none":
        yield f"master={p.master!r} contradicts weights='fp32': they are the master weights; leave master out."
    if p.weights == "fp32" and p.norms == "half":
        yield "norms='half' contradicts weights='fp32'; leave it out, or name the norms in the half list."
    if p.weights == "fp32" and not p.autocast:
        yield "autocast=False with weights='fp32' leaves nothing in half precision; choose O0, or weights='half'."
    if p.products != "plain" and not p.autocast:
        yield f"products={p.products!r} replaces O1's and O2's matrix products; it needs autocast=True."
    elif p.products != "plain" and p.dtype != torch.bfloat16:
        yield f"products={p.products!r} has bf16 around its products; it needs dtype='bf16'."
    if p.lists is not None and not p.autocast:
        yield "lists have no effect with autocast=False, where each operation runs in the type of its arguments."


@functools.cache
def _once(message: str, level: int = logging.INFO) -> None:
    _log.log(level, message)
