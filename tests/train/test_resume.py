"""What a resumed run may change, and what an output folder keeps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import numbered
from penstock import checkpoint
from penstock.checkpoint import Checkpoint
from penstock.config.plan import Plan, effect_of
from penstock.config.run import DataConfig, Recipe, RunConfig
from penstock.errors import CheckpointError, ConfigError
from penstock.train.resume import changes, restore_newest, set_aside

BASE = RunConfig(plan=Plan(micro_batch=8, accumulate=2))


def test_what_the_arithmetic_does_not_depend_on_may_change() -> None:
    assert changes(BASE, BASE) == []
    other = replace(
        BASE, output="elsewhere", keep=5, log_every=1, checkpoint_every=7, device="cpu",
        data=DataConfig(workers=2),
    )  # fmt: skip
    assert changes(BASE, other) == []


def test_another_recipe_is_refused_with_both_values() -> None:
    other = replace(BASE, seed=1, recipe=Recipe(lr=0.5, lr_width=64))
    with pytest.raises(ConfigError) as caught:
        changes(BASE, other)
    text = str(caught.value)
    assert "recipe.lr is 0.5, but the checkpoint was made with 0.001" in text
    assert "recipe.lr_width is 64, but the checkpoint was made with None" in text
    assert "seed is 1, but the checkpoint was made with 0" in text
    assert "--no-resume" in text


def test_another_split_of_the_same_batch_is_allowed_and_said() -> None:
    other = replace(BASE, plan=Plan(micro_batch=4, accumulate=4, optimizer="fused"))
    said = changes(BASE, other)
    assert len(said) == 3
    assert "plan.optimizer was 'loop' and is now 'fused'." in said


def test_another_global_batch_and_another_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.micro_batch is 4"):
        changes(BASE, replace(BASE, plan=Plan(micro_batch=4, accumulate=2)))
    with pytest.raises(ConfigError, match=r"plan\.precision is 'O3'"):
        changes(BASE, replace(BASE, plan=replace(BASE.plan, precision="O3")))


@pytest.mark.parametrize("name", [field.name for field in fields(Plan)])
def test_what_a_field_of_the_plan_does_to_results_decides_whether_it_may_change(name: str) -> None:
    others: dict[str, Any] = {
        "precision": "O3", "dtype": "fp16", "norms": "half", "matmul": "medium",
        "optimizer": "fused", "token_order": "batch_second", "attention": "plain", "loss": "chunked",
        "padding": "remove", "compile": "blocks", "host_memory": "keep", "micro_batch": 4, "accumulate": 4,
        "sharding": "fsdp", "sp": True, "schedule": "gpipe", "cp_exchange": "gather", "recompute": "full",
        "recompute_every": 2.0, "budget": 1.0, "products": "fp8", "algorithm": "sgd", "gradients": "half",
        "offload": "optimizer", "overlap": False, "tp_overlap": "all", "experts": "loop",
        "gather": "products",
        "fuse": ("auto",),
    }  # fmt: skip
    other = replace(BASE, plan=replace(BASE.plan, **{name: others.get(name, 2)}))
    effect = effect_of(name, others.get(name))
    if effect in ("batch", "model"):
        with pytest.raises(ConfigError, match=rf"plan\.{name} is (.|\n)*--no-resume"):
            changes(BASE, other)
    else:
        assert len(changes(BASE, other)) == (effect != "nothing")


def test_half_width_goes_on_where_a_checkpoint_holds_the_same_types() -> None:
    for line, refused in (("precision=O1", False), ("precision=O1 dtype=fp16", True), ("precision=O2", True)):
        other = replace(BASE, plan=Plan.parse(f"micro_batch=8 accumulate=2 {line}"))
        with pytest.raises(ConfigError, match="precision") if refused else nullcontext():
            assert "plan.precision" in changes(BASE, other)[0]


def test_what_was_there_is_kept_under_a_free_name(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(content)
        set_aside(tmp_path / "metrics.jsonl")
    set_aside(tmp_path / "absent")
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {"metrics.before-1.jsonl": "first", "metrics.before-2.jsonl": "second"}


class _State:
    """A run's state that takes the checkpoints of some steps only."""

    def __init__(self, *fits: int) -> None:
        self.fits = fits
        self.tried: list[int] = []

    def restore(self, stored: Checkpoint) -> None:
        self.tried.append(stored.step)
        if stored.step not in self.fits:
            raise CheckpointError(f"Step {stored.step} is no state of this run.")


def _three_steps(folder: Path) -> Checkpoint:
    for step in (1, 2, 3):
        checkpoint.save(folder, numbered(step), keep=3)
    found = checkpoint.find(folder)
    assert found is not None
    return found


def test_a_state_of_another_run_is_passed_over_for_the_newest_that_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, state = _three_steps(tmp_path), _State(1)
    assert restore_newest(state, stored).step == 1  # type: ignore[arg-type]
    assert state.tried == [3, 2, 1]
    assert "Step 3 is no state of this run. The checkpoint before it is tried." in caplog.text
    assert checkpoint.steps(tmp_path) == [1]
    assert (tmp_path / "step-3.refused").is_dir()
    assert (tmp_path / "latest").read_text() == "step-1\n"


def test_a_state_that_fits_moves_nothing(tmp_path: Path) -> None:
    assert restore_newest(_State(3), _three_steps(tmp_path)).step == 3  # type: ignore[arg-type]
    assert checkpoint.steps(tmp_path) == [1, 2, 3]


def test_where_no_state_fits_the_oldest_refusal_is_raised_and_all_stay(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Step 1 is no state"):
        restore_newest(_State(), _three_steps(tmp_path))  # type: ignore[arg-type]
    assert checkpoint.steps(tmp_path) == [1, 2, 3]
