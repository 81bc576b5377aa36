"""A diffusion model over ranks learns what it learns in one process: conditions, heads for images, given routes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from helpers.equality import Trained, alone, trained
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
    found = []
    for name in NAMES:
        config = ENROLLED[name].config
        options: dict[str, Any] = {
            "steps": 2, "recipe": Recipe(lr=3e-3, eps=1e-4), "loss": loss, "double": True,
        }  # fmt: skip
        for line in lines:
            weighed = config.text is not None and "cp=" not in line  # which refuses weights of words
            options["batches"] = partial(_with_weights if weighed else batches, config)
            plan, made = Plan.parse(line), partial(_stirred, config)
            got = trained(made, plan, **options)
            found.append((f"{name}: {line}", got, trained(made, alone(plan), **options)))
    return found


@pytest.mark.parametrize("world", sweep(LAYOUTS, [2]))
def test_every_layout_trains_it_as_one_process_does(world: int) -> None:
    found = spawn(_ranks, world, LAYOUTS[world], timeout=280)
    for line, got, expected in (*found[0], *found[-1]):
        assert got.losses == pytest.approx(expected.losses, rel=1e-6), line
        assert got.norms == pytest.approx(expected.norms, rel=1e-5), line
        for name, value in got.weights.items():
            close = {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(
                value, expected.weights[name], **close, msg=lambda t, n=name, s=line: f"{s}: {n}: {t}"
            )


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
