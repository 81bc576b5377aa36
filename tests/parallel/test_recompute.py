"""Which blocks recompute, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch

from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.models import ViT
from penstock.parallel.recompute import _Recomputed, recompute_blocks


@pytest.mark.parametrize(
    ("every", "chosen"),
    [("1", [0, 1, 2, 3, 4]), ("2", [0, 2, 4]), ("1.25", [0, 2, 3, 4]), ("2.5", [0, 3]), ("9", [0])],
)
def test_any_share_of_the_blocks_recomputes(every: str, chosen: list[int]) -> None:
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(
            image_size=8, patch_size=4, width=16, depth=5, heads=2, mlp_width=32, classes=4, dropout=0.1
        )
    )
    images = torch.randn(2, 3, 8, 8)

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(images).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    before = gradients()
    recompute_blocks(model, Plan.parse(f"recompute=full recompute_every={every}"))
    assert [i for i, block in enumerate(model.blocks) if isinstance(block.forward, _Recomputed)] == chosen
    assert all(torch.equal(one, other) for one, other in zip(before, gradients()))
