"""The sweep: every family under every layout learns what one process does. A model is enrolled in `helpers.layouts`, a
layout by a line below. Ranks are started once for all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from helpers.equality import Trained, alone, micro_batches, trained, whole_weights
from helpers.layouts import LAYOUT_CASES
from helpers.rank_pool import pool
from helpers.sweeps import sweep
from penstock import checkpoint
from penstock.build import Built, build
from penstock.checkpoint import rewrite
from penstock.config.load import to_dict
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.config.run import Recipe, RunConfig
from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained

# Keys' biases have no gradient but rounding, which Adam would divide by its own size: one step is then anybody's.
RECIPE = Recipe(lr=3e-3, eps=1e-4, clip_norm=0.5, ema_decay=0.5)
TENSOR = ["tp=2", "tp=2 sp=true"]
STEPS = 8


class Compared(NamedTuple):
    """One case: what ranks learned, and what one process did."""

    said: str
    got: Trained
    expected: Trained


def _compared(cases: list[tuple[str, str]], steps: int, double: bool) -> list[Compared]:
    """Each case is a model's name and a plan's line. What one process learns is computed once for all alike."""
    found, known = [], dict[tuple[str, Plan], Trained]()
    for name, line in cases:
        case, plan = LAYOUT_CASES[name], Plan.parse(line)
        options: dict[str, Any] = {
            "steps": steps, "recipe": RECIPE, "batches": case.batches, "loss": case.loss, "double": double,
        }  # fmt: skip

        def made(case: Any = case) -> Any:
            torch.manual_seed(0)
            return case.make().double() if double else case.make()

        got = trained(made(), plan, **options)
        if torch.distributed.get_rank() == 0:
            single = replace(alone(plan), recompute="none", compile="none", loss="whole", fuse=())
            if (name, single) not in known:
                known[name, single] = trained(made(), single, **options)
            found.append(Compared(f"{name}: {line}", got, known[name, single]))
    return found


def _hold(world: int, cases: Iterable[tuple[str, str]], *, steps: int, double: bool = False) -> None:
    for said, got, expected in pool(world).run(_compared, list(cases), steps, double, timeout=250)[0]:
        assert got.weights.keys() == expected.weights.keys()
        half = "precision=O" in said
        for name, value in expected.weights.items():
            error = float((got.weights[name] - value).double().norm())
            if double:
                assert error <= 1e-7 * float(value.double().norm() + 1e-6), (
                    f"{said}: {name} differs by {error:.1e}"
                )
            elif half:
                # Ranks add up half products in another order: of each tensor the difference is held as a whole,
                # against its norm or how far Adam can have moved it. A bias that was 0 differed by up to 6 %, for Adam
                # divides gradients by their own size, and with them their rounding.
                far = max(float(value.double().norm()), RECIPE.lr * steps * value.numel() ** 0.5)
                assert error <= 0.1 * far, f"{said}: {name} differs by {error:.1e} of {far:.1e}"
            else:
                torch.testing.assert_close(
                    got.weights[name], value, rtol=1e-3, atol=2e-5,
                    msg=lambda t, n=name, s=said: f"{s}: {n}: {t}",
                )  # fmt: skip
        for mine, others in ((got.losses, expected.losses), (got.norms, expected.norms)):
            rtol = 1e-7 if double else 3e-2 if half else 1e-4
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(others), rtol=rtol, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("turn", sweep(range(3), [0]))
def test_every_family_learns_the_same_with_split_layers(turn: int) -> None:
    """A third of the families at a time."""
    cases = [(name, f"{line} micro_batch=2") for name in [*LAYOUT_CASES][turn::3] for line in TENSOR]
    _hold(2, cases, steps=2, double=True)


WITH = [
    "tp=2 sp=true micro_batch=2 recompute=full optimizer=foreach",
    "tp=2 sp=true micro_batch=2 recompute=operators optimizer=fused token_order=batch_second",
    "tp=2 micro_batch=2 recompute=early recompute_every=2 optimizer=contiguous matmul=medium",
    "tp=2 sp=true micro_batch=2 attention=plain accumulate=2",
]
"""Settings beside split layers, which change no result."""
LEVELS = [
    "tp=2 sp=true micro_batch=2 precision=O1",
    "tp=2 micro_batch=2 precision=O2 accumulate=2",
    "tp=2 sp=true micro_batch=2 precision=O3 optimizer=contiguous",
    "tp=2 sp=true micro_batch=2 precision=O1 dtype=fp16 optimizer=fused",
    "tp=2 sp=true micro_batch=2 precision=O2 dtype=fp16 optimizer=contiguous accumulate=2",
]
SHARED = [
    "tp=2 dp=2 micro_batch=2 accumulate=2",
    "tp=2 dp=2 sharding=fsdp micro_batch=2 sp=true",
    "tp=2 dp=2 sharding=hsdp shard=1 micro_batch=2 sp=true accumulate=2",
    "tp=2 dp=2 sharding=zero1 micro_batch=2 sp=true optimizer=contiguous",
    "tp=2 dp=2 sharding=zero2 micro_batch=2 optimizer=fused accumulate=2",
    "tp=2 dp=2 sharding=fsdp micro_batch=2 sp=true offload=optimizer optimizer=contiguous",
    "tp=2 dp=2 micro_batch=2 precision=O2 accumulate=2 sp=true",
    "tp=2 dp=2 sharding=fsdp micro_batch=2 precision=O1 sp=true recompute=full",
]


def test_a_sample_of_settings_learns_the_same_beside_split_layers() -> None:
    _hold(2, [("vit of tokens", WITH[0]), ("llama", WITH[1]), ("t5", WITH[2])], steps=4)


@pytest.mark.slow
def test_a_sample_of_fused_and_packed_forms_learns_the_same() -> None:
    _hold(2, [("gpt", "tp=2 sp=true micro_batch=2 loss=chunked fuse=residual_norm"),
              ("bert", "tp=2 micro_batch=2 padding=remove"),
              ("bert", "dp=2 sharding=fsdp micro_batch=2 fuse=residual_norm,bias_activation")], steps=4)  # fmt: skip


@pytest.mark.slow
def test_a_sample_of_levels_learns_the_same_beside_split_layers() -> None:
    _hold(2, [("llama", line) for line in (LEVELS[1], LEVELS[4])], steps=4)
    # Ranks round their own parts of a layer, in which scales are finer.
    _hold(2, [("llama", "tp=2 sp=true micro_batch=2 precision=O1 products=int8"),
              ("vit of tokens", "tp=2 micro_batch=2 precision=O2 products=int8_all")], steps=4)  # fmt: skip


@pytest.mark.slow
def test_a_sample_of_shardings_learns_the_same_beside_split_layers() -> None:
    _hold(4, [("llama", SHARED[0]), ("vit pooled", SHARED[1]), ("transformers' gpt2", SHARED[3])], steps=3)


@pytest.mark.parametrize("name", sweep(LAYOUT_CASES, (), slow=["llama"]))
def test_every_family_under_every_layout(name: str) -> None:
    """Each with split layers and split tokens, and with one of the other settings and two of the levels; one of each
    kind on four ranks, too, where two kinds share the shardings.
    """
    turn = list(LAYOUT_CASES).index(name)
    lines = [f"{line} micro_batch=2" for line in TENSOR]
    _hold(2, [(name, line) for line in lines], steps=STEPS, double=True)
    others = [line for line in WITH if "batch_second" not in line]
    chosen = others[turn % len(others)], LEVELS[turn % len(LEVELS)], LEVELS[(turn + 2) % len(LEVELS)]
    _hold(2, [(name, line) for line in chosen], steps=4)
    halves = {"vit of tokens": 0, "llama": 1, "t5": 0, "transformers' bert": 1}
    if name in halves:  # one of each kind: four ranks take longest
        _hold(4, [(name, line) for line in SHARED[halves[name] :: 2]], steps=3)


MOVES = [
    ("tp=2 sp=true micro_batch=4", "tp=2 sp=true micro_batch=4"),
    ("tp=2 micro_batch=4 optimizer=contiguous", "dp=2 micro_batch=2 sharding=fsdp"),
    ("dp=2 micro_batch=2 sharding=fsdp optimizer=fused", "tp=2 sp=true micro_batch=4 optimizer=fused"),
]


def _taken(built: Built, steps: Iterable[int], batches: Any) -> Built:
    for step in steps:
        batch = batches(step, 4)
        built.step(micro_batches(batch, built.plan, built.dims.data_rank))
    return built


def _moved(
    name: str, folder: str, moves: list[tuple[str, str]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Weights after four steps without a stop, and of two steps each under two plans with a checkpoint between."""
    case = LAYOUT_CASES[name]
    assert case.config is not None
    found = []
    for number, lines in enumerate(moves):
        plans = [Plan.parse(line) for line in lines]
        first, again, second = (
            build(case.config, plan, recipe=RECIPE, loss=case.loss, seed=seed)
            for plan, seed in zip((plans[0], plans[0], plans[1]), (0, 0, 7))
        )
        _taken(first, range(2), case.batches)
        assert first.ema is not None
        weights = {"weights": first.model.state_dict(), "ema": first.ema.state_dict()}
        state = {"optimizer": checkpoint.by_name(first.optimizer.state_dict())}
        settings = to_dict(RunConfig(model=case.config))
        path = Path(folder) / str(number) / "checkpoints"
        checkpoint.save(path, checkpoint.Snapshot(2, weights, state, settings))
        stored = checkpoint.find(path)
        assert stored is not None
        restore(second, stored)
        _taken(second, range(2, 4), case.batches)
        found.append((whole_weights(_taken(again, range(4), case.batches)), whole_weights(second)))
    return found


def restore(built: Built, stored: checkpoint.Checkpoint) -> None:
    """Weights, averages and the optimizer's state, as a run takes them over."""
    loaded = stored.load(
        dict(built.model.named_parameters(remove_duplicate=False)),
        rank=built.dims.rank,
        world=built.dims.size,
    )
    built.model.load_state_dict(loaded.weights["weights"])
    assert built.ema is not None
    built.ema.load_state_dict(loaded.weights["ema"])
    built.optimizer.load_state_dict(
        checkpoint.by_index(loaded.state["optimizer"], built.optimizer.state_dict())
    )


@pytest.mark.parametrize("name", ["llama", pytest.param("vit of tokens", marks=pytest.mark.sweep)])
def test_checkpoints_go_on_under_another_layout_and_export_from_any(name: str, tmp_path: Path) -> None:
    moved = pool(2).run(_moved, name, str(tmp_path), MOVES)[0]
    for (first, second), (straight, stopped) in zip(MOVES, moved):
        for key, value in straight.items():
            if first == second:
                assert torch.equal(stopped[key], value), key
            else:
                torch.testing.assert_close(stopped[key], value, rtol=1e-4, atol=1e-5)
    config = LAYOUT_CASES[name].config
    assert config is not None
    for number, (line, _) in enumerate(MOVES):
        folder = tmp_path / str(number)
        rewrite.export_model(rewrite.open_newest(folder), folder / "export", "weights")
        alone_built = build(config, Plan.parse("micro_batch=4"), recipe=RECIPE, loss=LAYOUT_CASES[name].loss)
        _taken(alone_built, range(2), LAYOUT_CASES[name].batches)
        exported = from_pretrained(folder / "export").state_dict()
        for key, value in alone_built.model.state_dict().items():
            torch.testing.assert_close(
                exported[key], value, rtol=1e-4, atol=1e-5, msg=lambda t, w=line: f"{w}: {t}"
            )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tp=3", "cannot split the model's 4 attention heads evenly; use a tp of 1, 2 or 4"),
        ("tp=4", "2 KV heads, which can be predicted but not trained yet; use a tp of 1 or 2"),
        ("tp=2 products=fp8 precision=O1", "plan.products=fp8 cannot be trained with plan.tp=2 yet"),
        ("sp=true", "plan.tp=1; use sp=false, or a larger tp"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_can(line: str, said: str) -> None:
    found = problems(Plan.parse(line), LAYOUT_CASES["llama"].config, run=True)
    assert any(said in problem for problem in found), found


def _refused() -> list[str]:
    import transformers as hf

    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 13}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=3))
    said = []
    for model in (llama, torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])):
        try:
            build(model, Plan(tp=2))
        except ConfigError as error:
            said.append(str(error))
    return said


def test_modules_that_cannot_be_split_are_refused() -> None:
    uneven, unknown = pool(2).run(_refused)[0]
    assert "cannot split the model's 3 attention heads evenly; use a tp of 1, 3" in uneven
    assert "Enrol it" in unknown
