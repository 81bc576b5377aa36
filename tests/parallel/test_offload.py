"""Activations that wait in host memory give the same gradients, and two blocks' at the most are on the device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, batches, loss
from penstock.build import build
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.anatomy import anatomy_of
from penstock.parallel import offload
from penstock.parallel.offload import ON_DEVICE, Transfers, offload_blocks

CPU = torch.device("cpu")
RECIPE = Recipe(lr=1e-2)


@pytest.fixture
def shelves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that are made in this test. Tensors of any size go."""
    made: list[Any] = []
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)

    class Noted(offload._Shelf):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(offload, "_Shelf", Noted)
    return made


def _learned(name: str, line: str, device: torch.device) -> dict[str, Tensor]:
    built = build(ENROLLED[name].config, Plan.parse(line), device=device, recipe=RECIPE, loss=loss)
    for step in range(2):
        parts = [batches(ENROLLED[name].config, 10 * step + i, 2) for i in range(built.plan.accumulate)]
        built.step([tuple(part.to(device) for part in batch) for batch in parts])
    return {key: value.detach().cpu() for key, value in built.model.state_dict().items()}


@pytest.mark.parametrize("name", ["vit", "gpt", "bert", "t5"])
@pytest.mark.parametrize("more", ["", "precision=O1 token_order=batch_second", "attention=plain"])
def test_gradients_are_the_same_to_the_bit(name: str, more: str, shelves: list[Any]) -> None:
    line = f"micro_batch=2 accumulate=2 {more}"
    found = _learned(name, f"{line} offload=activations", CPU)
    expected = _learned(name, line, CPU)
    assert shelves
    assert all(value.equal(expected[key]) for key, value in found.items())


def _two_are_here(shelves: list[Any], weights: set[int]) -> None:
    kept = [[one for reference in shelf.saved if (one := reference()) is not None] for shelf in shelves]
    assert all(kept)
    here = [any(one.device_tensor is not None for one in some) for some in kept]
    assert sum(here) <= ON_DEVICE
    assert here[-1]
    assert all(one.host is None for one in kept[-1])
    for some in kept:
        assert not weights & {one.device_tensor.data_ptr() for one in some if one.device_tensor is not None}
    sizes = [
        sum((one.device_tensor if one.device_tensor is not None else one.host).nbytes for one in some)
        for some in kept
    ]
    assert min(sizes) > 0.9 * max(sizes)


def test_two_blocks_are_on_the_device_and_weights_stay(shelves: list[Any]) -> None:
    model = create(replace(ENROLLED["gpt"].config, depth=5))
    blocks = [block.name for stack in anatomy_of(model).stacks for block in stack.blocks]
    offload_blocks(model, CPU)
    weights = {p.data_ptr() for p in model.parameters()}
    out = loss(model, batches(model.config, 0, 2))
    assert len(shelves) == len(blocks)
    _two_are_here(shelves, weights)
    out.backward()  # type: ignore[no-untyped-call]
    assert not any(reference() for shelf in shelves for reference in shelf.saved)


class _Model(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Reads(torch.autograd.Function):
    """x · y, whose backward pass reports how y lies in memory."""

    steps: list[tuple[int, ...]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        _Reads.steps.append(y.stride())
        return gradient * y, None


def test_tensors_come_back_as_they_lay(shelves: list[Any]) -> None:
    """Rows with gaps, as masks of attention have, and expanded ones, of which one copy waits."""
    _Reads.steps = []
    gaps, windows = torch.randn(3, 8)[:, :6], torch.randn(8).unfold(0, 6, 1)
    given = [gaps, gaps[:1].expand(3, 6), gaps.t()[:, :1].expand(6, 6)[:3], windows]

    class Block(nn.Module):
        def __init__(self, y: Tensor) -> None:
            super().__init__()
            self.y, self.weight = y, nn.Parameter(torch.ones(3, 6))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _Reads.apply(x, self.y)
            return out * self.weight

    model = _Model(Block(y) for y in (*given, gaps))
    offload_blocks(model, CPU)
    x = torch.ones(3, 6, requires_grad=True)
    model(x).sum().backward()
    assert _Reads.steps[::-1][:3] == [(8, 1), (0, 1), (1, 0)]
    expected = gaps.clone()
    for y in given:
        expected *= y
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)


def test_a_tensor_that_is_changed_in_place_is_refused(shelves: list[Any]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()
            y += 1.0  # which the gradient of exp needs
            return y

    model = _Model(Block() for _ in range(3))
    offload_blocks(model, CPU)
    with pytest.raises(ConfigError, match="changed in place, so it cannot wait in host memory"):
        model(torch.randn(2, 4, requires_grad=True))


def test_models_with_it_can_be_copied_and_stored() -> None:
    transfers = Transfers(CPU, 5)
    for other in (copy.deepcopy(transfers), pickle.loads(pickle.dumps(transfers))):
        assert other.least_bytes == 5
        assert not other.on_device


@pytest.mark.gpu
def test_a_gpu_holds_less_and_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    device = torch.device("cuda")
    for name in ("vit", "gpt", "t5"):
        line = "micro_batch=2 accumulate=2 precision=O1"
        found = _learned(name, f"{line} offload=activations", device)
        expected = _learned(name, line, device)
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    peaks = []
    for more in ("", "offload=activations"):
        config = ENROLLED["gpt"].config
        wide: Any = {"width": 512, "depth": 12, "heads": 8, "mlp_width": 2048, "sequence": 512}
        big = replace(config, **wide, max_positions=512)
        built = build(big, Plan.parse(f"micro_batch=16 {more}"), device=device, recipe=RECIPE, loss=loss)
        tokens = torch.randint(0, 13, (16, 512), device=device)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            built.step([(tokens, tokens)])
        peaks.append(torch.cuda.max_memory_allocated())
        del built
        torch.cuda.empty_cache()
    assert peaks[1] < 0.6 * peaks[0]
