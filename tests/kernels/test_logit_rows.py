"""Loss and gradient of rows of logits in place: plain form and kernel against torch's operators in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.native_kernels import changed_terms_are_seen, needs_compiler
from helpers.operators import assert_close_to_exact
from helpers.triton_kernels import after_steps
from penstock.errors import ConfigError
from penstock.kernels import native_losses
from penstock.kernels.cross_entropy import cross_entropy
from penstock.kernels.distil import Taught, divergences
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.logit_rows import logit_rows_

KERNEL = "logit_rows"
MUTANTS = [
    (KERNEL, "loss += z_loss * log_sum * log_sum", "loss += z_loss * log_sum"),
    (KERNEL, "1.0 + 2.0 * z_loss * log_sum", "1.0 + z_loss * log_sum"),
    (KERNEL, "at == target, grad - (1.0 - smoothing)", "at == target, grad - 1.0"),
    (KERNEL, "share * temperature * pull", "share * pull"),
    (KERNEL, "share * temperature * temperature * divergence", "share * temperature * divergence"),
    (KERNEL, "total = total * exponential(_finite(most) - _finite(new)) +", "total = total +"),
    (KERNEL, "drift = drift * fading", "drift = drift"),
    (KERNEL, "factor = factor * tl.load", "factor = tl.load"),
    (KERNEL, "narrow(tl.zeros([BLOCK]", "narrow(1.0 + tl.zeros([BLOCK]"),
]


def losses_of(
    logits: Tensor, targets: Tensor, taught: Tensor | None, smoothing: float, z_loss: float, share: float,
    heat: float,
) -> Tensor:  # fmt: skip
    """The loss of each row, in torch's operators."""
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    losses = losses + z_loss * torch.logsumexp(logits, 1).square().where(targets != -100, 0.0)
    if taught is None:
        return losses
    apart = divergences(logits, taught, heat).where(targets != -100, 0.0)
    return (1 - share) * losses + share * apart


def check(device: str) -> None:
    """Rows of every kind: losses, sums and gradients are as near to exact ones as eager's."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    plain: dict[str, Any] = {"smoothing": 0.0, "z_loss": 0.0, "share": 0.0, "temperature": 1.0}
    cases = [
        (5, 20_001, torch.float32, plain),
        (4, 50, torch.bfloat16, plain | {"smoothing": 0.1, "z_loss": 0.02}),
        (3, 5_000, torch.float32, plain | {"smoothing": 0.2, "z_loss": 0.01}),
        (6, 8_200, torch.bfloat16, {"smoothing": 0.1, "z_loss": 0.01, "share": 0.4, "temperature": 2.0}),
        (3, 2, torch.float32, plain | {"share": 0.7, "temperature": 0.5}),
        (7, 33, torch.float16, plain | {"smoothing": 0.3, "share": 1.0, "temperature": 3.0}),
        (0, 9, torch.float32, plain),
    ]
    for rows, columns, dtype, terms in cases:
        names = "smoothing", "z_loss", "share", "temperature"
        # Rows of a wider matrix, as where products are padded.
        made = (3 * drawn(rows, columns + 7)).to(dtype)
        made[:, columns:] = 0
        logits = made[:, :columns]
        taught = (2 * drawn(rows, columns)).to(dtype) if terms["share"] else None
        if taught is not None and columns > 9:  # the largest comes last, and is another than the student's
            taught[:, -2:] += 8
            logits[:, -3:-1] += 9
        targets = torch.randint(0, columns, (rows,), generator=generator).to(device)
        targets[::4] = -100
        weights = 1 + drawn(rows).abs()
        leaves = [kind(logits).detach().requires_grad_() for kind in (Tensor.double, Tensor.clone)]
        results = []
        for leaf, wide in zip(leaves, (torch.float64, torch.float32)):
            upper = None if taught is None else taught.to(wide)
            losses = losses_of(leaf.to(wide), targets, upper, *(terms[name] for name in names))
            (losses * weights).sum().mul(3.0).backward()
            results.append([losses.detach(), leaf.grad])
        before = logits.clone()
        kept = logit_rows_(before, targets, taught=taught, gradient=False, **terms)
        assert torch.equal(before, logits), "nobody asked for the gradient"
        losses, sums = logit_rows_(logits, targets, taught=taught, row_weights=weights, scale=3.0, **terms)
        assert torch.equal(kept[0], losses)
        assert bool((made[:, columns:] == 0).all())
        for found, exact, eager in zip((losses, logits), *results):
            assert exact is not None
            assert eager is not None
            least = 1e-6 if dtype == torch.float32 or found is losses else torch.finfo(dtype).eps / 8
            assert_close_to_exact(found, eager, exact, least=least)
        counted = targets != -100
        torch.testing.assert_close(sums, torch.logsumexp(before.float(), 1).where(counted, 0.0))
    blocked = torch.full((2, 9_000), -torch.inf, device=device)  # a span that is blocked as a whole
    blocked[:, 5:8] = 1.0
    losses, _ = logit_rows_(blocked, torch.tensor([6, -100], device=device))
    torch.testing.assert_close(losses.cpu(), torch.tensor([3.0, 1.0]).log())
    torch.testing.assert_close(blocked[0, 4:9].cpu(), torch.tensor([0, 1 / 3, -2 / 3, 1 / 3, 0]))
    check_in_chunks(device)
    check_whole(device)


def check_whole(device: str) -> None:
    """`cross_entropy`, which gives its logits away: rows of a wider matrix, beside its plain form in fp64."""
    made = torch.randn(9, 37, generator=torch.Generator().manual_seed(0)).to(device)
    targets = torch.arange(9, device=device) * 3
    targets[2] = -100
    results = []
    for dtype in (torch.float64, torch.float32):
        logits = made.to(dtype, copy=True).requires_grad_()
        loss = cross_entropy(logits * 1.0, targets, 0.1, 30)
        (0.25 * loss).backward()
        results.append((loss.detach().double(), logits.grad[:, :30].double()))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def check_in_chunks(device: str) -> None:
    """The loss of a linear layer over its plain form in fp64: with padded products, a bias and a teacher."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 8), torch.randn(30, 8), torch.randn(30)
    targets = torch.randint(0, 30, (9,))
    targets[2] = -100
    other, table = torch.randn(9, 6), torch.randn(30, 6)
    for taught in (None, Taught(other, table, None, 0.3, 2.0)):
        gradients = []
        for dtype, budget in ((torch.float64, None), (torch.float32, 4 * 30 * 4)):
            kind: Any = {"device": device, "dtype": dtype}
            leaves = [each.to(**kind, copy=True).requires_grad_() for each in (x, weight, bias)]
            teacher = taught and taught._replace(x=other.to(**kind), weight=table.to(**kind))
            loss = linear_cross_entropy(
                *leaves, targets.to(device), smoothing=0.1, z_loss=0.01, budget=budget, taught=teacher
            )
            (2 * loss).backward()
            gradients.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for exact, found in zip(*gradients, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
        ignored = torch.full_like(targets, -100).to(device)
        loss = linear_cross_entropy(*leaves, ignored, z_loss=0.01, budget=4 * 30 * 4)
        assert float(loss.detach()) == 0.0
        assert all(not grad.any() for grad in torch.autograd.grad(loss, leaves))

    def mean(*leaves: Tensor, budget: int | None) -> Tensor:
        return (
            linear_cross_entropy(*leaves, targets.to(device), smoothing=0.1, z_loss=0.01, budget=budget) / 8
        )

    weights = [each.to(device) for each in (x, weight, bias)]
    whole, ours = (after_steps(partial(mean, budget=budget), weights) for budget in (None, 5 * 30 * 4 * 4))
    torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def test_the_plain_form_is_as_exact_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_losses, "library", lambda _: None)
    check("cpu")


@needs_compiler
def test_the_native_form_is_as_exact_as_eager() -> None:
    _hold_native()


def _hold_native() -> None:
    """Also of logits far from zero, whose log Σ exp in fp32 alone is rounded by more than their differences are."""
    check("cpu")
    logits, targets = 1000 + 3 * torch.randn(4, 700), torch.tensor([0, 699, 5, 7])
    once = F.one_hot(targets, 700)
    exact, eager = logits.double().softmax(1) - once, logits.softmax(1) - once
    logit_rows_(logits, targets)
    assert_close_to_exact(logits, eager, exact, least=1e-6)


NATIVE_MUTANTS = (
    ("total > 0 ? total * std::exp(most - now) : 0.0f", "total"), ("sum += plain;", "sum = plain;"),
    ("(1.0f - smoothing) * wide(z[t]) - mean", "wide(z[t]) - mean"),
    ("z_loss * float(l * l)", "z_loss * float(l)"), ("2.0f * z_loss * high", "z_loss * high"),
    ("low = float(lse[row] - high)", "low = 0.0f"), ("std::memset(g, 0, columns * sizeof(T));", ""),
    ("* up - s) * f);", "* up) * f);"), ("put(g[t], own);", ""),
    ("* up - s - (1.0f - smoothing)) * f", "* up - s - 1.0f) * f"),
    ("float f = factors[row]", "float f = factors[0]"),
)  # fmt: skip
"""Changes of one term of the kernels in C++, each of which `check` sees."""


test_a_changed_term_of_the_native_kernel_is_seen = changed_terms_are_seen(
    "losses", NATIVE_MUTANTS, [native_losses], _hold_native
)


def test_rows_of_other_forms_are_refused() -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([1, -100, 4])
    for wrong in (logits.T, logits[0], logits[:2]):
        with pytest.raises(ConfigError, match="with contiguous rows"):
            logit_rows_(wrong, targets)
