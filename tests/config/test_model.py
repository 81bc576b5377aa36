"""One union of model configurations: how a layer chooses the family, and what each family refuses."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from penstock.config.layer import LayerSizes
from penstock.config.load import dump_toml, from_dict, load, to_dict
from penstock.config.model import (
    PRESETS,
    DecoderConfig,
    ModelConfig,
    Seq2SeqConfig,
    Stack,
    option_words,
    preset,
    stacks,
    title,
)
from penstock.config.run import RunConfig
from penstock.errors import ConfigError


def _layers(count: int, **sizes: Any) -> str:
    """So many layers, as an option has them."""
    return json.dumps([{"heads": 12, "kv": 12, "hidden": 64, **sizes}] * count)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_file_and_back(name: str) -> None:
    model = preset(name)
    assert from_dict(ModelConfig, to_dict(model)) == model
    assert model.short_form() == name
    assert option_words(model) == [name]
    assert len(stacks(model)) == len(model.graph.lengths)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"model": "gpt2"}, PRESETS["gpt2"]),
        ({"model": "gpt2", "model.depth": "3"}, replace(PRESETS["gpt2"], depth=3)),
        ({"model.family": "decoder", "model.vocabulary": "64"}, DecoderConfig(vocabulary=64)),
        ({"model.vocabulary": "64", "model.family": "decoder"}, DecoderConfig(vocabulary=64)),
        (
            {"model": "t5-small", "model.decoder.depth": "2"},
            replace(PRESETS["t5-small"], decoder=replace(stacks(PRESETS["t5-small"])[1], depth=2)),
        ),
        ({"model": "vit-s16", "model.activation": "gelu_tanh"}, replace(PRESETS["vit-s16"], mlp="gelu_tanh")),
    ],
)
def test_layers_choose_the_family(overrides: dict[str, Any], expected: ModelConfig) -> None:
    assert load(RunConfig, overrides=overrides).model == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model": "marian-base", "model.dropout": "0.2"},
            "Did you mean 'model.encoder.dropout' or 'model.decoder.dropout'?",
        ),
        (
            {"model": "gpt2", "model.image_size": "32"},
            "belongs to the family vit or diffusion or multimodal, and this is decoder.",
        ),
        (
            {"model": "vit-s16", "model.vocabulary": "5"},
            "belongs to the family decoder or encoder or seq2seq or diffusion",
        ),
        (
            {"model.family": "gpt"},
            "model.family is 'gpt', but must be one of vit, decoder, encoder, seq2seq, diffusion, multimodal, "
            "universal.",
        ),
        ({"model": "gpt-2"}, "Did you mean 'gpt2'?"),
        ({"model": "t5-small", "model.encoder.heads": "0"}, "model.encoder.heads is 0"),
        ({"model": "t5-small", "model.encoder.width": "256"}, "make them equal"),
        ({"model": "llama3-8b", "model.kv_heads": "5"}, "must divide model.heads 32"),
        ({"model": "gpt2", "model.width": "770"}, "model.width 770 cannot be split over model.heads 12"),
        ({"model": "gpt2", "model.sequence": "0"}, "model.sequence is 0"),
        ({"model": "mixtral-8x7b", "model.experts_per_token": "9"}, "only 8 model.experts"),
        ({"model": "gpt2", "model.window": "0"}, "model.window is 0"),
        ({"model": "bert-base", "model.branch_norms": "true"}, "branch_norms moves norms from before"),
        ({"model": "gpt2", "model.qk_norm_whole": "true"}, "qk_norm_whole is for model.qk_norm true"),
        ({"model": "gpt2", "model.unturned_every": "4"}, "unturned_every is for model.positions rotary"),
        (
            {"model": "gpt2", "model.positions": "alibi", "model.score_cap": "5"},
            "score_cap is for scores without biases",
        ),
        ({"model": "llama-tiny", "model.rotary.share": "0.01"}, "0 of a head's 32 turn"),
        (
            {"model": "llama-tiny", "model.rotary.scaling": "longrope"},
            "have 0 and 0 numbers, but must have 16 each",
        ),
        ({"model": "gpt2", "model.global_offset": "2"}, "set it below model.global_every"),
        ({"model": "gpt2", "model.norm_zero_centred": "true"}, "is for model.norm rms, and not layer"),
        (
            {"model": "bert-base", "model.sandwich_norms": "true"},
            "model.sandwich_norms adds norms to those before",
        ),
        (
            {"model": "deepseek-tiny", "model.kv_heads": "2"},
            "model.latent makes keys and values of all heads",
        ),
        (
            {"model": "deepseek-tiny", "model.positions": "alibi"},
            "with model.latent a part of each key is rotated",
        ),
        ({"model": "deepseek-tiny", "model.latent.rotary_width": "7"}, "choose model.latent.rotary_width"),
        ({"model": "gpt2", "model.norm_eps": "0"}, "model.norm_eps is 0.0"),
        ({"model": "gpt2", "model.unequal": _layers(2)}, "lists 2 layers, but the depth is 12"),
        ({"model": "gpt2", "model.unequal": _layers(12, kv=5)}, "[0].kv is 5, but must divide its heads, 12"),
        ({"model": "gpt2", "model.unequal": _layers(12, window=9)}, "[0].window is 9, but must be 0"),
        ({"model": "gpt2", "model.unequal": _layers(12, mixture=True)}, "the stack has no experts"),
        ({"model": "gpt2", "model.unequal": _layers(12, heads=0)}, "model.unequal[0].heads is 0"),
        ({"model": "gpt2", "model.unequal": "[1"}, "must be a list of tables, as JSON"),
        ({"model": "t5-small", "model.encoder.unequal": _layers(6, heads=4, kv=4)}, "keep 8"),
    ],
)
def test_what_no_model_can_be_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, overrides=overrides)
    assert message in str(caught.value)


def test_a_stack_of_an_encoder_decoder_is_checked_when_it_is_made_in_python() -> None:
    with pytest.raises(ConfigError, match=r"model\.decoder\.depth is 0"):
        Seq2SeqConfig(decoder=Stack(depth=0))


def test_a_dense_stack_forgets_the_capacity_that_it_was_saved_with() -> None:
    assert DecoderConfig(capacity=1.0) == DecoderConfig()
    assert Seq2SeqConfig(encoder=Stack(capacity=1.0)) == Seq2SeqConfig()
    assert DecoderConfig(experts=4, router="given", capacity=1.0).capacity == 1.0


def test_a_router_that_cannot_learn_or_choose_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.router_normalised makes the weight of a token's only expert 1"
    ):
        DecoderConfig(experts=4, router_normalised=True)
    with pytest.raises(ConfigError, match=r"model\.router given sends each token to the one expert"):
        DecoderConfig(experts=4, router="given", experts_per_token=2)
    for words, changes in {
        "router_groups is 3, but must divide model.experts 4": {"router_groups": 3},
        "groups_per_token is 3, but a token can have 2 at most": {"router_groups": 2, "groups_per_token": 3},
        "can have the group that is given": {"router": "given", "router_groups": 2, "groups_per_token": 2},
        "groups_per_token 1 has only 2 experts": {"router_groups": 2, "experts_per_token": 3},
        "expert_dropout masks visits by their weights": {"router": "given", "expert_dropout": 0.1},
    }.items():
        with pytest.raises(ConfigError, match=words):
            DecoderConfig(experts=4, **changes)  # type: ignore[arg-type]


def test_leading_blocks_may_be_dense() -> None:
    config = DecoderConfig(depth=6, experts=4, expert_every=2, dense_layers=2, expert_width=8)
    assert [layer.sizes.mixture for layer in config.layers] == [False, False, False, True, False, True]
    assert [layer.perceptron.width for layer in config.layers[2:4]] == [3072, 8]


def test_unequal_layers_are_written_and_read_again() -> None:
    layers = tuple(LayerSizes(heads=12, kv=12, hidden=64 * (i + 1)) for i in range(12))
    model = replace(PRESETS["gpt2"], unequal=layers)
    name, option = option_words(model)
    _, text = shlex.split(option)
    assert load(RunConfig, overrides={"model": name, "model.unequal": text}).model == model
    config = RunConfig(model=model)
    assert from_dict(RunConfig, tomllib.loads(dump_toml(config))) == config
    assert title(model) == "gpt2 (unequal)"
    assert [layer.sizes for layer in model.kinds] == list(layers)
    assert (
        replace(PRESETS["gpt2"], unequal=tuple(layer.sizes for layer in PRESETS["gpt2"].layers)).layers
        == PRESETS["gpt2"].layers
    )


def test_what_differs_from_a_preset_is_said() -> None:
    pooled = replace(PRESETS["vit-s16"], classifier="pooled")
    assert option_words(pooled) == ["vit-s16", "--model.classifier pooled"]
    assert title(pooled) == "vit-s16 (classifier pooled)"
    assert pooled.short_form() == "custom"
    small = replace(PRESETS["t5-small"], encoder=replace(stacks(PRESETS["t5-small"])[0], bias=True))
    assert option_words(small) == ["t5-small", "--model.encoder.bias true"]
