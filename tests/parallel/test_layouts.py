"""The sweep: every family under every layout learns what one process does. A model is enrolled in `helpers.layouts`, a
layout by a line below. Ranks are started once for all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.equality import Close, Job, Trained, beside_one, goes_on_elsewhere, hold, take_steps
from helpers.layouts import LAYOUT_CASES, Case
from helpers.spawn import pool
from helpers.sweeps import sweep
from penstock.build import build
from penstock.checkpoint import rewrite
from penstock.config.plan import Plan
from penstock.config.rules import problems
from penstock.config.run import Recipe
from penstock.errors import ConfigError
from penstock.models.convert import from_pretrained

# Keys' biases have no gradient but rounding, which Adam would divide by its own size: one step is then anybody's.
RECIPE = Recipe(lr=3e-3, eps=1e-4, clip_norm=0.5, ema_decay=0.5)
TENSOR = ["tp=2", "tp=2 sp=true"]
STEPS = 8


def _compared(cases: list[tuple[str, str]], steps: int, double: bool) -> list[tuple[str, Trained, Trained]]:
    """Each case is a model's name and a plan's line."""
    found, known = [], dict[tuple[str, Plan], Trained]()
    for name, line in cases:
        case = LAYOUT_CASES[name]
        words = case.config is not None and case.config.graph.words is not None
        recipe = replace(RECIPE, z_loss=0.01 * words, lr_width=8 if double else None)
        options: dict[str, Any] = {
            "steps": steps, "recipe": recipe, "batches": case.batches, "loss": case.loss, "double": double,
        }  # fmt: skip
        made = partial(_made, case, double)
        found.append(beside_one(f"{name}: {line}", made, Plan.parse(line), known, **options))
    return found


def _made(case: Case, double: bool) -> nn.Module:
    torch.manual_seed(0)
    return case.make().double() if double else case.make()


def _hold(world: int, cases: Iterable[tuple[str, str]], *, steps: int, double: bool = False) -> None:
    for said, got, expected in pool(world).run(_compared, list(cases), steps, double, timeout=250)[0]:
        if double:
            hold(said, got, expected, weights=Close(1e-7, 1e-13, 0.0), figures=Close(1e-7, 1e-5))
        elif "precision=O" in said:
            # Ranks add up half products in another order. A bias that was 0 differed by up to 6 %, for Adam divides
            # gradients by their rounding; in two families by 11.5 %, in gpt-oss of one process with itself too.
            weights = Close(0.15 if "gpt-oss" in said or "alibi" in said else 0.1, 0.0, RECIPE.lr * steps)
            hold(said, got, expected, weights=weights, figures=Close(3e-2, 1e-5))
        else:
            hold(said, got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("turn", sweep(range(3), [0]))
def test_every_family_learns_the_same_with_split_layers(turn: int) -> None:
    """A third of the families at a time."""
    cases = [(name, f"{line} micro_batch=2") for name in [*LAYOUT_CASES][turn::3] for line in TENSOR]
    _hold(2, cases, steps=2, double=True)


@pytest.mark.slow
def test_of_a_split_table_only_the_row_of_padding_gets_no_gradient() -> None:
    _hold(2, [("transformers' marian", "tp=2 micro_batch=2")], steps=4, double=True)


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
    cases = [("llama", SHARED[0]), ("vit pooled", SHARED[1]), ("transformers' gpt2", SHARED[3])]
    _hold(4, cases, steps=3, double=True)


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
    if getattr(LAYOUT_CASES[name].config, "experts", 0):  # near ties choose other experts in bf16 throughout
        chosen = tuple(
            f"{line} dtype=fp16" if "O3" in line and "dtype" not in line else line for line in chosen
        )
    # Two steps: by the fourth, one process differs from itself by 5 % with other micro-batches in half types (Gemma).
    _hold(2, [(name, line) for line in chosen], steps=2)
    halves = {"vit of tokens": 0, "llama": 1, "t5": 0, "transformers' bert": 1}
    if name in halves:  # one of each kind: four ranks take longest
        _hold(4, [(name, line) for line in SHARED[halves[name] :: 2]], steps=3)


MOVES = [
    ("tp=2 sp=true micro_batch=4", "tp=2 sp=true micro_batch=4"),
    ("tp=2 micro_batch=4 optimizer=contiguous", "dp=2 micro_batch=2 sharding=fsdp"),
    ("dp=2 micro_batch=2 sharding=fsdp optimizer=fused", "tp=2 sp=true micro_batch=4 optimizer=fused"),
]


@pytest.mark.parametrize("name", ["llama", pytest.param("vit of tokens", marks=pytest.mark.sweep)])
def test_checkpoints_go_on_under_another_layout_and_export_from_any(name: str, tmp_path: Path) -> None:
    case = LAYOUT_CASES[name]
    assert case.config is not None
    job = Job(config=case.config, recipe=RECIPE, loss=case.loss, double=False)
    plain, close = job.built("micro_batch=4"), Close(1e-4, 1e-5)
    take_steps(plain, range(2), job.batches, Trained())
    for number, (before, after) in enumerate(MOVES):
        folder = tmp_path / str(number)
        goes_on_elsewhere(job, before, after, folder / "checkpoints", close)
        rewrite.export_model(rewrite.open_newest(folder), folder / "export", "weights")
        exported = from_pretrained(folder / "export").state_dict()
        for key, value in plain.model.state_dict().items():
            close.hold(f"{before}: {key}", exported[key], value)


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
