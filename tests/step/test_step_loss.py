"""The loss of a step is the mean over all its targets, however they are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.spawn import pool
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.kernels.cross_entropy import IGNORED
from penstock.parallel import dims_of
from penstock.parallel.agree import average
from penstock.tasks import ImageClassification, Loss, classification_loss, mean_loss

COUNTS = (3, 0, 1, 5, 0, 0, 2, 4)
"""Targets of each sample: a micro-batch of two, and several of one, have none."""
RECIPE = Recipe(lr=1e-2, eps=1e-4, clip_norm=0.05)


class Words(nn.Module):
    """Numbers (B, 5) to logits (B, 5, 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 16), nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.gelu(self.table(x)))
        return out


class OfWords(ImageClassification):
    """Their mean cross entropy, as a task."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return counting(lambda _: outputs, batch)[0] / max(1, self.targets(batch))  # type: ignore[arg-type]

    def targets(self, batch: Any) -> int:
        return int((batch[1] != IGNORED).sum())


def counting(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Summed cross entropy, and the number of targets."""
    x, targets = batch
    logits = model(x).flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets != IGNORED).sum()


def counting_on_the_host(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """The same with a plain number."""
    total, count = counting(model, batch)
    return total, int(count)


def words() -> tuple[Tensor, Tensor]:
    """Eight samples."""
    generator = torch.Generator().manual_seed(0)
    x, targets = (torch.randint(0, 7, (8, 5), generator=generator) for _ in range(2))
    return x, targets.where(torch.arange(5) < torch.tensor(COUNTS)[:, None], IGNORED)


class Result(NamedTuple):
    """What one or more steps gave."""

    losses: list[float]
    norms: list[float]
    weights: list[Tensor]


def stepped(loss: Loss, sizes: list[int], line: str = "", *, double: bool = False, **recipe: Any) -> Result:
    """Three steps on the same samples, cut into micro-batches of these sizes."""
    torch.manual_seed(0)
    model = Words().double() if double else Words()
    plan = Plan.parse(f"{line} accumulate={len(sizes)}")
    built = build(model, plan, recipe=replace(RECIPE, **recipe), loss=loss)
    if built.scaler is not None:
        built.scaler.scale.fill_(2.0**8)
    x, targets = words()
    micro_batches = list(zip(x.split(sizes), targets.split(sizes), strict=True))
    results = [built.step(micro_batches) for _ in range(3)]
    norms = [float(result.grad_norm) for result in results if result.grad_norm is not None]
    weights = [parameter.detach().double() for parameter in built.model.parameters()]
    return Result([float(result.loss) for result in results], norms, weights)


CUTS = ([2] * 4, [1] * 8, [3, 4, 1], [1, 7])
"""Some of them ragged, as the last micro-batches of an epoch are."""


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize(
    "loss", [OfWords(), counting, counting_on_the_host], ids=["task", "function", "host"]
)
def test_micro_batches_learn_what_one_batch_does(loss: Loss, sizes: list[int]) -> None:
    expected, got = (stepped(loss, each, double=True) for each in ([8], sizes))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.manual_seed(0)
    with torch.no_grad():
        mean = mean_loss(counting, Words().double(), words())
    assert expected.losses[0] == pytest.approx(float(mean), rel=1e-9)


@pytest.mark.parametrize(
    ("line", "clip", "tolerance"),
    [
        ("optimizer=loop", None, 1e-5),
        ("optimizer=foreach", 0.05, 1e-5),
        ("optimizer=fused", None, 1e-5),
        ("optimizer=contiguous", 0.05, 1e-5),
        ("optimizer=fused precision=O1 dtype=fp16", None, 2e-3),
        ("optimizer=fused precision=O2 dtype=fp16", 0.05, 2e-3),
        ("optimizer=contiguous precision=O3", 0.05, 2e-2),
        ("optimizer=fused precision=O2", None, 2e-2),
    ],
)
@pytest.mark.parametrize("loss", [OfWords(), counting], ids=["task", "function"])
def test_every_form_of_a_step_weighs_targets_alike(
    loss: Loss, line: str, clip: float | None, tolerance: float
) -> None:
    expected, got = (stepped(loss, sizes, line, clip_norm=clip) for sizes in ([8], [1, 3, 4]))
    torch.testing.assert_close(got.losses, expected.losses, rtol=tolerance, atol=0.0)
    if clip is not None or "fp16" in line:
        torch.testing.assert_close(got.norms, expected.norms, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(got.weights, expected.weights, rtol=tolerance, atol=tolerance * 1e-2 * 3)


RANKS = ([(0, 1), (2, 5), (5, 6)], [(6, 8), (1, 2)])
"""First and last samples of each rank's micro-batches: one rank has more of them, as where an epoch ends."""


def _on_ranks(line: str) -> list[tuple[float, float]]:
    plan, found = Plan.parse(line), []
    dims = dims_of(plan, "cpu")
    for loss in (OfWords(), counting, counting_on_the_host):
        torch.manual_seed(0)
        built = build(Words().double(), plan, recipe=RECIPE, loss=loss, dims=dims)
        x, targets = words()
        result = built.step([(x[start:stop], targets[start:stop]) for start, stop in RANKS[dims.rank]])
        assert result.grad_norm is not None
        found.append((float(average(result.loss.clone(), dims)), float(result.grad_norm)))
    return found


@pytest.mark.parametrize("optimizer", ["fused", "contiguous"])
def test_ranks_with_other_numbers_of_micro_batches_learn_what_one_batch_does(optimizer: str) -> None:
    expected = stepped(counting, [8], double=True)
    for found in pool(2).run(_on_ranks, f"dp=2 micro_batch=1 optimizer={optimizer}"):
        for each in found:
            assert each == pytest.approx((expected.losses[0], expected.norms[0]), rel=1e-9)


def test_a_function_without_a_count_gives_the_mean_of_means() -> None:
    def mean(model: nn.Module, batch: Any) -> Tensor:
        total, count = counting(model, batch)
        return total / count.clamp(min=1)

    torch.manual_seed(0)
    model = Words()
    parts = list(zip(*(one.split([1, 3, 4]) for one in words()), strict=True))
    expected = sum(float(mean(model, part).detach()) for part in parts) / 3
    assert stepped(mean, [1, 3, 4]).losses[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", [OfWords(), counting], ids=["task", "function"])
def test_a_step_without_targets_has_a_loss_of_zero(loss: Loss) -> None:
    x, targets = words()
    built = build(Words(), Plan(accumulate=2), recipe=RECIPE, loss=loss)
    for parts in (1, 2):
        result = built.step([(x, targets.fill_(IGNORED))] * parts)
        assert float(result.loss) == 0.0
        assert result.grad_norm is not None
        assert float(result.grad_norm) == 0.0
    assert all(parameter.isfinite().all() for parameter in built.model.parameters())


def test_images_without_a_class_count_nothing() -> None:
    x = torch.randn(8, 6)
    classes = torch.tensor([1, 0, IGNORED, IGNORED, 2, IGNORED, 1, 2])
    shares = F.one_hot(classes.clamp(min=0), 3).float()  # as mixup makes them: every sample counts
    for targets in (classes, shares):
        found = []
        for sizes in ([8], [2, 2, 3, 1]):
            torch.manual_seed(0)
            built = build(nn.Linear(6, 3), Plan(), loss=classification_loss)
            result = built.step(list(zip(x.split(sizes), targets.split(sizes), strict=True)))
            found.append((result.loss, result.grad_norm))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0.0)
        torch.manual_seed(0)
        expected = F.cross_entropy(nn.Linear(6, 3)(x), targets)
        torch.testing.assert_close(found[0][0], expected.detach())


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (lambda total, logits: (total, logits), r"must return the mean loss .* or \(sum, count\)"),
        (lambda total, logits: (total, 3, logits), "a tensor of shape"),
    ],
)
def test_other_pairs_are_refused(found: Callable[[Tensor, Tensor], Any], told: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return found(counting(model, batch)[0], model(batch[0]))

    with pytest.raises(ConfigError, match=told):
        build(Words(), Plan(), loss=loss).step([words()])


def test_a_function_counts_for_all_batches_or_for_none() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        total, count = counting(model, batch)
        return (total, count) if len(batch[0]) == 3 else total / count

    x, targets = words()
    with pytest.raises(ConfigError, match="for some batches only"):
        build(Words(), Plan(), loss=loss).step([(x[:3], targets[:3]), (x[3:], targets[3:])])
