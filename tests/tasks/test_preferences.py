"""Preferences: that loss and gradients are those computed by hand, however steps are cut and
under every precision, and that a reference is the model's own beginning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.spawn import spawn
from penstock.build import Built, build
from penstock.config.model import DecoderConfig
from penstock.config.plan import Plan
from penstock.config.recipes import require_startable
from penstock.config.run import DataConfig, Lora, Recipe, RunConfig
from penstock.data.text.chat import PLAIN
from penstock.data.text.conversations import open_preferences
from penstock.data.text.tokenizers import Bytes
from penstock.errors import ConfigError, DataError
from penstock.models import create
from penstock.models.convert import from_pretrained, save_pretrained
from penstock.parallel import ALONE, dims_of
from penstock.tasks import NextToken, Preferences, TextBatch
from penstock.tasks.preferences import prepare_pairs
from penstock.tasks.text import first_samples

GPT = DecoderConfig(vocabulary=40, sequence=12, width=16, depth=2, heads=2, mlp_width=32)
BETA = 0.5


def _file(folder: Path, rows: list[dict[str, Any]]) -> DataConfig:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(source=f"text:{path}")


def test_batches_hold_both_texts_of_each_pair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{n}?" * (1 + n % 2), "chosen": f"{n}", "rejected": f"-{n}" * 3} for n in range(40)]
    rows += [{"prompt": "far", "chosen": "yes", "rejected": "x" * 90 + "y"}] * 20
    rows += [{"prompt": "z" * 70, "chosen": "left", "rejected": "out"}] * 20
    tokenizer = Bytes()
    tokenizer.chat_template = PLAIN
    source = open_preferences(_file(tmp_path, rows), tokenizer, "train", length=65)
    assert source.lengths is not None
    assert source.lengths.max() == 65
    assert "cut at their end" in caplog.text
    batch = prepare_pairs(
        first_samples(source, len(source)), torch.device("cpu"), arguments=GPT.graph.arguments
    )
    given = dict(zip(GPT.graph.arguments, batch.inputs, strict=True))
    tokens, targets = given["tokens"], given["targets"]
    assert given["by_sample"] is True
    assert len(tokens) == 2 * len(batch)
    answers = [tokenizer.decode(row[row != -100].tolist()) for row in targets]
    pairs = set(zip(answers[::2], answers[1::2]))
    assert pairs <= {(f"{n}", f"-{n}" * 3) for n in range(40)} | {("yes", max(answers, key=len))}
    assert len(pairs) > 20
    assert max(answers, key=len).strip("x") == ""  # its end is cut off
    assert batch.tokens == int(np.sum(first_samples(source, len(source)).samples["length"].numpy() - 1))
    with pytest.raises(DataError, match="no conversation with an answer within its first 12 tokens"):
        open_preferences(_file(tmp_path, rows), tokenizer, "train", length=12)
    with pytest.raises(DataError, match="no known columns of chosen and rejected"):
        Preferences().open(_file(tmp_path, [{"a": "b"}]), replace(GPT, vocabulary=368), "train")
    with pytest.raises(ConfigError, match="has no built-in conversations"):
        Preferences().open(DataConfig(), GPT, "train")


def _batch(pairs: int = 3, seed: int = 0) -> TextBatch:
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 40, (2 * pairs, 12), generator=g) for _ in range(2))
    targets[:, : 2 + seed % 3] = -100
    targets[1::2, 9:] = -100
    given = {"tokens": tokens, "targets": targets, "by_sample": True}
    return TextBatch(
        inputs=tuple(given.get(name) for name in GPT.graph.arguments),
        ids=np.arange(pairs, dtype=np.int64),
        tokens=24 * pairs,
    )


def _weights(folder: Path, scale: float = 2.0) -> str:
    """A folder of weights that are large enough to have an opinion."""
    torch.manual_seed(7)
    model = create(GPT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    save_pretrained(model, folder)
    return str(folder)


def _by_hand(model: nn.Module, reference: nn.Module, batch: TextBatch) -> tuple[Tensor, Tensor]:
    """Loss and margins, of all logits, by the words of the paper."""
    tokens, targets = batch.inputs[0], batch.inputs[2]

    def log_probability(policy: nn.Module) -> Tensor:
        logs = policy(tokens).log_softmax(-1)
        of_targets = logs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return of_targets.where(targets != -100, 0.0).sum(1)

    ratios = log_probability(model) - log_probability(reference).detach()
    margins = BETA * (ratios[0::2] - ratios[1::2])
    return torch.log(1 + torch.exp(-margins)).mean(), margins.detach()


def test_loss_gradients_and_metrics_are_those_computed_by_hand(tmp_path: Path) -> None:
    task = Preferences(_weights(tmp_path / "weights"))
    built = build(GPT, Plan(), recipe=Recipe(preference_beta=BETA), loss=task, seed=3)
    batch, used = _batch(), built.loss
    assert isinstance(used, Preferences)
    reference = from_pretrained(tmp_path / "weights").eval()
    expected, margins = _by_hand(built.model, reference, batch)
    weights = list(built.model.parameters())
    gradients = torch.autograd.grad(expected, weights)
    expected = expected.detach()
    assert abs(float(expected) - 0.6931) > 0.01
    loss = used(built.model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=0.0)
    for parameter, gradient in zip(weights, gradients, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - gradient).norm() <= 2e-6 * gradient.norm()
    with torch.no_grad():
        sums = used.assess(built.model, batch).tolist()
    metrics = used.metrics(len(batch), sums)
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["margin"] == pytest.approx(float(margins.mean()), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    # Nothing of the reference is in the model, and it does not learn.
    assert built.model.state_dict().keys() == create(GPT).state_dict().keys()
    assert used.reference is not None
    assert not any(p.requires_grad for p in used.reference.parameters())
    assert task.reference is None


def _steps(folder: str, line: str, rank: int | None = None) -> list[float]:
    """Losses of two steps and sums over the weights after them, of this rank's batches among four a step."""
    plan = Plan.parse(line)
    dims = dims_of(plan, "cpu") if plan.dp > 1 else ALONE
    recipe = Recipe(preference_beta=BETA, clip_norm=None, eps=1e-3, lr=1e-2)
    built = build(GPT, plan, recipe=recipe, loss=Preferences(folder), dims=dims)
    losses = []
    for step in range(2):
        # Micro-batches of several sizes: the mean is over pairs, whatever rank they are on.
        batches = [_batch(2 + number, seed=4 * step + number) for number in range(4)]
        loss = built.step(batches[dims.data_rank :: plan.dp]).loss.clone()
        if plan.dp > 1:
            torch.distributed.all_reduce(loss)
        losses.append(float(loss) / plan.dp)
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in built.model.state_dict().items()
    }
    return [*losses, *(float(value.double().norm()) for value in state.values())]


def _over_ranks(folder: str) -> list[list[float]]:
    return [_steps(folder, f"dp=2 accumulate=2 sharding={sharding}") for sharding in ("ddp", "fsdp")]


def test_steps_are_the_same_over_ranks(tmp_path: Path) -> None:
    folder = _weights(tmp_path / "weights")
    alone = _steps(folder, "accumulate=4")
    for rank in spawn(_over_ranks, 2, folder):
        for values in rank:
            assert values == pytest.approx(alone, rel=1e-4)


def _started(folder: str, line: str, **recipe: Any) -> Built:
    """A model that starts from the weights of the reference, as a run does."""
    from penstock.models.convert import load_weights

    task = Preferences(folder)
    built = build(
        GPT, Plan.parse(line), recipe=Recipe(preference_beta=BETA, eps=1e-4, **recipe), loss=task, seed=3
    )
    load_weights(built.model, folder)
    return built


@pytest.mark.parametrize(
    "line",
    [
        "baseline", "precision=O1", "precision=O2", "precision=O3", "precision=O1 products=int8_all",
        "precision=O1 dtype=fp16 optimizer=fused", "attention=math recompute=full loss=chunked",
    ],
)  # fmt: skip
def test_margins_begin_at_zero_under_every_precision(line: str, tmp_path: Path) -> None:
    """The reference rounds as the model does; a copy in another type would see differences where there are none."""
    folder = _weights(tmp_path / "weights")
    # The usual scale of fp16 would skip the first steps.
    scale = 16.0 if "fp16" in line else None
    built, exact = (_started(folder, each, lr=1e-2, loss_scale=scale) for each in (line, "baseline"))
    for step in range(3):
        batch = _batch(seed=step)
        assert isinstance(built.loss, Preferences)
        with built.inference():
            margins = built.loss.margins(built.model(*batch.inputs), batch)
        found, expected = (float(each.step([batch]).loss) for each in (built, exact))
        if step == 0:
            assert not margins.any()
            assert found == pytest.approx(0.693147, abs=1e-5)
        # 8 bits of products; measured 0.04 of losses about 1.
        assert found == pytest.approx(expected, abs=0.15)


def test_adapters_learn_beside_the_weights_they_began_with(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    built = _started(_weights(tmp_path / "weights"), "", lora=Lora(rank=2), lr=1e-2)
    losses = [float(built.step([_batch()]).loss) for _ in range(6)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("line", ["pp=2", "tp=2", "cp=2", "compile=whole"])
def test_plans_that_split_the_model_are_refused(line: str) -> None:
    with pytest.raises(ConfigError, match=r"task=preferences"):
        build(GPT, Plan.parse(line), loss=Preferences("anywhere"))


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name them with --from"):
        build(GPT, Plan(), loss=Preferences())
    with pytest.raises(ConfigError, match=r"name them with --from"):
        build(nn.Linear(2, 2), Plan(), loss=Preferences("anywhere"))
    with pytest.raises(ConfigError, match=r"name them with --from"):
        require_startable(RunConfig(model=GPT, task="preferences"))
    with pytest.raises(ConfigError, match=r"in place of a recipe\.teacher"):
        build(GPT, Plan(), recipe=Recipe(teacher="anywhere"), loss=Preferences("anywhere"))
    with pytest.raises(ConfigError, match=r"only task=preferences uses it"):
        build(GPT, Plan(), recipe=Recipe(preference_beta=0.2), loss=NextToken())
    with pytest.raises(ConfigError, match="started from, but there are none"):
        Preferences()(create(GPT), _batch())
    folder = _weights(tmp_path / "weights")
    with pytest.raises(ConfigError, match="decoder"):
        build(replace(GPT, depth=3), Plan(), loss=Preferences(folder))
