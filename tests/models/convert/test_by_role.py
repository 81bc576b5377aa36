"""State dicts between families whose parts have the same roles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.models.anatomy import Anatomy, stack
from penstock.models.convert.vit import translate
from penstock.models.roles import Attention, Embedding, Head, Linear, Norm

HEADS, WIDTH = 2, 6


def _family(qkv: tuple[Linear, ...], *, transposed: bool = False, norm: str = "norm") -> Anatomy:
    out = Linear("out", "row", transposed=transposed)
    attention = Attention("", projections=qkv, out=out, heads=HEADS, kv_heads=HEADS)
    whole = stack(
        ("0", "1"), (Norm(norm), attention), before=(Embedding("table", "token"),), after=(Head("end"),)
    )
    return Anatomy(family="made up", stacks=(whole,))


BY_HEAD = _family((Linear("qkv", "column"),))
FUSED = _family((Linear("c_attn", "column", fused=(1, 1, 1), transposed=True),), transposed=True, norm="ln")
SEPARATE = _family(tuple(Linear(name, "column") for name in ("query", "key", "value")), norm="layernorm")


def _state() -> dict[str, torch.Tensor]:
    """Weights in the names of `BY_HEAD`."""
    state = {"table.weight": torch.randn(5, WIDTH), "end.weight": torch.randn(5, WIDTH)}
    for block in ("0", "1"):
        state |= {
            f"{block}.norm.weight": torch.randn(WIDTH),
            f"{block}.qkv.weight": torch.randn(3 * WIDTH, WIDTH),
            f"{block}.qkv.bias": torch.randn(3 * WIDTH),
            f"{block}.out.weight": torch.randn(WIDTH, WIDTH),
        }
    return state


@pytest.mark.parametrize("other", [BY_HEAD, FUSED, SEPARATE])
def test_there_and_back_is_exact(other: Anatomy) -> None:
    state = _state()
    there = translate(state, BY_HEAD, other)
    back = translate(there, other, BY_HEAD)
    assert sorted(back) == sorted(state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_rows_of_each_head_go_where_they_belong() -> None:
    state = _state()
    separate, fused = (translate(state, BY_HEAD, other) for other in (SEPARATE, FUSED))
    by_head = state["0.qkv.weight"].view(HEADS, 3, 3, WIDTH)  # head, {q, k, v}, feature
    for kind, name in enumerate(("query", "key", "value")):
        assert torch.equal(separate[f"0.{name}.weight"].view(HEADS, 3, WIDTH), by_head[:, kind])
    parts = [separate[f"1.{name}.weight"] for name in ("query", "key", "value")]
    assert torch.equal(fused["1.c_attn.weight"].T, torch.cat(parts))
    assert torch.equal(fused["1.out.weight"].T, state["1.out.weight"])
    assert torch.equal(fused["1.ln.weight"], state["1.norm.weight"])


def test_what_the_target_lacks_keeps_its_name() -> None:
    state: dict[str, Any] = {
        "0.query.weight": torch.zeros(6, 6),
        "extra": torch.zeros(1),
        "table.weight": torch.ones(2),
    }
    assert set(translate(state, SEPARATE, BY_HEAD)) == set(
        state
    )  # without keys and values nothing can be fused
