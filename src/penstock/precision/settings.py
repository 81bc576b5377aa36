"""The levels O0 to O3 as data: the properties of mixed precision, and their contradictory combinations.

The naming is NVIDIA Apex's; the mechanisms are those of Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from reprlib import repr as brief
from typing import Any, get_args

import torch

from penstock.config.convert import nearest, present
from penstock.config.formats import PRODUCTS, Dtype, HalfDtype, level_of
from penstock.config.numerics import Numerics, numerics_of
from penstock.config.plan import Plan, Precision
from penstock.config.removed import removal
from penstock.config.run import Lists
from penstock.cpu import this_cpu
from penstock.dtypes import DTYPES, HALVES
from penstock.errors import ConfigError
from penstock.precision.lists import OpLists, default_lists

LEVELS: tuple[Precision, ...] = get_args(Precision)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": ("fp32", "half"), "autocast": (False, True), "norms": ("fp32", "half"), "master": ("none", "copy"),
    "outputs": ("fp32", "keep"),
    "products": tuple(name for name, row in PRODUCTS.items() if row.trains and not row.clips),
}  # fmt: skip

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
    "verbosity": "nothing: leave it out; logging reports what was done",
}
_FP32 = torch.finfo(torch.float32)

_log = logging.getLogger(__name__)


def properties_of(
    level: str, *, dtype: str | torch.dtype = "auto", device: torch.device | str = "cpu", **overrides: Any
) -> Numerics:
    """The types of a level, with other properties; `dtype` is bf16, fp16 or auto, which chooses by the hardware.

    Overrides; None keeps the level's own value:

    - `weights`: `fp32` or `half`, the type that the forward pass reads, and so that of the gradients
    - `autocast`: whether each operation runs in the type that the op lists give it, or in that of its arguments
    - `norms`: `fp32` or `half`, for weights and arithmetic of normalisation layers
    - `master`: `none` or `copy`, whether an fp32 value of each half weight is kept
    - `loss_scale`: "dynamic" or a number
    - `outputs`: `fp32` or `keep`
    - `products`: how linear layers multiply, see `penstock.config.formats.PRODUCTS`
    - `lists`: an `OpLists`

    Raises ConfigError with every contradiction.
    """
    checked = _level(level)
    device = torch.device(device)
    overrides = _known(overrides)
    half = _dtype(checked, dtype, device)
    numerics = numerics_of(Plan(precision=checked, dtype=HALVES[half]) if half else Plan())
    if overrides.get("weights") == "fp32" and numerics.weights != "fp32":
        # With fp32 weights, neither masters nor half norms are needed.
        overrides = {"master": "none", "norms": "fp32", "autocast": True, **overrides}
    properties: dict[str, Any] = {
        "weights": "fp32" if numerics.weights == "fp32" else "half", "autocast": numerics.by_lists,
        "norms": "fp32" if numerics.norms == "fp32" else "half", "master": numerics.masters,
        # As in Apex, a script that asks for O3 need not scale its loss; Penstock's own step does in fp16.
        "loss_scale": 1.0 if checked == "O3" else numerics.loss_scale, "outputs": numerics.outputs,
        "products": numerics.products, "lists": None, **overrides,
    }  # fmt: skip
    if problems := list(_contradictions(properties, half)):
        raise ConfigError(problems)
    kinds: dict[str, Dtype] = {"fp32": "fp32", "half": numerics.compute}
    weights = kinds[properties["weights"]]
    return replace(
        numerics, weights=weights, gathered=weights, gathered_linears=weights, gradients=weights,
        by_lists=properties["autocast"], norms=kinds[properties["norms"]], masters=properties["master"],
        loss_scale=properties["loss_scale"], outputs=properties["outputs"], products=properties["products"],
        lists=properties["lists"],
    )  # fmt: skip


def _known(given: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that are set. Raises ConfigError for unknown overrides and for illegal values."""
    overrides = dict(present(Plan, name, value) for name, value in given.items())
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
    return overrides


def half_type(numerics: Numerics) -> torch.dtype | None:
    """The half type; None if nothing is half."""
    return DTYPES[numerics.compute] if numerics.half else None


def listed_numerics(plan: Plan, lists: Lists, device: torch.device | str = "cpu") -> Numerics:
    """The types of a Plan, with `lists` added to the op lists of its half type on a device. Raises ConfigError where
    the level has no op lists, or an operation is unknown.
    """
    numerics = numerics_of(plan)
    if lists == Lists():
        return numerics
    half = half_type(numerics)
    if half is None or not numerics.by_lists:
        raise ConfigError(
            f"recipe.lists has no effect with plan.precision={plan.precision}, which has no op lists; use "
            "precision=O1 or O2, or leave it out."
        )
    return replace(numerics, lists=default_lists(half, torch.device(device).type).with_(**asdict(lists)))


def relisted(numerics: Numerics) -> bool:
    """Whether an operation is in another list than by default, apart from modules."""
    half = half_type(numerics)
    if numerics.lists is None or half is None:
        return False
    defaults = [default_lists(half, place).policies() for place in ("cpu", "cuda")]
    return numerics.lists.policies() not in defaults


_OVERRIDES = (*_CHOICES, "loss_scale", "lists")


def _level(level: str) -> Precision:
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


def _dtype(level: Precision, dtype: str | torch.dtype, device: torch.device) -> torch.dtype | None:
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


def _contradictions(p: Mapping[str, Any], half: torch.dtype | None) -> Iterator[str]:
    if half is None:
        plain = {"weights": "fp32", "autocast": False, "norms": "fp32", "master": "none", "products": "plain"}
        for name, value in plain.items():
            if p[name] != value:
                yield f"{name}={p[name]!r} contradicts O0, in which nothing is half; choose O1, O2 or O3."
        if p["lists"] is not None:
            yield (
                "lists have no effect with O0, in which every operation runs in fp32; leave them out, or choose O1 "
                "or O2."
            )
        if p["loss_scale"] != 1.0:
            yield "loss_scale contradicts O0: fp32 gradients do not vanish; leave it out."
        return
    if p["weights"] == "fp32" and p["master"] != "none":
        yield f"master={p['master']!r} contradicts weights='fp32': they are the master weights; leave master out."
    if p["weights"] == "fp32" and p["norms"] == "half":
        yield "norms='half' contradicts weights='fp32'; leave it out, or name the norms in the half list."
    if p["weights"] == "fp32" and not p["autocast"]:
        yield "autocast=False with weights='fp32' leaves nothing in half precision; choose O0, or weights='half'."
    if p["products"] != "plain" and not p["autocast"]:
        yield f"products={p['products']!r} replaces O1's and O2's matrix products; it needs autocast=True."
    elif p["products"] != "plain" and half != torch.bfloat16:
        yield f"products={p['products']!r} has bf16 around its products; it needs dtype='bf16'."
    if p["lists"] is not None and not p["autocast"]:
        yield "lists have no effect with autocast=False, where each operation runs in the type of its arguments."


@functools.cache
def _once(message: str, level: int = logging.INFO) -> None:
    _log.log(level, message)
