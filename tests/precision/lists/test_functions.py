"""Functions of one's own and of other libraries on the op lists."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.precision.lists import (
    fp32_function,
    half_function,
    promote_function,
    register_fp32_function,
    register_half_function,
    register_promote_function,
)


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


@pytest.fixture
def library() -> types.ModuleType:
    module = types.ModuleType("library")
    module.product = product  # type: ignore[attr-defined]
    return module


def test_functions_of_another_library_by_name(on: torch.autocast, library: types.ModuleType) -> None:
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    with register_fp32_function(library, "product"), on:
        assert library.product(x, x).dtype == torch.float32
    assert library.product is product
    handle = register_half_function(library, "product")
    with on:
        assert library.product(x.float(), x.float()).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="already registered as a half function"):
        register_promote_function(library, "product")
    handle.remove()
    assert library.product is product


def test_methods_of_a_class(on: torch.autocast) -> None:
    class Kernel:
        def run(self, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def apply(x: Tensor) -> Tensor:
            return x

    x = torch.ones(4)
    with register_half_function(Kernel, "run"), register_half_function(Kernel, "apply"), on:
        assert Kernel().run(x).dtype == torch.bfloat16
        assert Kernel().apply(x).dtype == Kernel.apply(x).dtype == torch.bfloat16
    with on:
        assert Kernel().run(x).dtype == Kernel().apply(x).dtype == torch.float32


def test_what_cannot_be_registered(library: types.ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"no function 'produkt'.*Did you mean 'product'"):
        register_half_function(library, "produkt")
    with pytest.raises(ConfigError, match=r"OpLists\.with_\(half=\['torch\.bmm'\]\)"):
        register_half_function(torch, "bmm")
