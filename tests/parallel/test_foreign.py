"""Models that Penstock did not make are shared out block by block, and learn what one process learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import foreign
from helpers.equality import Close, Trained, beside_one, hold
from helpers.spawn import spawn
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import Lora, Recipe
from penstock.parallel import Sharded, dims_of

STEPS = 5
# Keys' biases have no gradient but rounding, which Adam would divide by its own size: one step is then anybody's.
RECIPE = Recipe(lr=1e-3, clip_norm=0.5, eps=1e-4)
CLOSE = {"weights": Close(1.3e-6, 1e-5), "figures": Close(1e-5, 1e-6), "norms": Close(1e-4, 1e-6)}


class LikeTimm(nn.Module):
    """The parts of timm's VisionTransformer under its names; nobody enrolled this class."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 16) * 0.02)
        self.patch_embed = nn.Conv2d(1, 16, 4, 4)
        self.blocks = nn.Sequential(
            *[nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)]
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(len(images), -1, -1), tokens], 1) + self.pos_embed
        output: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return output


class Anyones(nn.Module):
    """Alike blocks in a list of another name, called by hand, and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.storeys = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)
        )
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for storey in self.storeys:
            x = x + storey(x)
        output: Tensor = self.out(x)
        return output


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batches: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    blocks: int


def _images(step: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(
        0, 5, (samples,), generator=generator
    )


def _words(step: int, samples: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return (torch.randint(0, 11, (samples, 6), generator=generator),)


def _classified(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def _continued(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0]).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


CASES = {
    "like timm": Case(LikeTimm, _images, _classified, 3),
    "anyone's": Case(Anyones, _words, _continued, 4),
}
CASES |= {
    f"transformers {name}": Case(
        partial(foreign.create, name), partial(foreign.batches, name), foreign.loss, one.blocks
    )
    for name, one in foreign.FOREIGN.items()
}


def _both(name: str, line: str, recipe: Recipe = RECIPE) -> tuple[int, str, Trained, Trained]:
    case, plan = CASES[name], Plan.parse(line)
    dims = dims_of(plan, "cpu")
    built = build(case.make, plan, recipe=recipe, loss=case.loss, dims=dims)
    assert isinstance(built.replicas, Sharded)
    units = len(built.replicas.units)
    options: dict[str, Any] = {"steps": STEPS, "recipe": recipe, "batches": case.batches, "loss": case.loss}
    return units, *beside_one(f"{name}: {line}", lambda: case.make, plan, {}, **options)


def _all(names: list[str], line: str, recipe: Recipe = RECIPE) -> list[tuple[int, str, Trained, Trained]]:
    return [_both(name, line, recipe) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        ["like timm", "anyone's"],
        pytest.param([*CASES][2::3], marks=pytest.mark.slow),
        pytest.param([*CASES][3::3] + [*CASES][4::3], marks=pytest.mark.sweep),
    ],
    ids=["own", "transformers", "more of transformers"],
)
def test_blocks_are_found_gathered_and_trained(names: list[str]) -> None:
    if "anyone's" not in names:
        pytest.importorskip("transformers")
    line = "dp=2 micro_batch=2 sharding=fsdp recompute=full accumulate=2"
    for name, (units, *learned) in zip(names, spawn(_all, 2, names, line, timeout=120)[0]):
        assert units == CASES[name].blocks + 1, f"{name}: each block is a unit, and the rest is one"
        hold(*learned, **CLOSE)


@pytest.mark.slow
def test_adapters_are_shared_out_and_trained() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    names = [f"transformers {name}" for name in ("gpt2", "llama", "bert of classes", "t5")]
    recipe = replace(RECIPE, lora=Lora(rank=2))
    line = "dp=2 micro_batch=2 sharding=fsdp recompute=full"
    for _, said, got, expected in spawn(_all, 2, names, line, recipe, timeout=120)[0]:
        assert any(".lora_" in key for key in got.weights), said
        hold(said, got, expected, **CLOSE)


@pytest.mark.slow
def test_logits_of_shared_out_weights_are_put_off() -> None:
    pytest.importorskip("transformers")
    names = [f"transformers {name}" for name in ("gpt2", "qwen3", "bert", "marian")]
    line = "dp=2 micro_batch=2 sharding=fsdp loss=chunked"
    for _, *learned in spawn(_all, 2, names, line, timeout=120)[0]:
        hold(*learned, **CLOSE)
