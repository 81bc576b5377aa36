"""What every family of models must hold under every Plan. A new one is enrolled in `helpers.families`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.equality import Trained, alone, trained
from helpers.families import ENROLLED, Enrolled, batches, loss
from helpers.spawn import spawn
from penstock import checkpoint
from penstock.build import Built, build
from penstock.checkpoint import rewrite
from penstock.config.load import to_dict
from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.models import create

# Keys' biases have no gradient but rounding, which Adam would divide by its own size: one step is then anybody's.
RECIPE = Recipe(lr=3e-3, eps=1e-4, ema_decay=0.5)
LEVELS = ["precision=O0", "precision=O1", "precision=O2 optimizer=fused", "precision=O3 optimizer=contiguous",
          "precision=O1 dtype=fp16 optimizer=fused", "precision=O2 dtype=fp16 optimizer=contiguous"]  # fmt: skip
SAME = ["recompute=full", "recompute=operators", "recompute=early recompute_every=2", "optimizer=contiguous",
        "attention=plain", "attention=auto", "token_order=batch_second", "matmul=medium"]  # fmt: skip


@pytest.fixture(params=ENROLLED)
def enrolled(request: pytest.FixtureRequest) -> Enrolled:
    return ENROLLED[request.param]


def _stepped(
    enrolled: Enrolled, line: str, steps: int, *, fixed: bool = False, **options: Any
) -> tuple[Built, list[float]]:
    built = build(enrolled.config, Plan.parse(f"micro_batch=4 {line}"), recipe=RECIPE, loss=loss, **options)
    return built, [
        float(built.step([batches(enrolled.config, 0 if fixed else i, 4)]).loss) for i in range(steps)
    ]


@pytest.mark.parametrize("line", LEVELS)
def test_every_level_learns(enrolled: Enrolled, line: str) -> None:
    built, losses = _stepped(enrolled, line, 12, fixed=True)
    assert losses[-1] < losses[0] - 0.05, losses
    if built.scaler is not None:
        assert built.scaler.overflows < 6
    _, exact = _stepped(enrolled, "baseline", 1, fixed=True)
    assert losses[0] == pytest.approx(exact[0], rel=3e-2)


@pytest.mark.parametrize("line", SAME)
def test_what_changes_no_result_changes_none(enrolled: Enrolled, line: str) -> None:
    expected, losses = _stepped(enrolled, "baseline", 3)
    built, got = _stepped(enrolled, line, 3)
    assert got == pytest.approx(losses, rel=1e-5)
    wanted = expected.model.state_dict()
    for name, tensor in built.model.state_dict().items():
        torch.testing.assert_close(
            tensor, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", "whole"])
def test_compiled_models_learn_the_same(enrolled: Enrolled, compiled: str) -> None:
    _, losses = _stepped(enrolled, "baseline", 3)
    _, got = _stepped(enrolled, f"compile={compiled}", 3)
    assert got == pytest.approx(losses, rel=1e-4)


def _ranks(names: list[str], lines: list[str]) -> list[tuple[str, Trained, Trained]]:
    found = []
    for name in names:
        config = ENROLLED[name].config
        options: dict[str, Any] = {
            "steps": 3,
            "recipe": RECIPE,
            "batches": partial(batches, config),
            "loss": loss,
        }
        for line in lines:
            plan = Plan.parse(line)
            got = trained(config, plan, **options)
            found.append((f"{name}: {line}", got, trained(config, alone(plan), **options)))
    return found


def _hold(world: int, names: list[str], lines: list[str]) -> None:
    for said, got, expected in spawn(_ranks, world, names, lines, timeout=280)[0]:
        assert got.weights.keys() == expected.weights.keys()
        torch.testing.assert_close(
            torch.tensor(got.losses), torch.tensor(expected.losses), rtol=1e-4, atol=1e-5
        )
        for name, value in expected.weights.items():
            # Ranks add up gradients in another order; Adam divides by their size.
            torch.testing.assert_close(
                got.weights[name], value, rtol=1e-3, atol=2e-5, msg=lambda t, n=name, s=said: f"{s}: {n}: {t}"
            )


# The loss of a padded batch is a mean over other numbers of words on each rank; here every sample has as many.
@pytest.mark.alone
def test_two_ranks_learn_what_one_process_does() -> None:
    _hold(
        2,
        list(ENROLLED),
        ["dp=2 micro_batch=2 sharding=fsdp recompute=full", "dp=2 micro_batch=2 accumulate=2"],
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ENROLLED)
def test_every_way_to_share_out_learns_the_same(name: str) -> None:
    shardings = ["zero1 optimizer=contiguous", "zero2 accumulate=2", "hsdp shard=1", "fsdp offload=optimizer"]
    lines = [f"dp=2 micro_batch=2 sharding={sharding}" for sharding in shardings]
    _hold(2, [name], lines)
    _hold(4, [name], ["dp=4 micro_batch=1 sharding=hsdp shard=2"])


def _saved(enrolled: Enrolled, folder: Path, *, steps: int = 2) -> Built:
    """A checkpoint after a few steps, as a run saves it."""
    built, _ = _stepped(enrolled, "baseline", steps)
    assert built.ema is not None
    weights = {"weights": built.model.state_dict(), "ema": built.ema.state_dict()}
    state = {"optimizer": checkpoint.by_name(built.optimizer.state_dict())}
    settings = to_dict(RunConfig(model=enrolled.config))
    checkpoint.save(folder / "checkpoints", checkpoint.Snapshot(steps, weights, state, settings))
    return built


def test_a_model_goes_on_from_its_checkpoint_bit_for_bit(enrolled: Enrolled, tmp_path: Path) -> None:
    built = _saved(enrolled, tmp_path)
    stored = checkpoint.find(tmp_path / "checkpoints")
    assert stored is not None
    again, _ = _stepped(enrolled, "baseline", 0, seed=7)
    found = stored.load(dict(again.model.named_parameters(remove_duplicate=False)))
    again.model.load_state_dict(found.weights["weights"])
    state = checkpoint.by_index(found.state["optimizer"], again.optimizer.state_dict())
    again.optimizer.load_state_dict(state)
    for step in (2, 3):
        batch = batches(enrolled.config, step, 4)
        assert torch.equal(built.step([batch]).loss, again.step([batch]).loss)
    for one, other in zip(built.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("which", ["weights", "ema"])
def test_an_export_is_the_model_and_transformers_reads_it(
    enrolled: Enrolled, which: str, tmp_path: Path
) -> None:
    from penstock.models.convert import from_pretrained

    built = _saved(enrolled, tmp_path)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "words.txt").write_text("a tokenizer's file")
    (tmp_path / "tokenizer" / "config.json").write_text('{"pad_token_id": 3}')
    rewrite.export_model(rewrite.open_newest(tmp_path), tmp_path / "export", which)
    assert (tmp_path / "export" / "words.txt").read_text() == "a tokenizer's file"
    assert '"pad_token_id": 3' in (tmp_path / "export" / "config.json").read_text()
    *arguments, _ = batches(enrolled.config, 9, 2)
    assert built.ema is not None
    model = built.model.eval()
    with torch.no_grad():
        if which == "ema":
            with built.ema.swapped():
                expected = model(*arguments)
        else:
            expected = model(*arguments)
        assert torch.equal(from_pretrained(tmp_path / "export").eval()(*arguments), expected)
        if enrolled.reader is None:
            return
        transformers = pytest.importorskip("transformers")
        theirs = getattr(transformers, enrolled.reader).from_pretrained(tmp_path / "export").eval()
        given: dict[str, Any] = dict(zip(_names(enrolled), arguments))
        lengths = given.pop("lengths", None)
        if lengths is not None:
            given["attention_mask"] = (torch.arange(arguments[0].shape[1]) < lengths[:, None]).long()
        torch.testing.assert_close(theirs(**given).logits, expected, rtol=1e-4, atol=1e-5)


def _names(enrolled: Enrolled) -> tuple[str, ...]:
    """What transformers calls the model's arguments."""
    return {
        "vit": ("pixel_values",),
        "decoder": ("input_ids",),
        "encoder": ("input_ids", "lengths"),
        "seq2seq": ("input_ids", "decoder_input_ids", "lengths"),
    }[enrolled.config.family]


def test_weights_start_a_run_of_the_same_family(enrolled: Enrolled, tmp_path: Path) -> None:
    """As `--from` does: all weights are taken, and what learns anew is said."""
    from penstock.models.convert import load_weights, model_in, save_pretrained

    torch.manual_seed(3)
    model = create(enrolled.config)
    save_pretrained(model, tmp_path)
    if enrolled.config.family != "vit":
        assert create(model_in(tmp_path)).state_dict().keys() == model.state_dict().keys()  # type: ignore[arg-type]
    other = create(enrolled.config)
    loaded = load_weights(other, tmp_path, new_head=True)
    assert loaded.drawn == ()
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])
