"""Weights in few bits: what a folder holds of them, and what they stand for."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import CheckpointError
from penstock.models.rounded import RoundedWeight, nearest, plain_state, round_groups, round_rows, rounded_in


@pytest.mark.parametrize("shape", [(6, 64), (3, 6, 64)])
def test_weights_come_back_as_they_were_stored_and_are_the_nearest(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for one, levels in ((round_rows(weight), 127), (round_groups(weight), 15)):
        state = one.stored("a.b") | {"a.norm.weight": torch.ones(3)}
        bits = state["a.b.weight"].numel() * 8 / weight.numel()
        assert bits == (8 if levels == 127 else 4)
        found = rounded_in(state)["a.b"]
        assert torch.equal(found.numbers, one.numbers)
        assert torch.equal(found.values(), one.values())
        steps = one.scales.repeat_interleave(weight.shape[-1] // one.scales.shape[-1], dim=-1)
        assert bool(((one.values() - weight).abs() <= steps * 0.501).all())
        assert int(one.numbers.max()) - int(one.numbers.min()) >= levels
        plain = plain_state(state)
        assert plain.keys() == {"a.b.weight", "a.norm.weight"}
        assert torch.equal(plain["a.b.weight"], one.values())
        meta = plain_state({name: tensor.to("meta") for name, tensor in state.items()})
        assert meta["a.b.weight"].shape == shape
    rows = round_rows(weight)
    assert torch.equal(nearest(rows.values(), rows.scales).numbers, rows.numbers)


def test_tensors_that_do_not_go_together_are_refused() -> None:
    good = round_rows(torch.randn(4, 32)).stored("a")
    small = round_groups(torch.randn(4, 64)).stored("a")
    for broken, words in (
        ({"a.weight_scale": good["a.weight_scale"]}, "is not a matrix of torch.int8"),
        (good | {"a.weight": good["a.weight"].float()}, "is not a matrix of torch.int8"),
        (good | {"a.weight_scale": torch.ones(4, 3)}, "does not go with numbers"),
        (good | {"a.weight_scale": torch.ones(3, 1)}, "does not go with numbers"),
        (good | {"a.weight_scale": torch.ones(4, 0)}, "does not go with numbers"),
        (good | {"a.weight_scale": torch.ones(4, 1, dtype=torch.int64)}, "not floating-point"),
        (good | {"a.input_scale": torch.ones(2)}, "does not go with numbers"),
        (small | {"a.weight_offset": torch.ones(4, 1)}, "does not go with numbers"),
        (small | {"a.weight": small["a.weight"].to(torch.int8)}, "is not a matrix of torch.uint8"),
    ):
        with pytest.raises(CheckpointError, match=words):
            plain_state(broken)


def test_an_expert_is_a_weight_of_its_own() -> None:
    weight = torch.randn(3, 4, 32)
    whole = RoundedWeight(*(getattr(round_rows(weight), name) for name in ("numbers", "scales", "offsets")))
    assert torch.equal(whole.part(1).values(), round_rows(weight[1]).values())
