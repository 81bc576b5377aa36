"""transformers' own modules under a Plan that puts off their logits or leaves padding out: loss and gradients stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import foreign
from penstock.build import build
from penstock.config.plan import Plan
from penstock.errors import ConfigError
from penstock.kernels.deferred import Deferred
from penstock.models.anatomy import anatomy_of, set_switch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [1] * 2 + [0] * 6, [0] * 4 + [1] * 4])
"""Samples of 8, 5, 2 and 4 tokens; before those of the last is padding."""
WORDY = [name for name, made in foreign.FOREIGN.items() if "num_labels" not in made.sizes]
PADDED = ["bert", "bert of classes", "roberta", "roberta of classes", "bart", "marian"]


def _batch(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, foreign.WORDS, (4, 8), generator=generator)
    mask = MASK
    labels = ids.roll(-1, 1)
    if "classes" in name:
        mask, labels = MASK.sort(dim=1, descending=True)[0], torch.tensor([0, 4, 2, 1])
    elif name not in ("bart", "marian"):
        labels = labels.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return foreign.create(name).train()


def _ran(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out, grads


def _assert_same(model: nn.Module, changed: nn.Module, batch: dict[str, Tensor]) -> Any:
    expected, grads = _ran(model, batch)
    found, others = _ran(changed, batch)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, grads)
    return found


@pytest.mark.parametrize("name", WORDY)
def test_logits_that_are_put_off_change_no_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kernels.choices.LOSS_BUDGET", {"cpu": 5 * 8 * foreign.WORDS})
    model, batch = _model(name), _batch(name)
    changed = copy.deepcopy(model)
    set_switch(changed, "loss", "chunked")
    assert isinstance(_assert_same(model, changed, batch).logits, Deferred)
    set_switch(changed, "loss", "whole")
    assert isinstance(_ran(changed, batch)[0].logits, Tensor)


def _tokens_computed(model: Any, batch: dict[str, Tensor]) -> set[int]:
    """How many tokens the perceptrons of the encoder's blocks are given."""
    found: set[int] = set()
    blocks = anatomy_of(model).stacks[0].blocks
    for block in blocks:
        linear = next(
            module
            for name, module in model.get_submodule(block.name).named_modules()
            if name in ("intermediate.dense", "fc1")
        )
        linear.register_forward_hook(lambda module, args, out: found.add(args[0].shape[:-1].numel()))
    model(**batch)
    return found


@pytest.mark.parametrize("sight", ["Documents", "Padded"])
@pytest.mark.parametrize("name", PADDED)
def test_padding_that_is_left_out_changes_no_gradient(
    name: str, sight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kernels.choices.UNPADDED_MEAN", {4: 0 if sight == "Documents" else 99})
    model, batch = _model(name), _batch(name)
    seen = _sights(monkeypatch)
    for attention in ("sdpa", "plain"):
        changed = copy.deepcopy(model)
        set_switch(changed, "attention", attention)
        set_switch(changed, "padding", "remove")
        _assert_same(model, changed, batch)
        assert _tokens_computed(changed, batch) == {20}  # of 32, of which 19 are real: a sixteenth is two
        set_switch(changed, "attention", "sdpa")
        assert _tokens_computed(changed, batch) == {20}
        set_switch(changed, "padding", "keep")
        assert _tokens_computed(changed, batch) == {32}
    assert seen == {sight}


def _sights(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The forms in which attention is computed from now on."""
    from penstock.models.families import transformers_switches as switches

    seen: set[str] = set()
    made: Callable[..., Any] = switches._MaskContent._made

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = made(*args, **kwargs)
        seen.add(type(found).__name__)
        return found

    monkeypatch.setattr(switches._MaskContent, "_made", watched)
    return seen


def test_a_kernel_without_dropout_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with flash attention: it goes by lengths only where no weight is dropped."""
    monkeypatch.setattr(
        "penstock.models.families.transformers_switches.knows_lengths", lambda *_, dropout: not dropout
    )
    monkeypatch.setattr("penstock.kernels.choices.UNPADDED_MEAN", {4: 0})
    seen = _sights(monkeypatch)
    model, batch = _model("bert"), _batch("bert")
    set_switch(model, "attention", "plain")
    set_switch(model, "padding", "remove")
    for block in model.bert.encoder.layer:
        block.attention.self.dropout.p = 0.3
    _ran(model, batch)
    assert seen == {"Documents"}
    monkeypatch.setattr("penstock.kernels.varlen._kernel", lambda q, *_: torch.zeros_like(q))
    model.eval()(**batch)  # nothing is dropped any more
    assert seen == {"Documents", "Varlen"}


def test_what_has_no_padding_or_hides_more_is_computed_as_it_is() -> None:
    model, batch = _model("bert"), _batch("bert")
    changed = copy.deepcopy(model)
    set_switch(changed, "padding", "remove")
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    _assert_same(model, changed, full)
    assert _tokens_computed(changed, full) == {32}
    earlier = torch.ones(4, 1, 8, 8, dtype=torch.bool).tril()
    _assert_same(model, changed, {**batch, "attention_mask": earlier})
    empty = {**batch, "attention_mask": MASK * torch.tensor([[1], [1], [0], [1]])}
    empty["labels"] = batch["labels"].masked_fill(empty["attention_mask"] == 0, -100)
    found, grads = _ran(changed, empty)
    assert found.loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads.values())
    assert _tokens_computed(changed, empty) == {18}


@pytest.mark.parametrize("name", ["bert", "bart"])
@pytest.mark.parametrize("compiled", ["none", pytest.param("blocks", marks=pytest.mark.sweep)])
def test_a_plan_with_both_learns_the_same(name: str, compiled: str) -> None:
    batch = _batch(name)

    def learned(line: str) -> tuple[list[float], dict[str, Tensor]]:
        built = build(lambda: _model(name), Plan.parse(f"micro_batch=4 {line}"), loss=_loss)
        losses = [float(built.step([batch]).loss) for _ in range(4)]
        return losses, built.model.state_dict()

    expected, weights = learned("attention=sdpa")
    found, others = learned(f"loss=chunked padding=remove recompute=full compile={compiled}")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    # Keys' biases have no gradient but rounding, which Adam divides by its own size.
    shaky = ("key.bias", "k_proj.bias")
    torch.testing.assert_close(
        {name: value for name, value in others.items() if not name.endswith(shaky)},
        {name: value for name, value in weights.items() if not name.endswith(shaky)},
        rtol=1e-3,
        atol=1e-4,  # Adam's first steps have the size of the learning rate, 1e-3: 2e-5 measured
    )


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


@pytest.mark.parametrize(
    ("attention", "rate"), [("plain", 0.0), ("plain", 0.3), ("math", 0.0), ("auto", 0.3)]
)
def test_without_padding_attention_is_that_of_the_plan(
    attention: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel is used, with dropout too, and its scores are computed again where that is asked for."""
    monkeypatch.setattr("penstock.kernels.choices.UNPADDED_MEAN", {4: 0})
    model, batch = _model("bert"), _batch("bert")
    for block in model.bert.encoder.layer:
        block.attention.self.dropout.p = rate
    again: list[object] = []

    def counted(attend: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        again.append(attend)
        return torch.utils.checkpoint.checkpoint(attend, *args, **options)

    monkeypatch.setattr("penstock.models.families.transformers_switches.checkpoint", counted)
    monkeypatch.setattr("penstock.kernels.sdpa.checkpoint", counted)
    line = f"micro_batch=4 padding=remove attention={attention} recompute=selective"
    built = build(model, Plan.parse(line), loss=_loss)
    losses = [
        float(built.step([batch]).loss) for _ in range(3)
    ]  # the first says if attention were not switched
    assert losses[2] < losses[0]
    assert len(again) == 3 * 2 * (4 if attention == "math" else 1)  # torch's is called for each sample


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_models_without_such_an_encoder_keep_their_padding(name: str) -> None:
    with pytest.raises(ConfigError, match="computes all tokens that it is given"):
        set_switch(_model(name), "padding", "remove")


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="no linear layer over a vocabulary"):
        set_switch(_model("bert of classes"), "loss", "chunked")
    sizes = foreign.FOREIGN["bert"].sizes
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True))
    with pytest.raises(ConfigError, match="BertLMHeadModel, which has no encoder"):
        set_switch(decoder, "padding", "remove")
    eager = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="eager"))
    with pytest.raises(ConfigError, match="make it with 'sdpa'"):
        set_switch(eager, "padding", "remove")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "marian"])
def test_on_a_gpu_flash_attention_goes_by_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(name).to("cuda", torch.bfloat16)
    batch = {key: value.cuda() for key, value in _batch(name).items()}
    seen = _sights(monkeypatch)
    changed = copy.deepcopy(model)
    set_switch(changed, "attention", "flash" if name == "bert" else "sdpa")
    set_switch(changed, "padding", "remove")
    set_switch(changed, "loss", "chunked")
    expected, found = _ran(model, batch)[0].loss, _ran(changed, batch)[0].loss
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)  # both in bf16
    assert seen == {"Varlen" if name == "bert" else "Padded"}
    assert _tokens_computed(changed, batch) == {20}
