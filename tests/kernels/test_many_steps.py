"""Weights after 32 steps with kernels in C++, beside those after steps with their plain forms."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.native_kernels import needs_compiler
from penstock.build import build
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.cpu import this_cpu
from penstock.kernels import cross_entropy, logit_rows
from penstock.models import expert_linear

CASES: dict[str, tuple[str, str, str, ModuleType | None, str]] = {
    # model, Plan, what the Plan has in the plain form, else the module and its function that chooses the kernel
    "attention": ("gpt-tiny", "precision=O1 attention=native", "precision=O1 attention=plain", None, ""),
    "losses": ("gpt-tiny", "", "", cross_entropy, "takes_rows"),
    "losses in chunks": ("gpt-tiny", "loss=chunked", "loss=chunked", logit_rows, "has_rows"),
    "experts": ("mixtral-tiny", "", "", expert_linear, "takes_grouped"),
}
TOKENS = 24


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    return model(tokens, targets=targets) / targets.numel()  # type: ignore[no-any-return]


def weights_after_steps(name: str, line: str) -> list[Tensor]:
    config: Any = PRESETS[name]
    built = build(
        replace(config, depth=2), Plan.parse(f"algorithm=sgd optimizer=fused {line}"), recipe=Recipe(lr=0.1),
        loss=mean_loss, seed=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for _ in range(32):
        tokens = torch.randint(0, config.vocabulary, (4, TOKENS + 1), generator=generator)
        built.step([(tokens[:, :-1], tokens[:, 1:])])
    return [parameter.detach().float() for parameter in built.model.parameters()]


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_plain_form(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SGD: AdamW divides by magnitudes, so that rounding alone turns signs of tiny gradients."""
    name, line, plain_line, module, chooses = CASES[case]
    if (case == "attention" and not this_cpu().bf16_pairs) or (
        case == "experts" and this_cpu().isa != "AVX512"
    ):
        pytest.skip("this CPU lacks the instructions that the kernel uses")
    ours = weights_after_steps(name, line)
    if module is not None:
        monkeypatch.setattr(module, chooses, lambda *_, **__: False)
    plain = weights_after_steps(name, plain_line)
    assert any(not torch.equal(a, b) for a, b in zip(ours, plain)), "the kernel did not run"
    moved = [float((a - b).norm() / b.norm().clamp(min=1.0)) for a, b in zip(ours, plain, strict=True)]
    assert max(moved) < (2e-2 if "O1" in line else 1e-4)
