"""Logits that are put off: every use of them is as if they were there, and their cross entropy never makes them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.watched import Watched
from penstock.kernels.deferred import Deferred, make_at_once, put_off

SAMPLES, TOKENS, WIDTH, WORDS = 3, 8, 4, 50


def _head(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WORDS, bias=bias)


def _features() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True)


def _targets() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(0, WORDS, (SAMPLES, TOKENS)).masked_fill(torch.rand(SAMPLES, TOKENS) < 0.3, -100)


ROWS: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda logits: logits, "float": lambda logits: logits.float(),
    "to": lambda logits: logits.to(torch.float64), "to its device": lambda logits: logits.to(logits.device),
    "contiguous": lambda logits: logits.contiguous(), "view": lambda logits: logits.view(-1, logits.size(-1)),
    "view of a shape": lambda logits: logits.view((SAMPLES * TOKENS, WORDS)),
    "reshape": lambda logits: logits.reshape(TOKENS, -1, WORDS),
    "flatten": lambda logits: logits.flatten(0, -2), "all but the last": lambda logits: logits[..., :-1, :],
    "all but the first": lambda logits: logits[:, 1:], "one of each": lambda logits: logits[:, -1, :],
    "a mask": lambda logits: logits[_targets() != -100],
    "a bias": lambda logits: logits + torch.arange(WORDS),
    "two biases": lambda logits: torch.ones(1, WORDS) + (logits + torch.arange(WORDS)),
}  # fmt: skip
MADE: dict[str, Callable[[Any], Any]] = {
    "some columns": lambda logits: logits[..., 2:5], "one column": lambda logits: logits[0, 0, 3],
    "a new dimension": lambda logits: logits[:, None],
    "a shape across columns": lambda logits: logits.view(SAMPLES, -1),
    "flat": lambda logits: logits.flatten(), "a sum": lambda logits: logits + logits,
    "a number": lambda logits: 1 + logits, "a division": lambda logits: logits / 3,
    "a difference": lambda logits: 1 - logits,
    "a function of torch": lambda logits: torch.softmax(logits, dim=-1),
    "a list": lambda logits: torch.cat([logits, logits]), "a method": lambda logits: logits.argmax(dim=-1),
    "a comparison": lambda logits: logits > 0, "a product": lambda logits: logits @ torch.ones(WORDS, 2),
    "length": lambda logits: torch.tensor(len(logits)),
    "what it is": lambda logits: torch.tensor([*logits.shape, logits.dim(), logits.ndim, *logits.size()]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ROWS, *MADE])
def test_every_use_is_that_of_logits(name: str) -> None:
    head, x = _head(), _features()
    use = (ROWS | MADE)[name]
    expected = use(head(x))
    put_off(head)
    found = use(head(x))
    assert isinstance(found, Deferred) == (name in ROWS)
    if isinstance(found, Deferred):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        found = found.whole
    torch.testing.assert_close(found, expected)
    make_at_once(head)
    assert isinstance(head(x), Tensor)


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {}, "sum": {"reduction": "sum"}, "smoothed": {"label_smoothing": 0.1},
    "another number is left out": {"ignore_index": 7}, "of each": {"reduction": "none"},
    "weighed": {"weight": torch.linspace(0.5, 2.0, WORDS)},
}  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradients_are_those_of_all_logits(
    name: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kernels.choices.LOSS_BUDGET", {"cpu": 4 * WORDS * 8})
    head, x, targets = _head(bias=bias), _features(), _targets()
    if "another" in name:
        targets = targets.clamp(min=7)
    added = torch.linspace(-1.0, 1.0, WORDS)

    def ran() -> list[Tensor]:
        head.zero_grad()
        x.grad = None
        logits = head(x).float() + added
        loss = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), **LOSSES[name])
        loss.sum().mul(2.0).backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, *(p.grad for p in head.parameters() if p.grad is not None)]

    expected = ran()
    put_off(head)
    sizes = [0]
    with Watched(lambda func, args, out: sizes.append(out.numel() if isinstance(out, Tensor) else 0)):
        found = ran()
    torch.testing.assert_close(found, expected)
    chunked = name not in ("of each", "weighed")
    assert (max(sizes) < SAMPLES * TOKENS * WORDS / 2) == chunked  # the weight has as many as four rows


def test_classes_as_shares_and_other_layouts_are_made_of_logits() -> None:
    head, x = _head(), _features()
    shares, targets = torch.softmax(torch.randn(SAMPLES * TOKENS, WORDS), dim=1), _targets()

    def ran() -> list[Tensor]:
        logits = head(x)
        layout = F.cross_entropy(logits.transpose(1, 2), targets)
        return [layout, F.cross_entropy(logits.flatten(0, 1), shares)]

    expected = ran()
    put_off(head)
    torch.testing.assert_close(ran(), expected)


@pytest.mark.parametrize("inside", [False, True])
def test_products_are_in_the_type_of_autocast(inside: bool) -> None:
    """Also of a loss that is made when autocast has ended."""
    head, x, targets = _head(), _features(), _targets()

    def ran() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = head(x)
            assert logits.dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return F.cross_entropy(logits.float().view(-1, WORDS), targets.view(-1)).detach()

    expected = ran()
    put_off(head)
    torch.testing.assert_close(ran(), expected)
    with torch.no_grad():
        exact = F.cross_entropy(F.linear(x, head.weight, head.bias).view(-1, WORDS), targets.view(-1))
    assert abs(ran() - exact) > 1e-5  # not of fp32 products: 3e-4 measured


def test_without_training_there_are_logits() -> None:
    head, x = _head(), _features()
    put_off(head)
    with torch.no_grad():
        assert isinstance(head(x), Tensor)
    assert isinstance(head.eval()(x), Tensor)
