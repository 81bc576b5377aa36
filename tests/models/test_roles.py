"""What an anatomy declares is true of every family. That its layers split as declared: tests/parallel/test_layouts.py.

A family is enrolled in all tests by one line in `FAMILIES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import foreign
from helpers.families import ENROLLED
from penstock.config.model import ViTConfig
from penstock.errors import ConfigError
from penstock.models import Model, create, roles
from penstock.models.anatomy import Anatomy, anatomy_of, pruned
from penstock.models.convert import to_hf
from penstock.models.families import timm as timm_family
from penstock.models.families import transformers as transformers_family

OURS = ViTConfig(image_size=32, patch_size=8, width=48, depth=2, heads=4, mlp_width=96, classes=10)
MANIFESTS = {path.stem: path for path in sorted((Path(__file__).parent / "manifests").iterdir())}


def _other(name: str, sizes: str, **changes: Any) -> nn.Module:
    """A model of transformers with the sizes of one in `helpers.foreign`."""
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**{**foreign.FOREIGN[sizes].sizes, **changes}))
    return model


def _timm() -> nn.Module:
    """timm needs a torchvision that fits the torch beside it, which CPU installations often lack."""
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"timm cannot be imported: {error}")
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", depth=2, qk_norm=True, init_values=1e-5)
    return model


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(create, one.config) for name, one in ENROLLED.items()},
    **{f"transformers' {name}": partial(foreign.create, name) for name in foreign.FOREIGN},
    "all of a vit": lambda: Model(replace(OURS, qk_norm=True, layer_scale=0.1, drop_path=0.1, dropout=0.1)),
    "conv stem": lambda: Model(replace(OURS, stem="conv", classifier="pooled")),
    "transformers' vit alone": partial(_other, "ViTModel", "vit"),
    "transformers' bert in pretraining": partial(_other, "BertForPreTraining", "bert"),
    "transformers' xlm-roberta": partial(_other, "XLMRobertaForSequenceClassification", "roberta"),
    "transformers' camembert": partial(_other, "CamembertForMaskedLM", "roberta"),
    "transformers' mt5": partial(_other, "MT5ForConditionalGeneration", "t5"),
    "transformers' gated t5": partial(
        foreign.create, "t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "timm": _timm,
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> nn.Module:
    """A small model without values."""
    with torch.device("meta"):
        return FAMILIES[request.param]()


def _owners(anatomy: Anatomy, parameter: str) -> list[roles.Role]:
    return [
        role
        for role in roles.walk((anatomy.beside, anatomy.stacks))
        if any(parameter == name or parameter.startswith(f"{name}.") for name in roles.owned(role))
    ]


def _check_whole(anatomy: Anatomy, parameters: list[str]) -> None:
    for name in parameters:
        assert _owners(anatomy, name) == [anatomy.role_of(name)], name


def test_every_parameter_has_exactly_one_role(model: nn.Module) -> None:
    anatomy = anatomy_of(model)
    assert not anatomy.unknown
    assert len(anatomy.blocks) == len({id(block) for block in anatomy.block_modules(model)})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_whole(anatomy, list(parameters))
    modules = dict(model.named_modules())
    for role in roles.walk(anatomy.stacks):
        assert role.name in modules or role.name in parameters, role
        assert type(role) is not roles.Role, role
        if isinstance(role, roles.Dropout):
            assert not list(modules[role.name].parameters()) or role.name.rpartition(".")[2][:6] == "branch"
        if isinstance(role, roles.Experts):
            up = role.up.name
            assert role.count == len(parameters[up if up in parameters else f"{up}.weight"])


def test_depths_rise_with_the_order_of_running(model: nn.Module) -> None:
    anatomy = anatomy_of(model)
    beside = [block.beside for stack in anatomy.stacks for block in stack.blocks]
    for name, _ in model.named_parameters():
        within = [i for i, block in enumerate(anatomy.blocks) if name.startswith(f"{block}.")]
        after = any(role in _owners(anatomy, name) for role in roles.walk(anatomy.stacks[-1].after))
        if within:
            assert anatomy.depth_of(name) == within[0] + 1 - sum(beside[: within[0] + 1])
        else:
            assert (anatomy.depth_of(name) == anatomy.depth + 1) == after, name
    assert min(anatomy.depth_of(name) for name, _ in model.named_parameters()) == 0


@pytest.mark.parametrize("name", MANIFESTS)
def test_timms_recorded_names_have_one_role_each(name: str) -> None:
    manifest = json.loads(MANIFESTS[name].read_text())
    names, config = list(manifest["state"]), ViTConfig(**manifest["config"])
    stack = pruned(timm_family.vit_stack(names, config.heads), names)
    anatomy = Anatomy(family="timm_vit", stacks=(stack,))
    _check_whole(anatomy, names)
    assert len(anatomy.blocks) == config.depth


def test_names_of_transformers_4_have_one_role_each() -> None:
    """Its modules have the names that files still have."""
    names = [name.removeprefix("vit.") for name in to_hf(Model(OURS).state_dict(), OURS)]
    names = [name for name in names if not name.startswith("classifier")]
    stacks = pruned(transformers_family.vit_stacks(names, 4), names)
    _check_whole(Anatomy(family="hf_vit", stacks=stacks), names)


def test_what_needs_roles_is_refused_for_a_model_that_nobody_enrolled() -> None:
    anatomy = anatomy_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert anatomy.role_of("0.weight") is None
    with pytest.raises(ConfigError, match=r"of the role Attention.*anatomy\.enrol\('torch\.nn"):
        anatomy.parts(roles.Attention)
