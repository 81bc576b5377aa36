"""Functions of one's own and of other libraries on the op lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.precision.lists import fp32_function, half_function, promote_function


def product(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise, so that its type is that of its arguments, and then a matrix product, which autocast narrows."""
    return (a * b) @ torch.ones(4, 4)


@pytest.fixture
def on() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def test_half(on: torch.autocast) -> None:
    @half_function
    def twice(x: Tensor, *, scale: list[Tensor]) -> Tensor:
        """Doubles."""
        return x * scale[0]

    assert twice(torch.ones(4), scale=[torch.ones(4)]).dtype == torch.float32
    with on:
        assert twice(torch.ones(4), scale=[torch.ones(4)]).dtype == torch.bfloat16
    assert twice.__doc__ == "Doubles."


def test_fp32_turns_autocast_off_inside(on: torch.autocast) -> None:
    wide = fp32_function(product)
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    with on:
        assert product(x, x).dtype == torch.bfloat16
        assert wide(x, x).dtype == torch.float32
        assert torch.is_autocast_enabled("cpu")


def test_promote(on: torch.autocast) -> None:
    @promote_function
    def first(a: Tensor, b: Tensor) -> Tensor:
        return a

    half, single = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    with on:
        assert first(half, single).dtype == torch.float32
        assert first(half, half).dtype == torch.bfloat16
        assert first(half, torch.ones(4, dtype=torch.int64)).dtype == torch.bfloat16
    assert first(half, single).dtype == torch.bfloat16


def test_compiles(on: torch.autocast) -> None:
    wide = fp32_function(product)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return wide(x, x)

    assert run(torch.ones(4, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_functions_of_another_library_are_replaced(on: torch.autocast) -> None:
    class Kernel:
        run = half_function(product)
        apply = staticmethod(half_function(lambda x: x))

    x = torch.ones(4, 4)
    with on:
        assert Kernel.run(x, x).dtype == Kernel().apply(x).dtype == torch.bfloat16
    assert Kernel.run(x, x).dtype == torch.float32
    with pytest.raises(ImportError, match=r"replace the function: library\.f = half_function\(library\.f\)"):
        from penstock.precision.lists import register_half_function  # type: ignore[attr-defined]  # noqa: F401
