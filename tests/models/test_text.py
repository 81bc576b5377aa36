"""Decoders, encoders and encoder–decoders: what tokens see, and that how attention is computed changes no result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.config.model import PRESETS, DecoderConfig, EncoderConfig, Seq2SeqConfig
from penstock.config.plan import Plan, TokenOrder
from penstock.config.rules import problems
from penstock.errors import ConfigError
from penstock.kernels.choices import LOSS_BUDGET, UNPADDED_MEAN
from penstock.kernels.documents import Documents
from penstock.models import create
from penstock.models.anatomy import set_switch
from penstock.models.masks import visible
from penstock.models.model import Model

SIZES: dict[str, Any] = {"width": 32, "depth": 2, "heads": 4, "mlp_width": 48}
TEXT: dict[str, Any] = {"vocabulary": 50, "sequence": 12}
DECODER = DecoderConfig(**SIZES, **TEXT)
ROTARY = replace(DECODER, kv_heads=2, positions="rotary", norm="rms", mlp="swiglu", bias=False, tied=False)
ENCODER = EncoderConfig(**SIZES, **TEXT, norm_first=False, token_types=2, embedding_norm=True)
T5 = replace(
    PRESETS["t5-tiny"], vocabulary=50, sequence=12, decoder_sequence=8,
    encoder=replace(PRESETS["t5-tiny"].encoder, **SIZES, head_features=8),  # type: ignore[union-attr]
    decoder=replace(PRESETS["t5-tiny"].encoder, **SIZES, head_features=8),  # type: ignore[union-attr]
)  # fmt: skip
MODELS: dict[str, Any] = {
    "gpt": DECODER, "rotary": ROTARY, "query-norms": replace(ROTARY, qk_norm=True, head_features=6),
    "window": replace(DECODER, depth=4, positions="alibi", window=3, global_every=3, parallel=True),
    "grouped": replace(DECODER, kv_heads=1, positions="sinusoidal", mlp="geglu"),
    "relative": replace(DECODER, positions="relative", attention_scale=1.0), "bert": ENCODER,
    "classes": replace(ENCODER, head="classes", classes=3),
    "modern": replace(ENCODER, depth=4, norm_first=True, first_norm=False, norm_bias=False, positions="rotary",
    window=5, window_base=30.0, global_every=3, mlp="geglu"), "t5": T5,
    "marian": replace(PRESETS["marian-tiny"], vocabulary=50, sequence=12, decoder_sequence=8),
}  # fmt: skip


def _model(config: Any) -> Model:
    torch.manual_seed(0)
    model = create(config)
    assert isinstance(model, Model)
    return model.double().eval()


def _inputs(config: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    source = torch.randint(0, 50, (3, 12))
    if isinstance(config, DecoderConfig):
        return (source,)
    lengths = torch.tensor([12, 5, 1])
    return (
        (source, torch.randint(0, 50, (3, 8)), lengths)
        if isinstance(config, Seq2SeqConfig)
        else (source, lengths)
    )


@pytest.mark.parametrize("name", MODELS)
def test_backends_and_orders_agree_in_outputs_and_gradients(name: str) -> None:
    model, inputs = _model(MODELS[name]), _inputs(MODELS[name])
    weights, expected = None, None
    for backend in ("plain", "sdpa", "math"):
        for order in ("batch_first", "batch_second"):
            model.set_attention(backend)  # type: ignore[arg-type]
            model.set_token_order(order)  # type: ignore[arg-type]
            out = model(*inputs)
            weights = torch.randn_like(out) if weights is None else weights
            model.zero_grad()
            (out * weights).sum().backward()
            got = [out, *(p.grad for p in model.parameters())]
            expected = got if expected is None else expected
            torch.testing.assert_close(got, expected, msg=f"{backend} {order}")


@pytest.mark.parametrize("name", [n for n, c in MODELS.items() if isinstance(c, DecoderConfig)])
def test_a_decoder_sees_no_later_token(name: str) -> None:
    model, (tokens,) = _model(MODELS[name]), _inputs(MODELS[name])
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    torch.testing.assert_close(model(changed)[:, :7], model(tokens)[:, :7])
    assert not torch.isclose(model(changed)[:, 7:], model(tokens)[:, 7:]).all(-1).any()


@pytest.mark.parametrize("name", ["gpt", "rotary", "grouped", "window", "modern"])
def test_packed_documents_are_as_if_alone(name: str) -> None:
    model = _model(MODELS[name])
    tokens = torch.randint(0, 50, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    alone = [model(part) for part in tokens.split((5, 4, 3), dim=1)]
    packed = model(tokens, documents=documents)
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("name", ["bert", "modern", "classes", "t5", "marian"])
def test_padding_changes_nothing(name: str) -> None:
    model, inputs = _model(MODELS[name]), _inputs(MODELS[name])
    short = (inputs[0][1:2, :5], *(t[1:2] for t in inputs[1:-1]))
    out, alone = model(*inputs)[1:2], model(*short)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, : alone.shape[1]], alone)


@pytest.mark.parametrize("order", ["batch_first", "batch_second"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("name", ["bert", "modern", "t5", "marian"])
def test_padding_left_out_changes_neither_outputs_nor_gradients(
    name: str, alone: bool, order: TokenOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether attention goes from sample to sample, or keeps padding."""
    monkeypatch.setitem(UNPADDED_MEAN, 8, 6 if alone else 7)  # samples have 6 tokens on average
    model, inputs = _model(MODELS[name]), _inputs(MODELS[name])
    model.set_token_order(order)
    counted = torch.arange(12) < inputs[-1][:, None] if name in ("bert", "modern") else torch.ones(3, 8)
    expected, seen, sights = None, [], []
    model.get_submodule("encoder.blocks.0.mlp").register_forward_pre_hook(
        lambda _, given: seen.append(given[0][..., 0].numel())
    )
    model.get_submodule("encoder.blocks.0.attention").register_forward_pre_hook(
        lambda _, given: sights.append(isinstance(given[1].mask, Documents))
    )
    for padding in ("keep", "remove"):
        set_switch(model, "padding", padding)
        torch.manual_seed(2)
        out = model(*inputs)
        model.zero_grad()
        (out * torch.randn_like(out) * counted[..., None]).sum().backward()
        got = [out * counted[..., None], *(p.grad for p in model.parameters())]
        expected = got if expected is None else expected
        torch.testing.assert_close(got, expected)
    assert seen == [36, 18]  # of 18 real tokens among 36
    assert sights == [False, alone]


def test_decoders_and_models_of_others_refuse_to_leave_padding_out() -> None:
    for model in (create(DECODER), nn.Linear(2, 2)):
        with pytest.raises(ConfigError, match=r"plan\.padding=remove"):
            set_switch(model, "padding", "remove")
    assert any("padding=remove" in problem for problem in problems(Plan.parse("padding=remove"), DECODER))
    assert not list(problems(Plan.parse("padding=remove"), ENCODER))


def test_masks_take_no_square_where_the_kernel_needs_none() -> None:
    device, lengths = torch.device("cpu"), torch.tensor([3, 5])
    assert visible(8, device, causal=True) is None
    assert visible(8, device, causal=True, lengths=lengths) is None
    padding = visible(8, device, causal=False, lengths=lengths)
    assert padding is not None
    assert padding.shape == (2, 1, 1, 8)
    window = visible(5, device, causal=True, window=2)
    assert window is not None
    assert window[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1],
    ]  # fmt: skip


def test_tied_outputs_are_the_table_of_tokens_however_the_model_came_to_be() -> None:
    torch.manual_seed(0)
    model = create(DECODER)
    later = create(DECODER, device="meta").to_empty(device="cpu")
    torch.manual_seed(0)
    later.init_weights()  # type: ignore[operator]
    assert later.head.weight is later.tokens.weight  # type: ignore[union-attr]
    for (name, one), other in zip(model.named_parameters(), later.parameters()):
        assert torch.equal(one, other), name
    assert create(ROTARY).head.weight.data_ptr() != create(ROTARY).tokens.weight.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("init", "part", "deviation"),
    [
        ("normal", "decoder.blocks.0.mlp.down", 0.02),
        ("scaled", "decoder.blocks.0.mlp.down", 0.02 / 2),
        ("scaled", "decoder.blocks.1.attention.qkv", 0.02),
        ("fan_in", "decoder.blocks.0.mlp.down", 256**-0.5),
        ("xavier", "decoder.blocks.0.mlp.up", (2 / (64 + 256)) ** 0.5),
        ("xavier", "tokens", 64**-0.5),
        ("fan_in", "tokens", 1.0),
    ],
)
def test_weights_are_drawn_as_papers_say(init: str, part: str, deviation: float) -> None:
    torch.manual_seed(0)
    config = DecoderConfig(width=64, depth=2, heads=2, mlp_width=256, **TEXT, init=init)  # type: ignore[arg-type]
    weight = create(config).get_submodule(part).weight
    assert isinstance(weight, Tensor)
    assert weight.std().item() == pytest.approx(deviation, rel=0.05)


def test_t5_draws_queries_smaller() -> None:
    torch.manual_seed(0)
    config = replace(DECODER, width=64, init="fan_in")
    groups = create(config).get_submodule("decoder.blocks.0.attention.qkv").weight.view(4, 3, 16, 64)
    deviations = groups.std(dim=(0, 2, 3)).tolist()
    assert deviations == pytest.approx([1 / 32, 1 / 8, 1 / 8], rel=0.1)


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match=r"16 learned positions|12 learned positions"):
        create(DECODER)(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ConfigError, match="token numbers"):
        create(DECODER)(torch.zeros(1, 13))
    with pytest.raises(ConfigError, match="even number"):
        replace(ROTARY, head_features=7)
    with pytest.raises(ConfigError, match="norm_first"):
        replace(ENCODER, parallel=True)


TARGETED = ("gpt", "rotary", "bert", "t5", "marian")


@pytest.mark.parametrize("form", ["whole", "chunked"])
@pytest.mark.parametrize("name", TARGETED)
def test_a_model_makes_the_summed_loss_of_targets(
    name: str, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOSS_BUDGET, "cpu", 1000)
    model, inputs = _model(MODELS[name]), _inputs(MODELS[name])
    logits = model(*inputs)
    targets = torch.randint(0, 50, logits.shape[:2])
    targets[:, ::3] = -100
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    expected.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.set_loss(form)
    found = model(*inputs, targets=targets)
    assert found.shape == ()
    torch.testing.assert_close(found, expected)
    found.backward()
    for one, other in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(one.grad, other)


@pytest.mark.parametrize("name", TARGETED)
def test_only_chosen_rows_reach_the_head(name: str) -> None:
    model, inputs = _model(MODELS[name]), _inputs(MODELS[name])
    logits = model(*inputs).flatten(0, 1)
    rows = torch.tensor([0, 5, 9, 9])
    torch.testing.assert_close(model(*inputs, rows=rows), logits[rows])
    targets = torch.tensor([3, -100, 7, 1])
    expected = F.cross_entropy(logits[rows], targets, reduction="sum")
    torch.testing.assert_close(model(*inputs, targets=targets, rows=rows), expected)


def test_smoothing_is_that_of_torch() -> None:
    model, inputs = _model(MODELS["marian"]), _inputs(MODELS["marian"])
    logits = model(*inputs)
    targets = torch.randint(0, 50, logits.shape[:2])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(model(*inputs, targets=targets, smoothing=0.1), expected)


def test_a_model_without_a_loss_of_its_own_has_no_form_of_it() -> None:
    with pytest.raises(ConfigError, match=r"Linear does not make its loss itself, so plan\.loss=chunked"):
        set_switch(nn.Linear(2, 2), "loss", "chunked")


@pytest.mark.parametrize("name", MODELS)
def test_a_gpus_fused_kernels_take_all_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses them on a GPU where a row of a mask, query, key or value does not lie in one piece."""
    config = MODELS[name]
    model, inputs = _model(config), _inputs(config)
    attend, seen = F.scaled_dot_product_attention, []

    def watched(*args: Any, **more: Any) -> Tensor:
        seen.extend(each for each in args[:4] if isinstance(each, Tensor) and each.shape[-1] > 1)
        return attend(*args, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    model(*inputs)
    model(*inputs[: 2 if isinstance(config, Seq2SeqConfig) else 1])  # no sample is padded
    assert seen
    assert all(each.stride(-1) == 1 for each in seen)
