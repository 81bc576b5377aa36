"""Weights that fit are loaded; whatever does not is said, all at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models import Model
from penstock.models.convert import Loaded, load_weights, to_hf, to_timm

TINY = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, mlp_width=96, classes=10)


def test_the_three_namings_give_the_same_model() -> None:
    source = Model(TINY)
    state = source.state_dict()
    for names, given in (("penstock", state), ("hf", to_hf(state, TINY)), ("timm", to_timm(state, TINY))):
        model = Model(TINY)
        assert load_weights(model, given) == Loaded(names=names)  # type: ignore[arg-type]
        assert all(torch.equal(t, model.state_dict()[name]) for name, t in state.items())


def test_another_head_is_an_error_or_drawn_anew() -> None:
    source, target = Model(TINY), Model(replace(TINY, classes=3))
    head = target.head.weight.clone()
    with pytest.raises(ConfigError) as caught:
        load_weights(target, source.state_dict())
    assert caught.value.problems == (
        "head.weight is (10, 48), but the model's is (3, 48).",
        "head.bias is (10,), but the model's is (3,).",
        "Train a head with `penstock train --from`, or in Python with new_head=True.",
    )
    loaded = load_weights(target, to_hf(source.state_dict(), TINY), new_head=True)
    assert loaded.drawn == ("head.weight", "head.bias")
    assert str(loaded).endswith("in the names of transformers; initialised at random: head.weight, head.bias")
    assert torch.equal(target.head.weight, head)
    assert torch.equal(target.encoder.places.weight, source.encoder.places.weight)


def test_a_head_that_fits_is_loaded_even_where_a_new_one_is_allowed() -> None:
    source, target = Model(TINY), Model(TINY)
    assert load_weights(target, source.state_dict(), new_head=True).drawn == ()
    assert torch.equal(target.head.weight, source.head.weight)


def test_every_misfit_is_named() -> None:
    state = Model(replace(TINY, mlp_width=64)).state_dict()
    del state["norm.bias"]
    state["encoder.blocks.7.norm1.bias"] = torch.zeros(48)
    with pytest.raises(ConfigError) as caught:
        load_weights(Model(TINY), state)
    text = str(caught.value)
    assert "lack norm.bias." in text
    assert "no place for encoder.blocks.7.norm1.bias." in text
    assert "encoder.blocks.0.mlp.up.weight is (64, 48), but the model's is (96, 48)." in text
    assert "2 more have other shapes" in text
    assert "new_head" not in text


def test_nothing_is_changed_by_weights_that_do_not_fit() -> None:
    model = Model(TINY)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = Model(TINY).state_dict()
    del state["norm.bias"]
    with pytest.raises(ConfigError):
        load_weights(model, state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_another_classifier_is_said() -> None:
    pooled = Model(replace(TINY, classifier="pooled"))
    with pytest.raises(ConfigError, match=r"have a class token, .*'pooled' has none; set .* to 'token'"):
        load_weights(pooled, Model(TINY).state_dict())
    with pytest.raises(ConfigError, match=r"have no class token, .*'token' has one; set .* to 'pooled'"):
        load_weights(Model(TINY), pooled.state_dict())


def test_names_of_no_known_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"of no known Vision Transformer \(the first are: conv\.weight\)"):
        load_weights(Model(TINY), {"conv.weight": torch.zeros(1)})


def test_a_meta_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"meta device; call model.to_empty"):
        load_weights(Model(TINY, device="meta"), Model(TINY).state_dict())


def test_any_other_module_takes_its_own_names() -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    load_weights(target, source.state_dict())
    assert torch.equal(source.weight, target.weight)
    with pytest.raises(ConfigError, match=r"weight is \(2, 4\)"):
        load_weights(target, nn.Linear(4, 2).state_dict())


def test_a_model_of_anyones_keeps_its_own_names() -> None:
    """BERT's weights may have the names that TensorFlow gave to norms; those of another model are not renamed."""
    model = nn.Module()
    model.LayerNorm = nn.Module()
    model.LayerNorm.gamma = nn.Parameter(torch.zeros(2))
    load_weights(model, {"LayerNorm.gamma": torch.ones(2)})
    assert torch.equal(model.LayerNorm.gamma, torch.ones(2))
