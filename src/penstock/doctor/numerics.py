"""Checks of what each device computes in each number type, made by computing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

_EMULATED = 4.0
"""A type whose products take this many times as long as fp32's has no unit of its own here."""


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `call`, or why it failed: torch often states the reason in a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return call(), ""
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
            reasons = [str(warning.message) for warning in caught]
            useful = [reason for reason in reasons if "not used because" not in reason]
            reason = first_line(useful[-1] if useful else error)
            return None, "there is none for this device" if reason.startswith("No viable backend") else reason


def types(device: Any) -> Iterator[Finding]:
    """Multiply matrices in each type, compare with the exact result, and say how fast it was compared with fp32.

    A CPU without units for a type computes it correctly, but up to a hundred times slower. No version number says so.
    """
    import torch
    import torch.nn.functional as F

    from penstock.dtypes import HALVES

    size = 256 if device.type == "cpu" else 2048
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
    exact = (a.double() @ b.double().t()).float()
    half = {name: (a.to(dtype), b.to(dtype)) for dtype, name in HALVES.items()}
    # A tolerance is several times the error of rounding the operands. For fp32 it is loose, because an environment
    # variable may select TF32.
    products: list[tuple[str, Callable[[], Any], float]] = [
        ("fp32", lambda: F.linear(a, b), 1e-2),
        ("bf16", lambda: F.linear(*half["bf16"]), 2e-2),
        ("fp16", lambda: F.linear(*half["fp16"]), 5e-3),
        ("fp8", _fp8_product(a, b), 0.1),
    ]
    plain = 0.0
    for name, product, tolerance in products:
        result, why = _attempt(product)
        if result is None:
            yield Finding(f"types on {device.type}", name, "absent", why)
            continue
        error = float((result.float() - exact).norm() / exact.norm())
        right = error < tolerance  # not-a-number compares false with everything, so it is not right
        seconds = _fastest(product, device)
        plain = plain or seconds
        slow = seconds > _EMULATED * plain
        detail = f"relative error of a product {error:.1e}"
        if slow:
            detail += f", works, but emulated: {seconds / plain:,.0f} × slower than fp32"
        elif name != "fp32":
            detail += f", {plain / seconds:.2g} × the speed of fp32"
        detail += "" if right else f", above {tolerance:g}"
        remedy = "" if right else "Install another build of torch; this one computes wrongly here."
        status: Status = "broken" if not right else "slow" if slow else "ok"
        yield Finding(f"types on {device.type}", name, status, detail, remedy, required=name == "fp32")


def _fastest(call: Callable[[], Any], device: Any) -> float:
    """Seconds of the fastest of five calls, a rough figure; `penstock probe` measures precisely.

    Uses one CPU thread. With more, a busy neighbour slows small products up to a hundredfold, each differently.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        for _ in range(5):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times)


def _fp8_product(a: Any, b: Any) -> Callable[[], Any]:
    import torch

    from penstock.products.fp8 import E4M3, scaled_product

    unit_scale = a.new_ones(())
    left, right = a.to(E4M3), b.to(E4M3).t()
    return lambda: scaled_product(left, right, unit_scale, unit_scale, torch.bfloat16)


# -- a check's finding


Status = Literal["ok", "slow", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: `ok`, `slow` (right, but of no use for speed), `absent` (Penstock works without it) or
    `broken` (it should work, and does not)."""

    area: str
    name: str
    status: Status
    detail: str
    remedy: str = ""
    """How to fix it, in one line; empty where nothing needs fixing."""
    required: bool = False
    """Whether Penstock cannot work at all while this is broken."""


def first_line(error: object) -> str:
    """The first line of a message, short enough for a table."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 160 else f"{lines[0][:157]}..."
