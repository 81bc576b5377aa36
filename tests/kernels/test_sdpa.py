"""Any module's calls of torch's attention, switched: the same results by every backend, and which one was called."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.watched import Watched
from penstock.config.plan import AttentionBackend
from penstock.kernels.sdpa import Switch, Watch, own_sdpa, set_sdpa
from penstock.models.anatomy import set_switch


class Own(nn.Module):
    """A block of somebody else's."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return out.transpose(1, 2).flatten(2)


def _ran(module: nn.Module, x: Tensor, mask: Tensor | None = None) -> tuple[list[Tensor], set[str]]:
    """The result and the gradients of weights, and which operators computed them."""
    module.zero_grad()
    names = set[str]()
    with Watched(lambda func, *_: names.add(func.overloadpacket.__name__)):
        out = module(x, mask)
        out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)], names


@pytest.mark.parametrize("backend", ["plain", "math", "flash", "auto"])
@pytest.mark.parametrize("form", ["all", "causal", "mask", "bool mask"])
def test_every_backend_computes_the_same(backend: AttentionBackend, form: str) -> None:
    torch.manual_seed(0)
    module, x = Own(causal=form == "causal"), torch.randn(3, 7, 16)
    mask = torch.ones(3, 1, 7, 7, dtype=torch.bool).tril() if "mask" in form else None
    if form == "mask" and mask is not None:
        mask = torch.zeros(3, 1, 7, 7).masked_fill(~mask, -torch.inf)
    expected, names = _ran(module, x, mask)
    set_sdpa(module, Switch(backend))
    found, switched = _ran(module, x, mask)
    torch.testing.assert_close(found, expected)
    fused = {name for name in names if "flash" in name}
    assert fused
    assert (switched & fused == fused) == (backend in ("flash", "auto"))
    set_sdpa(module, Switch("sdpa"))
    assert _ran(module, x, mask)[1] == names


def test_grouped_keys_and_a_scale_are_as_torchs() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    found = own_sdpa(q, k, v, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, None])
def test_any_leading_dimensions_width_of_values_and_mask(
    lead: tuple[int, ...], causal: bool, kind: torch.dtype | None
) -> None:
    """Also keys for several samples, a mask beside a causal one, and a query that attends to no key."""
    torch.manual_seed(0)
    alike = (1, *lead[1:]) if len(lead) > 1 else lead
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*alike, 6, 8), torch.randn(*alike, 6, 3)
    seen = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool() & (torch.arange(5) != 2)[:, None]
    mask = None if kind is None else torch.zeros(5, 6).masked_fill(~seen, -torch.inf)
    mask = seen if kind == torch.bool else mask
    found = own_sdpa(q, k, v, mask, is_causal=causal)
    if causal and mask is not None:  # torch's composed form refuses both
        mask, causal = mask.masked_fill(torch.ones(5, 6).triu(1).bool(), mask.amin()), False
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal))


def test_plain_attention_of_half_types_stays_in_them() -> None:
    """torch's MATH kernel computes them in fp32, which is what makes it slow."""
    torch.manual_seed(0)
    module, x = Own().bfloat16(), torch.randn(3, 7, 16, dtype=torch.bfloat16)
    expected, _ = _ran(module, x)
    set_sdpa(module, Switch("plain"))
    found, names = _ran(module, x)
    # Scores are rounded to bf16 here, and not in torch's fused kernel; 1.5e-3 was measured of outputs up to 0.5.
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=2e-2)
    assert "_to_copy" not in names


def test_a_copy_of_a_switched_module_computes_with_its_own_weights() -> None:
    module, x = Own(), torch.randn(3, 7, 16)
    set_switch(module, "attention", "plain")
    other = copy.deepcopy(module)
    nn.init.zeros_(other.qkv.weight)
    nn.init.zeros_(other.qkv.bias)
    assert other(x).abs().max() == 0
    assert module(x).abs().max() > 0
    assert list(other.state_dict()) == ["qkv.weight", "qkv.bias"]


def test_calls_are_noted() -> None:
    switch = Switch("sdpa")
    with Watch(switch):
        nn.Linear(2, 2)(torch.randn(1, 2))
        assert not switch.used
        Own()(torch.randn(1, 3, 16))
    assert switch.used
