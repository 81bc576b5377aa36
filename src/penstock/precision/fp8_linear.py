"""Linear layers of a model's blocks in fp8: conversion in place, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.anatomy import Anatomy, anatomy_of
from penstock.models.roles import Experts
from penstock.precision.fp8 import MULTIPLE, SCALINGS, Scaling, fp8_linear

_log = logging.getLogger(__name__)
# Compute capability of the first chips with each kernel: Ada for tensorwise, Hopper for rowwise scales.
_NEEDS: dict[Scaling, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (9, 0)}


class Fp8Linear(nn.Linear):
    """A linear layer whose products are in fp8 inside an accelerated forward pass (under autocast to bf16), and which
    is a plain one elsewhere. Made by `convert_to_fp8` out of an nn.Linear, whose parameters and names it keeps.
    """

    scaling: Scaling
    emulate: bool

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type) or not x.numel():
            return super().forward(x)
        dtype = torch.get_autocast_dtype(x.device.type)
        if dtype != torch.bfloat16:
            raise ConfigError(
                f"fp8 linear layers compute in bf16 around their products, but autocast is to {dtype}; use "
                "dtype='bf16' or leave fp8 out."
            )
        return fp8_linear(x, self.weight, self.bias, scaling=self.scaling, dtype=dtype, emulate=self.emulate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.scaling}{', emulated' if self.emulate else ''}"


_STUDY = (
    "leave fp8 out, or study its rounding with penstock.precision.fp8_linear.convert_to_fp8(…, emulate=True)"
)


def fp8_problem(
    device: torch.device | str, scaling: Scaling = "tensorwise", *, remedy: str = _STUDY
) -> str | None:
    """Why a device cannot multiply in fp8, as a sentence with the remedy; None if it can."""
    device = torch.device(device)
    major, minor = _NEEDS[scaling]
    if device.type != "cuda":
        return (
            f"fp8 needs a GPU of compute capability {major}.{minor} or newer for {scaling} scales, and the model is on "
            f"{device.type}; move it to such a GPU first, {remedy}."
        )
    if torch.version.hip is not None:
        return f"fp8 is built for NVIDIA's formats and not tested on AMD's GPUs; {remedy}."
    found = torch.cuda.get_device_capability(device)
    if found < (major, minor):
        other = (
            " tensorwise scales need 8.9 only;"
            if scaling == "rowwise" and found >= _NEEDS["tensorwise"]
            else ""
        )
        return (
            f"fp8 with {scaling} scales needs a GPU of compute capability {major}.{minor} or newer, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]};{other} {remedy}."
        )
    return None


def convert_to_fp8(
    model: nn.Module,
    scaling: Scaling = "tensorwise",
    *,
    device: torch.device | str | None = None,
    emulate: bool = False,
) -> dict[str, str]:
    """Let the linear layers inside a model's repeated blocks multiply in fp8, in place; returns the qualified names of
    the other linear layers, each with the reason.

    What comes before and after the blocks (stem, embeddings, head) stays as it is: the first and last layers are the
    most sensitive and a small part of the work. So do layers whose sides are no multiples of 16. Weights stay what they
    are and so do state dicts; `restore_from_fp8` undoes it, and a second conversion changes `scaling`. Convert before
    compiling and sharding. `device` is where the model will run, by default where its weights are. `emulate` computes
    the same numbers slowly, on any device.

    Raises:
        ConfigError: the device has no fp8, or no layer can be converted.
    """
    if scaling not in SCALINGS:
        raise ConfigError(f"There is no fp8 scaling {scaling!r}; choose {' or '.join(SCALINGS)}.")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not emulate:
        devices = {module.weight.device for module in linears.values()} if device is None else {device}
        if problems := sorted({problem for device in devices if (problem := fp8_problem(device, scaling))}):
            raise ConfigError(problems)
    kept = dict(kept_from_fp8(linears, anatomy_of(model)))
    chosen = [name for name in linears if name not in kept]
    if not chosen:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:5])
        raise ConfigError(
            f"No linear layer of this {type(model).__name__} can multiply in fp8 ({reasons or 'it has none'}); "
            "leave fp8 out."
        )
    for name in kept:
        _restore(linears[name])
    for name in chosen:
        linears[name].__class__ = Fp8Linear
        linears[name].__dict__.update(scaling=scaling, emulate=emulate)
    _log.info("fp8 (%s) in %d linear layers; kept: %s", scaling, len(chosen), kept or "none")
    return kept


def kept_from_fp8(linears: dict[str, nn.Linear], anatomy: Anatomy) -> Iterator[tuple[str, str]]:
    """Names of the linear layers that do not multiply in fp8, each with the reason."""
    blocks = tuple(f"{block}." for block in anatomy.blocks)
    routers = set() if anatomy.unknown else {experts.router.name for experts in anatomy.parts(Experts)}
    for name, module in linears.items():
        if not name.startswith(blocks):
            yield name, "outside the blocks"
        elif name in routers:
            yield name, "a router, whose choice of experts rounding would change"
        elif type(module) not in (nn.Linear, Fp8Linear):
            kind = type(module)
            yield name, f"a {kind.__module__}.{kind.__qualname__}, which computes in its own way"
        elif module.in_features % MULTIPLE or module.out_features % MULTIPLE:
            yield name, f"{module.in_features} × {module.out_features} are no multiples of {MULTIPLE}"


def restore_from_fp8(model: nn.Module) -> None:
    """Make every layer that `convert_to_fp8` converted plain again, in place."""
    for module in model.modules():
        _restore(module)


def _restore(module: nn.Module) -> None:
    if type(module) is Fp8Linear:
        module.__class__ = nn.Linear  # type: ignore[assignment]
        del module.__dict__["scaling"], module.__dict__["emulate"]
