"""The matmul switch is global in torch, and must not leak."""

from __future__ import annotations

import pytest
import torch

from penstock.precision import matmul_precision


def switches() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


def test_is_restored_when_nested_and_after_an_error() -> None:
    before = switches()
    with matmul_precision("medium"):
        assert switches() == ("medium", True)
        with matmul_precision("highest"):
            assert switches() == ("highest", False)
        assert switches() == ("medium", True)
        with pytest.raises(ValueError, match="inside"), matmul_precision("highest"):
            raise ValueError("inside")
        assert switches() == ("medium", True)
    assert switches() == before


@pytest.mark.gpu
def test_high_uses_tf32() -> None:
    a = torch.randn(256, 256, device="cuda")
    exact = a.double() @ a.double()
    with matmul_precision("highest"):
        fine = (a @ a - exact).abs().max()
    with matmul_precision("high"):
        coarse = (a @ a - exact).abs().max()
    assert coarse > 10 * fine
