"""Fused operators in models of ours and of transformers: found by role, undone, and the same results."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import foreign
from helpers.sweeps import sweep
from penstock.build import build
from penstock.config.fused import FUSED
from penstock.config.gains import store
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.cpu import kind_of
from penstock.errors import ConfigError
from penstock.models import create
from penstock.models.fuse import fuse, unfuse

ALL = tuple(FUSED)


def _inputs(config: Any) -> tuple[Tensor, ...]:
    if config.graph.vision:
        return (torch.randn(2, config.channels, config.image_size, config.image_size),)
    tokens = torch.randint(3, 50, (2, 12))
    return (tokens, tokens) if len(config.graph.inputs) > 1 else (tokens,)


def _gradients(model: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Outputs and gradients, dropout drawn the same each time."""
    torch.manual_seed(3)
    out = model(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    model.zero_grad()
    torch.manual_seed(4)
    out.backward(torch.randn_like(out))
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["vit-digits", "gpt-tiny", "bert-tiny", "marian-tiny", "quick"])
def test_ours_compute_the_same_fused(name: str) -> None:
    """Pre-norm and post-norm, with cross attention, and with the same dropout; names of weights stay."""
    config = replace(PRESETS["gpt-tiny"], mlp="gelu_quick") if name == "quick" else PRESETS[name]
    torch.manual_seed(0)
    model = create(config)
    names, inputs = list(model.state_dict()), _inputs(config)
    before = _gradients(model, inputs)
    counts = fuse(model, ALL)
    blocks = sum(len(run.stack.layers) for run in config.graph.runs)
    assert counts == {"residual_norm": blocks, "bias_activation": blocks}
    assert list(model.state_dict()) == names
    fused = _gradients(copy.deepcopy(model), inputs)
    torch.testing.assert_close(fused, before, rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(a, b) for a, b in zip(fused, before))  # other kernels did run
    unfuse(model)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(model, inputs), before))


CHANGES: dict[str, dict[str, Any]] = {
    "bert": {}, "gpt2": {}, "llama": {}, "marian": {"activation_function": "swish"},
    "vit": {"hidden_act": "quick_gelu"},
}  # fmt: skip
"""Small models of transformers, without dropout, by the options that make them use other activations."""
PLACES = {
    "bert": {"residual_norm": 4, "bias_activation": 2}, "gpt2": {"bias_activation": 2},
    "marian": {"bias_activation": 4}, "llama": {"bias_activation": 2}, "vit": {"bias_activation": 2},
    "timm": {"bias_activation": 2},
}  # fmt: skip
"""Where operators fit: norms only behind modules that add to the stream themselves."""


def _foreign(name: str, **changes: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """A small model, which returns its hidden states, and its inputs."""
    if name == "timm":
        try:
            import timm
        except Exception as error:  # without a torchvision that fits
            pytest.skip(f"timm cannot be imported: {error}")
        return timm.create_model("vit_tiny_patch16_224", depth=2), (torch.randn(1, 3, 224, 224),)
    pytest.importorskip("transformers")
    whole = foreign.create(name, **CHANGES[name], **changes)
    given, _ = foreign.batches(name, 0, 2)
    return _FirstOutput(whole.base_model), (given, *[given] * (name == "marian"))


def test_an_activation_without_a_kernel_is_refused() -> None:
    model, _ = _foreign("gpt2", activation_function="tanh")
    assert isinstance(model, _FirstOutput)
    with pytest.raises(ConfigError, match="fuse=bias_activation fits nowhere in GPT2Model"):
        fuse(model.inner, ("bias_activation",))


@pytest.mark.parametrize("name", PLACES)
def test_foreign_models_compute_the_same_fused(name: str) -> None:
    """Outputs and all gradients, the same names of weights, and unfused the same bits as before."""
    model, inputs = _foreign(name)
    inner = model.inner if isinstance(model, _FirstOutput) else model
    model.train()
    before, names, counts = _gradients(model, inputs), list(model.state_dict()), PLACES[name]
    assert fuse(inner, tuple(counts)) == counts  # type: ignore[arg-type]
    assert list(model.state_dict()) == names
    fused = _gradients(model, inputs)
    torch.testing.assert_close(fused, before, rtol=1e-4, atol=1e-4)
    assert any(not torch.equal(a, b) for a, b in zip(fused, before))
    unfuse(inner)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(model, inputs), before))
    for other in FUSED:
        if other not in counts:
            with pytest.raises(ConfigError, match=f"{other} fits nowhere"):
                fuse(inner, (other,))


class _FirstOutput(nn.Module):
    """The hidden states of a model of transformers."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        more = {"decoder_input_ids": inputs[1]} if len(inputs) > 1 else {}
        return self.inner(inputs[0], **more).last_hidden_state  # type: ignore[no-any-return]


def test_what_fits_nowhere_is_refused() -> None:
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)))
    with pytest.raises(ConfigError, match="residual_norm fits nowhere in Sequential on cpu"):
        fuse(plain, ("residual_norm",))
    with pytest.raises(ConfigError, match="has kernels for cpu only"):
        fuse(create(PRESETS["gpt-tiny"]), ("bias_activation",), device="cuda")
    assert not any(fuse(plain, ("auto",)).values())


def test_auto_takes_what_was_measured_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of("cpu")
    table = {
        "residual_norm": {"layer_norm": {"float32": {"eager": 1.5, "compiled": 0.9}}},
        "bias_activation": {
            "gelu": {"float32": {"eager": 2.0, "compiled": 2.0}},
            "gelu_tanh": {"float32": {"eager": 1.01, "compiled": 1.2}},
        },
    }
    path = store(kind, table)
    store("another", {})
    assert json.loads(path.read_text()).keys() == {kind, "another"}
    model = PRESETS["gpt-tiny"]  # of the tanh form
    assert fuse(create(model)) == {"residual_norm": 4, "bias_activation": 0}
    assert fuse(create(model), compiled=True) == {"residual_norm": 0, "bias_activation": 4}
    assert not any(fuse(create(model), dtype=torch.bfloat16).values())
    for unreadable in ("{", json.dumps({kind: {"residual_norm": 3}})):
        path.write_text(unreadable)
        fuse(create(model))


@pytest.mark.parametrize(
    "line",
    sweep(
        ["", "precision=O1", "precision=O2", "compile=blocks recompute=full"],
        ["compile=blocks recompute=full"],
        slow=["precision=O1"],
    ),
)
def test_weights_after_many_steps_are_those_of_plain_operators(line: str) -> None:
    """32 steps of SGD: AdamW divides by magnitudes, so that rounding alone turns signs of tiny gradients."""
    steps = 4 if "compile" in line else 32
    config = PRESETS["vit-digits"]
    results = []
    for fused in ("", "fuse=residual_norm,bias_activation"):
        built = build(
            config, Plan.parse(f"algorithm=sgd optimizer=fused {line} {fused}"), recipe=Recipe(lr=0.01)
        )
        assert sum(built.fused.values()) == (2 * config.depth if fused else 0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(steps):
            images = torch.randn(4, 1, 8, 8, generator=generator)
            result = built.step([(images, torch.arange(4))])
        results.append((result.loss.item(), [p.detach().float() for p in built.model.parameters()]))
    (loss, weights), (plain_loss, plain) = results
    tolerance = 1e-4 if "precision" not in line else 2e-2
    assert loss == pytest.approx(plain_loss, rel=10 * tolerance)
    moved = [(a - b).norm() / b.norm().clamp(min=1.0) for a, b in zip(weights, plain)]
    assert max(moved) < tolerance
