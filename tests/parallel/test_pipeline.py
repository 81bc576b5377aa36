"""Stages on several ranks train as one process does: losses, norms, weights, averages, and what an evaluation sees."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import equality, foreign
from helpers.doomed import config_in, finished, launched, same_end
from helpers.equality import Close, Job, Trained, take_steps
from helpers.families import ENROLLED, Given, batches
from helpers.spawn import RankFailed, pool
from helpers.sweeps import sweep
from penstock.build import build
from penstock.config.decoding import Decoding
from penstock.config.machine import load_machine
from penstock.config.model import ModelConfig
from penstock.config.plan import Plan
from penstock.config.run import Lora, Recipe
from penstock.decode.sample import sample
from penstock.decode.texts import Prompts
from penstock.errors import ConfigError
from penstock.kernels.split_linear import SplitBackward, put_off
from penstock.models import create
from penstock.models.anatomy import Anatomy, Block, Stack
from penstock.models.convert import load_weights
from penstock.models.wrap import swap
from penstock.parallel import ParallelDims, dims_of, whole_state
from penstock.parallel.stage_cut import StageCut
from penstock.planner.describe import totals
from penstock.planner.pipeline import balanced, stage_counts
from penstock.planner.prediction import stage_costs
from penstock.schedules import generate
from penstock.step.pipeline import table

RECIPE = Recipe(lr=1e-3, eps=1e-4, clip_norm=0.5, ema_decay=0.5)
HALF = Close(2e-2, 2e-3)
"""Sums in another order are rounded otherwise."""


def _rest(*values: str) -> Any:
    """A case beside those that stand for it, in `make test-sweeps`."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def _config(name: str) -> ModelConfig:
    """An enrolled model of four blocks, or of as many as stand behind a slash."""
    name, _, depth = name.partition("/")
    config: Any = ENROLLED[name].config
    return replace(config, depth=int(depth or 4)) if hasattr(config, "depth") else config


def _job(name: str, *, double: bool = True, backend: str | None = None, **recipe: Any) -> Job:
    return Job(config=_config(name), recipe=replace(RECIPE, **recipe), double=double, backend=backend)


def _compare(name: str, line: str, **how: Any) -> None:
    seconds = how.pop("seconds", 60.0)
    close = {} if how.get("double", True) else {"weights": HALF, "figures": HALF}
    equality.compare(_job(name, **how), line, seconds=seconds, splits=True, **close)


@pytest.mark.parametrize(
    "name", sweep(ENROLLED, ["vit", "gpt", "bert", "t5"], slow=["multimodal", "universal"])
)
def test_every_family_trains_in_two_stages(name: str) -> None:
    _compare(name, "micro_batch=2 accumulate=3 pp=2")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpt", "micro_batch=1 accumulate=4 pp=2 schedule=gpipe"),
        ("vit", "micro_batch=2 accumulate=4 pp=2 schedule=interleaved virtual=2"),
        _rest("t5", "micro_batch=2 accumulate=4 pp=2 schedule=interleaved virtual=2"),
        ("marian", "micro_batch=2 accumulate=2 pp=4 token_order=batch_second"),
        ("bert", "micro_batch=2 accumulate=2 pp=2 padding=remove recompute=full"),
        ("gpt", "micro_batch=2 accumulate=3 pp=2 schedule=zero_bubble"),
        _rest("t5", "micro_batch=2 accumulate=2 pp=2 schedule=zero_bubble recompute=full"),
        _rest("gpt", "micro_batch=1 accumulate=2 pp=2 dp=2 optimizer=contiguous"),
        ("gpt", "micro_batch=1 accumulate=3 pp=2 dp=2 sharding=fsdp"),
        _rest("t5", "micro_batch=1 accumulate=2 pp=2 dp=2 sharding=zero1"),
        ("t5", "micro_batch=2 accumulate=3 pp=2 offload=activations"),
        _rest(
            "gpt", "micro_batch=1 accumulate=2 pp=2 dp=2 sharding=fsdp offload=optimizer optimizer=contiguous"
        ),
        _rest("vit", "micro_batch=1 accumulate=4 pp=2 dp=2 sharding=zero2 schedule=interleaved virtual=2"),
    ],
)
def test_schedules_and_layouts_train_alike(name: str, line: str) -> None:
    _compare(name, line)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        _rest("gpt", "micro_batch=2 accumulate=3 pp=2 tp=2"),
        _rest("pruned", "micro_batch=2 accumulate=4 pp=2 tp=2 sp=true"),
        _rest("t5", "micro_batch=2 accumulate=2 pp=2 tp=2 sp=true recompute=full"),
        _rest("marian", "micro_batch=2 accumulate=2 pp=2 tp=2 token_order=batch_second"),
        _rest("bert", "micro_batch=2 accumulate=2 pp=2 tp=2 sp=true padding=remove"),
        ("vit", "micro_batch=2 accumulate=4 pp=2 tp=2 sp=true schedule=interleaved virtual=2"),
        _rest("gpt", "micro_batch=1 accumulate=2 pp=2 tp=2 dp=2 sharding=fsdp"),
        _rest("bart", "micro_batch=1 accumulate=2 pp=2 tp=2 sp=true dp=2"),
        _rest("gpt", "micro_batch=1 accumulate=2 pp=2 dp=4 sharding=hsdp shard=2"),
        _rest("gpt", "micro_batch=2 accumulate=2 pp=2 tp=2 sp=true recompute=selective"),
        ("bert", "micro_batch=2 accumulate=2 cp=2 pp=2"),
        _rest("vit", "micro_batch=2 accumulate=2 cp=2 pp=2"),
        _rest("marian", "micro_batch=2 accumulate=2 cp=2 pp=2"),
        _rest("bart", "micro_batch=2 accumulate=2 cp=2 tp=2 sp=true"),
        ("t5", "micro_batch=2 accumulate=2 cp=2 tp=2 padding=remove"),
        _rest("t5", "micro_batch=2 accumulate=2 cp=2 pp=2"),
        _rest("vit", "micro_batch=2 accumulate=2 cp=2 tp=2"),
        _rest("gpt", "micro_batch=2 accumulate=2 cp=2 tp=2 sp=true sharding=fsdp"),
        ("gpt", "micro_batch=1 accumulate=2 cp=2 tp=2 pp=2"),
        *(
            _rest(name, "micro_batch=2 accumulate=2 tp=2 sp=true padding=remove")
            for name in ("bert", "modernbert", "t5")
        ),
    ],
)
def test_all_that_splits_a_model_goes_together(name: str, line: str) -> None:
    _compare(name, line)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch.jit
def test_what_is_split_can_be_compiled() -> None:
    # Inductor takes a minute where its cache is empty.
    _compare("gpt/1", "micro_batch=1 accumulate=2 tp=2 compile=whole", seconds=300.0)


@pytest.mark.sweep
@pytest.mark.parametrize("line", ["pp=2 tp=2 sp=true compile=blocks", "tp=2 compile=whole"])
def test_what_is_split_can_be_traced(line: str) -> None:
    """With graphs that are made and differentiated, and run operator by operator."""
    _compare("gpt/2", f"micro_batch=1 accumulate=2 {line}", backend="aot_eager", seconds=120.0)


@pytest.mark.parametrize(
    "line",
    [
        "precision=O1",
        _rest("precision=O2 optimizer=fused dtype=fp16"),
        "precision=O2 optimizer=fused",
        _rest("precision=O3 optimizer=contiguous"),
        _rest("precision=O2 optimizer=fused schedule=zero_bubble"),
        _rest("precision=O1 tp=2 sp=true"),
        "precision=O1 products=int8",
        "precision=O2 optimizer=fused dtype=fp16 tp=2",
        "precision=O3 optimizer=contiguous tp=2 schedule=zero_bubble",
    ],
)
def test_every_level_trains_in_stages(line: str) -> None:
    _compare("gpt", f"micro_batch=2 accumulate=2 pp=2 {line}", double=False)


def test_what_is_frozen_stays_on_every_stage() -> None:
    _compare("gpt", "micro_batch=2 accumulate=2 pp=2", freeze=("tokens", "decoder.blocks.0"))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gpt", "pp=2"),
        _rest("t5", "pp=2 dp=2 sharding=fsdp"),
        _rest("vit", "pp=2 recompute=full"),
        _rest("gpt", "tp=2"),
        ("modernbert", "tp=2 sp=true"),
        _rest("t5", "tp=2 sp=true dp=2 sharding=fsdp"),
        _rest("marian", "tp=2 pp=2 sp=true"),
    ],
)
def test_adapters_learn_where_a_model_is_split(name: str, line: str) -> None:
    _compare(name, f"micro_batch=2 accumulate=2 {line}", lora=Lora(rank=2))


def _loaded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    built = _job("gpt", double=False).built("micro_batch=2 accumulate=2 pp=2")
    load_weights(built.model, weights)
    return whole_state(built.model, built.dims)


def test_stages_start_from_the_weights_of_a_whole_model() -> None:
    weights = create(_config("gpt")).state_dict()
    found = pool(2).run(_loaded, weights)[0]
    assert found.keys() == weights.keys()
    assert all(found[name].equal(value) for name, value in weights.items())


class OfLabels(Given):
    """The loss of what a model of transformers gives."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return super().loss(outputs.logits, batch)


def _theirs(name: str) -> nn.Module:
    depth = {"n_layer" if name == "gpt2" else "num_hidden_layers": 4}
    made: nn.Module = foreign.create(name, vocab_size=13, **depth)
    return made.double()


def _of_theirs(name: str, line: str) -> tuple[Trained, Tensor]:
    plan, found, data = Plan.parse(line), Trained(), partial(batches, _config("gpt"))
    torch.manual_seed(0)
    built = build(partial(_theirs, name), plan, recipe=replace(RECIPE, ema_decay=None), loss=OfLabels())
    take_steps(built, range(2), data, found, double=True)
    with built.inference():
        outputs: Any = built.model(data(9, 2)[0])
    return found, outputs.logits


@pytest.mark.parametrize("name", ["gpt2", *map(_rest, ("llama", "bert"))])
def test_models_of_transformers_train_in_stages(name: str) -> None:
    pytest.importorskip("transformers")
    line = "micro_batch=2 accumulate=3 pp=2"
    expected, logits = _of_theirs(name, equality.alone(Plan.parse(line)).line())
    for layout in (line,) if name == "llama" else (line, f"{line} tp=2"):
        for found, outputs in pool(Plan.parse(layout).gpus).run(_of_theirs, name, layout):
            equality.hold_figures(layout, found, expected, figures=equality.EXACT)
            torch.testing.assert_close(outputs, logits, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp=2 accumulate=2", "pp=2 accumulate=2"),
        _rest("pp=2 accumulate=2", "accumulate=2"),
        ("accumulate=2", "pp=2 accumulate=2 schedule=interleaved virtual=2"),
        _rest("pp=2 accumulate=2", "pp=4 accumulate=2"),
        _rest("pp=2 tp=2 accumulate=2", "accumulate=2"),
        ("accumulate=2", "pp=2 tp=2 sp=true accumulate=2"),
        _rest("pp=2 tp=2 accumulate=2", "tp=2 dp=2 sharding=fsdp"),
    ],
)
def test_a_checkpoint_of_stages_goes_on_in_any_other_layout(before: str, after: str, tmp_path: Path) -> None:
    lines = (f"micro_batch=2 {line}" for line in (before, after))
    equality.goes_on_elsewhere(_job("gpt"), *lines, tmp_path, Close(1e-9, 1e-12))


def _fails(line: str) -> None:
    job = _job("gpt")
    built = job.built(line)
    if built.dims.rank == 1:
        built.model.get_submodule("decoder.blocks.3").register_forward_pre_hook(_Third())
    take_steps(built, range(1), job.batches, Trained())


class _Third:
    """Fails when it is called for the third time."""

    calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise MemoryError("no room")


def test_an_error_names_stage_and_micro_batch() -> None:
    with pytest.raises(RankFailed, match=r"In the forward pass of stage 1 .* for micro-batch 2 .* no room"):
        pool(2).run(_fails, "micro_batch=1 accumulate=4 pp=2")


def test_the_table_that_runs_is_the_one_that_is_simulated() -> None:
    plan = Plan.parse("pp=4 accumulate=8 schedule=interleaved virtual=2")
    assert table(plan, 8).computations() == generate("interleaved", 4, 8, 2)


def test_a_split_backward_pass_is_torchs_own_in_two_halves() -> None:
    module, later = nn.Linear(3, 4), list[Any]()
    x = torch.randn(2, 5, 3, requires_grad=True)
    module(x).square().sum().backward()
    wanted = [x.grad, module.weight.grad, module.bias.grad]
    x.grad = None
    module.zero_grad()
    swap(module, SplitBackward)
    with put_off(later):
        module(x).square().sum().backward()
    assert module.weight.grad is None
    for make in later:
        make()
    torch.testing.assert_close([x.grad, module.weight.grad, module.bias.grad], wanted)
    module(x).square().sum().backward()  # whole: added to what is there
    assert wanted[1] is not None
    torch.testing.assert_close(module.weight.grad, 2 * wanted[1])


def test_stages_are_balanced_with_embedding_and_output() -> None:
    assert balanced([1.0] * 12, 4) == (3, 3, 3, 3)
    assert balanced([1.0] * 14, 4, entrance=1.0, end=1.0) == (3, 4, 4, 3)
    assert balanced([1.0] * 8, 2, end=3.0) in ((5, 3), (6, 2))
    assert balanced([1.0] * 2, 2, end=9.0) == (1, 1)
    assert sum(stage_counts(totals(_config("gpt")), 2)) == 4


def test_the_last_stage_has_the_output_too() -> None:
    costs = stage_costs(_config("gpt"), load_machine("h100"), Plan.parse("pp=2 accumulate=4 micro_batch=2"))
    first, last = (
        sum(c[i] for c in (costs.forward, costs.backward_input, costs.backward_weight)) for i in (0, 1)
    )  # type: ignore[index]
    assert last > first


def test_what_a_pipeline_cannot_run_is_refused_by_name() -> None:
    plan = Plan.parse("pp=2 accumulate=2")
    dims = ParallelDims(pp=2)
    with pytest.raises(ConfigError, match=r"so the loss must be a penstock\.tasks\.Task"):
        build(_config("gpt"), plan, dims=dims, loss=lambda model, batch: model(*batch))
    with pytest.raises(ConfigError, match="cannot be cut: its blocks must be known by role"):
        build(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), plan, dims=dims, loss=Given())
    two = Anatomy(family="two", stacks=tuple(Stack(blocks=(Block(one),)) for one in ("first.0", "second.0")))
    with pytest.raises(ConfigError, match=r"of the family two cannot be cut: .* known what each reads"):
        StageCut.of(two, (1, 1))
    assert StageCut.of(replace(two, reads=((-1, ()), (0, ()))), (1, 1)).edges == (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["pp=2", _rest("tp=2 sp=true pp=2")])
def test_a_stage_that_is_killed_goes_on_without_changing_a_bit(line: str, tmp_path: Path) -> None:
    """With dropout and averages; two stages under the supervisor, four ranks started again by this test."""
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    plan = Plan.parse(f"micro_batch=8 accumulate=2 optimizer=fused {line}")
    calm, killed = (config_in(tmp_path / name, plan, steps=12) for name in ("calm", "killed"))
    finished(calm, world=plan.gpus)
    fault = f"kill:{plan.gpus - 1}:6"
    if plan.gpus == 2:
        # As many restarts as kills: no rank may be lost to anything else.
        with launched(killed, fault, options=("--procs", "2", "--max-restarts", "1")) as agent:
            assert agent.wait(240) == 0, agent.said
        assert "was killed by SIGKILL" in agent.said
    else:
        with pytest.raises(RankFailed, match="It was killed by SIGKILL"):
            finished(killed, fault, world=plan.gpus)
        finished(killed, fault, world=plan.gpus)
    same_end(killed, calm)


def _translated(encoder: int, decoder: int, ranks: int) -> list[list[int]]:
    """What a model of so many blocks makes of two texts, as `penstock train` lets it between steps."""
    stacks = {"encoder": encoder, "decoder": decoder}
    config: Any = ENROLLED["marian"].config
    config = replace(config, **{name: replace(getattr(config, name), depth=n) for name, n in stacks.items()})
    plan = Plan(pp=ranks, micro_batch=1, accumulate=ranks)
    built = build(config, plan, dims=dims_of(plan, "cpu") if ranks > 1 else None, loss=Given(), seed=0)
    prompts = Prompts.of([[3, 4, 5], [6, 7]], start=0, device=torch.device("cpu"))
    return sample(built.model, prompts, Decoding(max_tokens=6), ends=()).tolist()


@pytest.mark.parametrize(("encoder", "decoder"), [(2, 2), (1, 3), (3, 1)])
def test_stages_translate_between_steps(encoder: int, decoder: int) -> None:
    """The past remembers the encoder's outputs, which are sent in the first pass alone."""
    expected = _translated(encoder, decoder, 1)
    assert pool(2).run(_translated, encoder, decoder, 2) == [expected] * 2
