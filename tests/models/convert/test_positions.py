"""Interpolated positions."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.models.convert import resize_positions


@pytest.mark.parametrize("learned", [0, 1, 2])
def test_a_smooth_field_stays_what_it_was(learned: int) -> None:
    """A plane over the grid, sampled at cell centres, is a plane after interpolation, edges excepted."""

    def plane(side: int) -> torch.Tensor:
        centres = (torch.arange(side) + 0.5) / side
        rows, columns = torch.meshgrid(centres, centres, indexing="ij")
        return torch.stack([rows, columns, 3 * rows - columns], dim=-1)

    token = torch.full((learned, 3), 9.0)
    old = torch.cat([token, plane(8).flatten(0, 1)])
    new = resize_positions(old, 12 * 12 + learned, learned=learned)
    assert torch.equal(new[:learned], token)
    inner = new[learned:].unflatten(0, (12, 12))[3:-3, 3:-3]
    torch.testing.assert_close(inner, plane(12)[3:-3, 3:-3], rtol=0, atol=1e-5)


def test_the_same_size_is_left_alone() -> None:
    positions = torch.randn(17, 3)
    assert resize_positions(positions, 17, learned=1) is positions


def test_half_precision_is_interpolated_in_full() -> None:
    positions = torch.randn(16, 3)
    half = resize_positions(positions.to(torch.bfloat16), 36, learned=0)
    assert half.dtype == torch.bfloat16
    full = resize_positions(positions.to(torch.bfloat16).float(), 36, learned=0)
    assert torch.equal(half, full.to(torch.bfloat16))


def test_no_square_is_refused() -> None:
    with pytest.raises(ConfigError, match="17 tokens cannot be resized to 36"):
        resize_positions(torch.randn(17, 3), 36, learned=0)
