"""A Plan applied to a model: the same weights and names whatever the Plan, for models of any origin."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from helpers.families import ENROLLED
from penstock.apply import SCRIPT, Setup, apply, compile_model
from penstock.build import Built, build
from penstock.config.machine import Machine
from penstock.config.model import ViTConfig
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.optim import set_learning_rate
from penstock.step import TrainStep
from penstock.tasks.text import TextBatch

TINY = ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=3, heads=2, mlp_width=32, classes=4)
PLANS = [
    "baseline",
    "optimizer=contiguous token_order=batch_second attention=plain matmul=medium",
    "precision=O1 optimizer=fused",
    "precision=O1 dtype=fp16 optimizer=contiguous",
    "precision=O3 optimizer=foreach",
]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 1, 8, 8, generator=generator), torch.arange(4)


@pytest.mark.parametrize("line", PLANS)
def test_names_and_weights_do_not_depend_on_the_plan(line: str) -> None:
    reference = build(TINY, Plan(), seed=5).model.state_dict()
    built = build(TINY, Plan.parse(line), seed=5)
    state = built.model.state_dict()
    assert list(state) == list(reference)
    for name, value in reference.items():
        torch.testing.assert_close(state[name].to(value.dtype), value.to(state[name].dtype).to(value.dtype))
    built.step([batch()])
    assert list(built.model.state_dict()) == list(reference)
    assert list(built.optimizer.state_dict()) == ["state", "param_groups"]


@pytest.mark.parametrize("compiled", ["blocks", pytest.param("whole", marks=pytest.mark.slow)])
def test_compiling_changes_neither_names_nor_results(compiled: Any) -> None:
    plain, other = build(TINY, Plan()), build(TINY, Plan())
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_model(other.model, Plan(compile=compiled), backend=backend)
    assert list(other.model.state_dict()) == list(plain.model.state_dict())
    for _ in range(3):
        expected, got = plain.step([batch()]), other.step([batch()])
        torch.testing.assert_close(got.loss, expected.loss)
    assert len(graphs) == 1  # one compilation serves all three blocks
    with other.inference(), plain.inference():
        torch.testing.assert_close(other.model(batch()[0]), plain.model(batch()[0]))
    for a, b in zip(plain.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(a, b)


def test_recorded_passes_are_asked_of_torch_and_hold_what_later_steps_overwrite() -> None:
    plan = Plan(compile="graphs")
    with pytest.raises(ConfigError, match="is for steps that Penstock runs on a GPU"):
        build(TINY, plan)
    with pytest.raises(ConfigError, match="is for steps that Penstock runs on a GPU"):
        apply(nn.Linear(1, 1), Setup(purpose=SCRIPT, plan=plan, device=torch.device("cuda")), "compile")
    built = build(TINY, Plan())
    with mock.patch.object(torch, "compile", wraps=torch.compile) as asked:  # which refuses unknown options
        compile_model(built.model, plan)
    assert asked.call_args.kwargs["options"].items() >= {
        ("triton.cudagraphs", True),
        ("triton.cudagraph_or_error", True),
    }

    output = nn.Parameter(torch.ones(()))  # stands for memory that each step overwrites
    optimizer = torch.optim.SGD([output], lr=0.5)
    step = TrainStep(nn.Identity(), optimizer, plan=plan, device="cpu", loss=lambda *_: output.view(()))
    first = step([0]).loss
    assert (first, step([0]).loss) == (1.0, 0.5)
    with pytest.raises(ConfigError, match="overwrites the gradients of the micro-batch before"):
        step([0, 0])


@pytest.mark.sweep
def test_many_compiled_plans_in_one_process_all_stay_compiled() -> None:
    for size in range(1, 13):
        built = build(TINY, Plan())
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        compile_model(built.model, Plan(compile="blocks"), backend=backend)
        images, targets = batch()
        built.step([(images.repeat(size, 1, 1, 1), targets.repeat(size))])
        assert graphs, f"the model number {size} of this class was run eagerly"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
@pytest.mark.parametrize(
    ("line", "rtol"),
    [
        pytest.param("compile=blocks", 1e-4, marks=pytest.mark.sweep),
        ("precision=O1 attention=auto compile=whole", 1e-2),
    ],
    ids=["blocks", "whole"],
)
def test_inductor_agrees(line: str, rtol: float) -> None:
    tiny = replace(TINY, depth=2)
    plain, other = (build(tiny, Plan.parse(words)) for words in (re.sub(r"compile=\w+", "", line), line))
    for _ in range(3):
        expected, got = plain.step([batch()]), other.step([batch()])
        torch.testing.assert_close(got.loss, expected.loss, rtol=rtol, atol=1e-5)


def test_seeds_decide_weights_and_leave_the_generator_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, two, three = (build(TINY, Plan(), seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one["head.weight"], two["head.weight"])
    assert not torch.equal(one["head.weight"], three["head.weight"])


def test_plans_take_turns_without_leaking() -> None:
    def losses(builds: list[Built], rounds: int) -> list[list[float]]:
        return [[built.step([batch()]).loss.item() for built in builds] for _ in range(rounds)]

    plans = [
        Plan(),
        Plan(precision="O1", optimizer="contiguous", matmul="medium"),
        Plan(precision="O3", optimizer="fused"),
    ]
    alone = [losses([build(TINY, plan)], 4) for plan in plans]
    together = losses([build(TINY, plan) for plan in plans], 4)
    assert together == [[alone[i][turn][0] for i in range(3)] for turn in range(4)]


class Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x)


def test_any_module_with_any_loss() -> None:
    module = Foreign()

    def loss(model: nn.Module, data: Tensor) -> Tensor:
        return (model(data) - 1).square().mean()

    plan = Plan(precision="O3", optimizer="contiguous")
    built = build(module, plan, loss=loss, recipe=Recipe(layer_decay=0.5, ema_decay=0.9, lr=0.01))
    assert built.model is module
    assert built.config is None
    first = built.step([batch()[0]]).loss
    for _ in range(20):
        last = built.step([batch()[0]]).loss
    assert last < first
    assert built.ema is not None


class Attends(nn.Module):
    """A block that calls torch's attention, in a model that has nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.layer(x)[:, None].chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("attention", ["plain", "math"])
@pytest.mark.parametrize("compiled", ["none", "whole"])
@pytest.mark.parametrize("module", [Attends, lambda: nn.Linear(4, 12)], ids=["calls it", "never calls it"])
def test_a_choice_of_attention_that_changes_nothing_is_said_once(
    module: Any, compiled: Any, attention: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    built = build(module(), Plan(attention=attention), loss=lambda model, data: model(data).square().mean())
    compile_model(built.model, Plan(compile=compiled), backend=backend)
    for _ in range(3):
        built.step([torch.randn(2, 3, 4)])
    said = caplog.text.count(f"plan.attention={attention} has no effect: Linear never calls")
    assert said == (0 if isinstance(built.model, Attends) else 1)
    assert len(graphs) == (compiled == "whole"), "noting the calls breaks no graph, and compiles none anew"


OLD = Machine(name="old", device="cpu", source="measured", peak_flops={"fp32": 1e11})


@pytest.mark.parametrize(
    ("model", "line", "options", "words"),
    [
        (Foreign, "token_order=batch_second", {}, "batch_second"),
        (lambda: nn.Linear(64, 4), "compile=blocks", {}, "No repeated blocks"),
        (TINY, "precision=O1", {"machine": OLD}, "bf16"),
        (TINY, "precision=O1 dtype=fp16 optimizer=foreach", {}, "loss scale"),
        (TINY, "precision=O1 products=fp8_tensorwise", {}, r"compute capability 8\.9"),
        (
            TINY,
            "baseline",
            {"recipe": Recipe(z_loss=0.1)},
            r"recipe\.z_loss is 0\.1, but this model has no logits",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(model: Any, line: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(model, Plan.parse(line), **options)


@pytest.mark.slow
def test_transformers_vit() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_channels=1, num_labels=4,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    built = build(model, Plan(precision="O1", optimizer="contiguous"), recipe=Recipe(lr=3e-3))
    first = built.step([batch()]).loss
    for _ in range(20):
        last = built.step([batch()]).loss
    assert last < first


def test_a_constant_loss_scale_stays_and_leaves_results_alone() -> None:
    plan = Plan(precision="O1", dtype="fp16", optimizer="fused")
    losses = {}
    for scale in (None, 256.0):
        torch.manual_seed(0)
        built = build(TINY, plan, recipe=Recipe(lr=3e-3, loss_scale=scale))
        assert built.step.scaler is not None
        losses[scale] = [float(built.step([batch()]).loss) for _ in range(3)]
        assert built.step.scaler.scale == (scale or 2.0**16)
    assert losses[256.0] == pytest.approx(losses[None], rel=1e-2)
    other = build(TINY, plan, recipe=Recipe(loss_scale=8.0)).step.scaler
    assert other is not None
    other.load_state_dict(built.step.scaler.state_dict())
    assert other.scale == 8.0, "a run that goes on with another constant gets it"
    with pytest.raises(ConfigError, match="loss_scale"):
        Recipe(loss_scale=0.0)


def test_fp16_throughout_warns_of_a_small_eps(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan(precision="O3", dtype="fp16", optimizer="fused")
    build(TINY, plan, recipe=Recipe(eps=1e-4))
    assert not caplog.records
    build(TINY, plan)
    assert "recipe.eps=1e-4" in caplog.text


@pytest.mark.parametrize(
    "line", ["algorithm=sgd", "algorithm=sgd optimizer=contiguous", "algorithm=sgd precision=O2"]
)
def test_sgd_trains_with_the_momentum_of_the_recipe(line: str) -> None:
    built = build(TINY, Plan.parse(line), recipe=Recipe(beta1=0.8, weight_decay=0.0, lr=0.1))
    assert {group["momentum"] for group in built.optimizer.param_groups} == {0.8}
    losses = [built.step([batch()]).loss.item() for _ in range(8)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("line", PLANS)
def test_trains_on_a_gpu(line: str) -> None:
    built = build(TINY, Plan.parse(line), device="cuda", recipe=Recipe(lr=3e-3, ema_decay=0.9))
    images, targets = (tensor.cuda() for tensor in batch())
    first = built.step([(images, targets)]).loss
    for _ in range(30):
        last = built.step([(images, targets)]).loss
    assert last < first


@pytest.mark.gpu
@pytest.mark.parametrize(
    "line", ["optimizer=fused", "precision=O1 optimizer=contiguous", "precision=O2 optimizer=fused"]
)
def test_recorded_passes_equal_those_that_are_launched_on_a_gpu(line: str) -> None:
    recipe = Recipe(lr=3e-3, clip_norm=0.5, ema_decay=0.9)
    every = [
        build(TINY, Plan.parse(f"{line} compile={compiled}"), device="cuda", recipe=recipe)
        for compiled in ("whole", "graphs")
    ]
    losses: dict[int, list[Tensor]] = {0: [], 1: []}
    for seed in range(8):  # torch records in the second step, and replays from the third
        images, targets = (torch.roll(tensor, seed, 0).cuda() for tensor in batch())
        for index, built in enumerate(every):
            set_learning_rate(built.optimizer, 3e-3 / (1 + seed))
            losses[index].append(built.step([(images, targets)]).loss)
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None, "nothing was recorded"
    assert list(manager.get_roots()), "nothing was recorded"
    torch.testing.assert_close(torch.stack(losses[1]), torch.stack(losses[0]))
    for plain, recorded in zip(every[0].model.parameters(), every[1].model.parameters()):
        torch.testing.assert_close(recorded, plain)
    with every[0].inference(), every[1].inference():
        torch.testing.assert_close(every[1].model(images), every[0].model(images))


@pytest.mark.parametrize("line", ["baseline", "precision=O2 optimizer=fused"])
def test_inference_has_the_averages_that_the_recipe_keeps(line: str) -> None:
    built = build(TINY, Plan.parse(line), recipe=Recipe(lr=1e-2, ema_decay=0.5))
    for _ in range(3):
        built.step([batch()])
    assert built.ema is not None
    own = [parameter.detach().clone() for parameter in built.model.parameters()]
    with built.ema.swapped():
        averages = [parameter.detach().clone() for parameter in built.model.parameters()]
    with built.inference():
        assert all(map(torch.equal, built.model.parameters(), averages))
        assert not all(map(torch.equal, averages, own))
    assert all(map(torch.equal, built.model.parameters(), own))


@pytest.mark.parametrize(
    "line", [*PLANS, "precision=O2 optimizer=fused", "precision=O2 optimizer=contiguous"]
)
def test_what_is_frozen_stays_and_the_rest_learns(line: str) -> None:
    recipe = Recipe(
        lr=1e-2, freeze=("stem", "encoder.places", "encoder.blocks.0"), ema_decay=0.5, layer_decay=0.8
    )
    built = build(TINY, Plan.parse(line), recipe=recipe)
    before = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    for _ in range(3):
        built.step([batch()])
    assert built.ema is not None
    with built.inference(), built.ema.swapped():
        after = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    for name, tensor in after.items():
        frozen = name.startswith(("stem.", "encoder.places.", "encoder.blocks.0."))
        assert torch.equal(tensor, before[name]) == frozen, name


@pytest.mark.parametrize("line", ["baseline", "loss=chunked", "precision=O2 optimizer=fused"])
def test_the_z_loss_is_that_of_the_training_loss_alone(line: str) -> None:
    """Against the logits themselves; evaluation has no such term."""
    config = ENROLLED["gpt"].config
    tokens = torch.randint(0, config.vocabulary, (2, 6), generator=torch.Generator().manual_seed(1))
    batch = TextBatch(inputs=(tokens, None, tokens), ids=torch.arange(2), tokens=12, count=torch.tensor(12.0))
    losses = {}
    for factor in (0.0, 0.5):
        built = build(config, Plan.parse(line), recipe=Recipe(z_loss=factor))
        with built.inference():
            logits, judged = built.model(tokens), built.loss(built.model, batch)
        losses[factor] = (built.step([batch]).loss, judged)
    torch.testing.assert_close(losses[0.5][1], losses[0.0][1])
    expected = losses[0.0][0] + 0.5 * logits.float().logsumexp(-1).square().mean()
    torch.testing.assert_close(losses[0.5][0], expected, rtol=2e-3 if "O2" in line else 1e-5, atol=0)
