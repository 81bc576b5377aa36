"""Experts that are whole blocks: a sample goes through those of its own expert alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED, batches, loss
from penstock.apply import compile_model
from penstock.build import build
from penstock.compress.prune import keep_layers
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.errors import ConfigError
from penstock.models import Model, create
from penstock.models.convert import load_weights
from penstock.models.convert.upcycle import Upcycling, dense_twin, gated
from penstock.optim.groups import parameter_groups
from penstock.planner.describe import totals

CONFIG: Any = replace(ENROLLED["experts of blocks"].config, depth=3, experts=3)
"""Blocks 0, and 1 to 3 in place of one, and 4."""
SIZES = tuple(layer.sizes for layer in CONFIG.layers)
TEXTS: Any = replace(CONFIG, classes=0, text=Stack(width=16, depth=1, heads=2, mlp_width=32), vocabulary=13)


def _drawn(config: Any) -> Model:
    """A model without zeros, so that every part has a gradient."""
    torch.manual_seed(0)
    model = create(config, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def _inputs(config: Any, routes: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    samples = len(routes)
    made: dict[str, Tensor] = {
        "images": torch.randn(samples, 2, 8, 8, generator=generator, dtype=torch.float64),
        "times": torch.rand(samples, generator=generator, dtype=torch.float64),
        "classes": torch.arange(samples) % 10,
        "tokens": torch.randint(0, 13, (samples, 5), generator=generator),
        "lengths": torch.arange(samples) % 5 + 1,
        "routes": torch.tensor(routes),
    }
    return {name: value for name, value in made.items() if name in config.graph.arguments}


def test_layers_say_which_blocks_are_of_experts() -> None:
    assert CONFIG.experts_of_blocks == (None, 0, 1, 2, None)
    assert [layer.routed for layer in CONFIG.layers] == [False, True, True, True, False]
    assert not any(layer.mixture for layer in CONFIG.layers)
    listed = replace(CONFIG, unequal=SIZES)
    assert listed.experts_of_blocks == CONFIG.experts_of_blocks
    first, second, *others = SIZES
    for layers in ((first, second, others[-1]), (first, replace(second, hidden=8), *others)):
        with pytest.raises(ConfigError, match="for each block there must be 3 alike, one for each expert"):
            replace(CONFIG, unequal=layers)


@pytest.mark.parametrize("config", [CONFIG, TEXTS])
@pytest.mark.parametrize("order", ["batch_first", "batch_second"])
def test_a_sample_goes_through_the_blocks_of_its_expert_alone(config: Any, order: Any) -> None:
    """Outputs and gradients are those of a dense model of each expert's blocks, over the expert's samples."""
    model, routes = _drawn(config), [2, 0, 2, 0, 0]
    model.set_token_order(order)
    given = _inputs(config, routes)
    made = model(**given)
    made.square().sum().backward()
    state, summed = model.state_dict(), dict[str, Tensor]()
    for expert in set(routes):
        dense = create(dense_twin(config), dtype=torch.float64)
        names = {
            f"denoiser.blocks.{old}.": f"denoiser.blocks.{new}." for new, old in enumerate((0, 1 + expert, 4))
        }

        def name_of(name: str, names: dict[str, str] = names) -> str:
            return next(
                (new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name
            )

        taken = {n: v for n, v in state.items() if ".blocks." not in n or n.startswith((*names, "text."))}
        dense.load_state_dict({name_of(name): value for name, value in taken.items()})
        rows = torch.tensor([row for row, route in enumerate(routes) if route == expert])
        out = dense(**{name: value[rows] for name, value in given.items() if name != "routes"})
        torch.testing.assert_close(made[rows], out)
        out.square().sum().backward()
        gradients = dict(dense.named_parameters())
        for name in taken:
            gradient = gradients[name_of(name)].grad
            assert gradient is not None
            summed[name] = summed.get(name, torch.zeros_like(gradient)) + gradient
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name in summed:
            torch.testing.assert_close(parameter.grad, summed[name], msg=lambda t, n=name: f"{n}: {t}")
        else:  # of an expert without samples
            assert not parameter.grad.any(), name
    assert len(summed) < len(state)


def test_one_expert_computes_where_all_samples_are_its_own() -> None:
    model, ran = _drawn(CONFIG).eval(), list[int]()
    for number, block in enumerate(model.get_submodule("denoiser.blocks")):  # type: ignore[arg-type]
        block.attention.register_forward_hook(lambda *_, n=number: ran.append(n))
    with torch.no_grad():
        model(**_inputs(CONFIG, [1, 1, 1]))
    assert ran == [0, 2, 4]


def test_routes_are_those_of_experts() -> None:
    model = _drawn(CONFIG)
    for routes in ([0, 3], [-1, 0]):
        with pytest.raises(ConfigError, match="pass it routes, the number of an expert, from 0 to 2"):
            model(**_inputs(CONFIG, routes))
    with pytest.raises(ConfigError, match="pass it routes"):
        model(**{name: value for name, value in _inputs(CONFIG, [0]).items() if name != "routes"})
    labelled = replace(CONFIG, labels=4, expert_of=(2, 0, 0, 1))
    same = create(labelled, dtype=torch.float64)
    same.load_state_dict(model.state_dict())
    torch.testing.assert_close(same(**_inputs(CONFIG, [0, 3, 2])), model(**_inputs(CONFIG, [2, 1, 0])))


@pytest.mark.parametrize("config", [CONFIG, TEXTS, replace(CONFIG, unequal=SIZES)])
def test_experts_begin_as_copies_of_the_dense_model(config: Any) -> None:
    dense = _drawn(dense_twin(config)).float()
    routed = create(config)
    with pytest.raises(ConfigError, match="The weights are dense, but the model has experts"):
        load_weights(routed, dense.state_dict())
    assert load_weights(routed, dense.state_dict(), upcycling=Upcycling()).upcycled
    given = {n: v.float() if n == "images" else v for n, v in _inputs(config, [0, 1, 2, 1]).items()}
    alone = {name: value for name, value in given.items() if name != "routes"}
    torch.testing.assert_close(routed(**given), dense(**alone))
    noisy = create(config)
    load_weights(noisy, dense.state_dict(), upcycling=Upcycling(noise=0.1))
    state, source = noisy.state_dict(), dense.state_dict()
    weight = "attention.qkv.weight"
    assert torch.equal(state[f"denoiser.blocks.4.{weight}"], source[f"denoiser.blocks.2.{weight}"])
    ones = [state[f"denoiser.blocks.{number}.{weight}"] for number in (1, 2, 3)]
    assert not torch.equal(ones[0], ones[1])
    assert float((ones[0] - source[f"denoiser.blocks.1.{weight}"]).std()) == pytest.approx(0.03, rel=0.1)


@pytest.mark.parametrize("labels", [[1], [2, 0]])
def test_experts_of_some_labels_are_a_model(labels: list[int]) -> None:
    small: Any = gated(CONFIG, labels)
    assert small.depth == 3
    assert small.experts == (0 if len(labels) == 1 else 2)
    assert totals(small).parameters == sum(p.numel() for p in create(small).parameters())


@pytest.mark.parametrize("config", [CONFIG, TEXTS])
def test_parameters_are_counted(config: Any) -> None:
    model = create(config, device="meta")
    assert totals(config).parameters == sum(parameter.numel() for parameter in model.parameters())


def test_blocks_beside_each_other_are_as_deep() -> None:
    groups = parameter_groups(create(CONFIG), weight_decay=0.1, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in groups for name in group["param_names"]}
    found = [scales[f"denoiser.blocks.{number}.mlp.up.weight"] for number in range(5)]
    assert found == [0.125, 0.25, 0.25, 0.25, 0.5]


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks_learn_the_same(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of samples change from step to step, down to none."""
    found = []
    for line in ("micro_batch=6", "micro_batch=6 compile=blocks"):
        if "compile" in line:
            monkeypatch.setattr("penstock.apply.compile_model", partial(compile_model, backend=backend))
        built = build(CONFIG, Plan.parse(line), recipe=Recipe(lr=3e-3, eps=1e-4), loss=loss)
        losses = []
        for step, routes in enumerate(([0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 1, 1], [2] * 6, [1, 0, 0, 2, 0, 0])):
            *inputs, _, target = batches(CONFIG, step, 6)
            losses.append(float(built.step([(*inputs, torch.tensor(routes), target)]).loss))
        found.append((losses, built.model.state_dict()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"experts": 0}, "experts is 0"), ({"router": "softmax"}, "router is softmax"),
    ({"shared_experts": 1}, "shared_experts is 1"), ({"capacity": 1.25}, "capacity is 1.25"),
    ({"sample_capacity": 4}, "sample_capacity is 4"), ({"window": 4}, "window is 4"),
    ({"experts_in": "mlp", "unequal": SIZES}, "routed true")],
)  # fmt: skip
def test_stacks_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(CONFIG, **changes)


def test_runs_over_texts_are_refused() -> None:
    with pytest.raises(ConfigError, match="only a run over images can have"):
        DecoderConfig(width=16, heads=2, experts=2, router="given", experts_in="block")


@pytest.mark.parametrize(
    ("config", "line", "words"),
    [(CONFIG, "compile=whole", "compile=whole cannot compile model.experts_in=block"),
    (CONFIG, "compile=blocks recompute=full", "plan.recompute=full"), (CONFIG, "compile=blocks pp=2", "plan.pp=2"),
    (CONFIG, "ep=3 dp=3", "splits experts"), (CONFIG, "experts=loop", "is for mixtures of experts"),
    (TEXTS, "padding=remove", "plan.padding=remove"), (TEXTS, "cp=2", "plan.cp=2")],
)  # fmt: skip
def test_plans_that_cannot_be_are_refused(config: Any, line: str, words: str) -> None:
    assert any(words in problem for problem in problems(Plan.parse(line), config, run=True))


def test_blocks_of_experts_are_not_pruned() -> None:
    with pytest.raises(ConfigError, match="blocks of experts cannot be pruned"):
        keep_layers(create(CONFIG), "denoiser", [0, 1, 2, 3])
