"""A diffusion model over ranks learns what it learns in one process: conditions, heads for images, given routes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from helpers.equality import Close, Trained, beside_one, hold
from helpers.families import ENROLLED, batches, loss
from helpers.spawn import spawn
from helpers.sweeps import sweep
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.models import Model, create
from penstock.models.block import ZeroLinear
from penstock.parallel import dims_of

NAMES = ["diffusion of texts", "diffusion moe", "experts of blocks"]
LAYOUTS = {
    2: ["tp=2 micro_batch=4", "tp=2 sp=true micro_batch=4 token_order=batch_second", "cp=2 micro_batch=4",
        "pp=2 micro_batch=2 accumulate=2", "dp=2 micro_batch=2 sharding=fsdp recompute=full"],
    4: ["tp=2 pp=2 sp=true micro_batch=2 accumulate=2", "cp=2 dp=2 micro_batch=2 sharding=zero2"],
}  # fmt: skip


def _stirred(config: Any) -> Model:
    """A model in fp64 whose gates and head are not 0, as they are at first: then every part has a gradient."""
    model = create(config).double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, ZeroLinear):
                module.weight.normal_(std=0.3)
    return model


def _with_weights(config: Any, step: int, samples: int) -> tuple[Any, ...]:
    """Batches whose words have weights, too."""
    *inputs, targets = batches(config, step, samples)
    inputs += [None] * (len(config.graph.arguments) - len(inputs))
    given = dict(zip(config.graph.arguments, inputs, strict=True))
    given["token_weights"] = 0.5 + (given["tokens"] + step) % 4
    return *given.values(), targets


def _ranks(lines: list[str]) -> list[tuple[str, Trained, Trained]]:
    found, known = [], dict[tuple[str, Plan], Trained]()
    for name, line in itertools.product(NAMES, lines):
        config = ENROLLED[name].config
        weighed = config.text is not None and "cp=" not in line  # which refuses weights of words
        options: dict[str, Any] = {
            "steps": 2, "recipe": Recipe(lr=3e-3, eps=1e-4), "loss": loss, "double": True,
            "batches": partial(_with_weights if weighed else batches, config),
        }  # fmt: skip
        said = f"{name}{', weighed' * weighed}: {line}"
        found.append(
            beside_one(
                said, lambda config=config: partial(_stirred, config), Plan.parse(line), known, **options
            )
        )
    return found


@pytest.mark.parametrize("world", sweep(LAYOUTS, [2]))
def test_every_layout_trains_it_as_one_process_does(world: int) -> None:
    for said, got, expected in spawn(_ranks, world, LAYOUTS[world], timeout=280)[0]:
        close = {"weights": Close(1e-5, 1e-7), "figures": Close(1e-6, 1e-12), "norms": Close(1e-5, 1e-12)}
        hold(said, got, expected, **close)


def _evaluated_apart() -> None:
    """Each rank has images of one expert alone, another on each."""
    config, plan = ENROLLED["experts of blocks"].config, Plan.parse("dp=2 micro_batch=2 sharding=fsdp")
    built = build(partial(_stirred, config), plan, loss=loss, dims=dims_of(plan, "cpu"))
    *inputs, _, _ = batches(config, 0, 2)
    images, *others = inputs
    rank = torch.distributed.get_rank()
    with built.inference():
        of_all = built.model(images.double(), *others, torch.tensor([0, 1]))
        of_one = built.model(images.double(), *others, torch.tensor([rank, rank]))
    torch.testing.assert_close(of_one[rank], of_all[rank])
    assert not torch.allclose(of_one[1 - rank], of_all[1 - rank], atol=1e-3)


def test_ranks_evaluate_images_of_different_experts_together() -> None:
    spawn(_evaluated_apart, 2, timeout=120)
