"""Tasks whose ranks must meet: negatives of all ranks, and evaluations that generate with sharded weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.spawn import spawn
from helpers.texts import Rows
from penstock.build import build
from penstock.config.model import EncoderConfig, MultimodalConfig, Seq2SeqConfig
from penstock.config.plan import Plan
from penstock.config.run import DataConfig, Recipe
from penstock.config.stack import Stack
from penstock.data import Loader
from penstock.parallel import ALONE, dims_of
from penstock.tasks import Captioning, Embedding, Task, Translation, peers
from penstock.train.evaluate import evaluate

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_width": 32, "qkv_bias": False}
ENCODER = EncoderConfig(vocabulary=64, sequence=12, head="none", **SIZES)
SEQ2SEQ = Seq2SeqConfig(
    vocabulary=64, sequence=12, decoder_sequence=12, encoder=Stack(**SIZES), decoder=Stack(**SIZES)
)
CAPTIONED = MultimodalConfig(
    image_size=8, patch_size=4, channels=1, features=8, vocabulary=368, sequence=16, writer_sequence=16,
    vision=Stack(**SIZES), text=Stack(**SIZES), writer=Stack(**SIZES),
)  # fmt: skip
FIRST = [f"{i} {i % 5}" for i in range(22)]
SECOND = [f"{i}b{i % 3}" for i in range(22)]


def _train(task: Task, model: Any, source: Any, line: str) -> dict[str, float]:
    plan = Plan.parse(line)
    dims = dims_of(plan, "cpu") if plan.gpus > 1 else ALONE
    recipe = Recipe(lr=1e-3, eps=1e-4)
    built = build(model, plan, recipe=recipe, loss=task, dims=dims)
    where = {"rank": dims.data_rank, "world": dims.data_world, "seed": 1}
    losses = []
    with Loader(source, task.prepare(source, model), batch=plan.micro_batch, **where) as batches:
        for _ in range(3):
            loss = built.step([next(batches) for _ in range(plan.accumulate)]).loss.clone()
            if plan.dp > 1:
                torch.distributed.all_reduce(loss)
            losses.append(float(loss) / plan.dp)
    # Of 22 pairs, so that one rank has a batch more than the other.
    loader = Loader(source, task.prepare(source, model), batch=4, endless=False, **where)
    blank = task.blank(model, torch.device("cpu"))
    with loader, built.inference():
        rounds = -(-len(source) // (4 * dims.data_world))
        found = evaluate(task, built.model, loader, dims=dims, rounds=rounds, blank=blank)
        task.sample(built.model, source, torch.device("cpu"))
    return {**found.metrics, **{f"step {i}": loss for i, loss in enumerate(losses)}}


def embed(line: str) -> dict[str, float]:
    return _train(Embedding(), ENCODER, Rows({"first": (FIRST, 12), "second": (SECOND, 12)}), line)


def translate(line: str) -> dict[str, float]:
    source = Rows({"source": (FIRST, 12), "target": (SECOND, 12)}, ended=("source", "target"))
    return _train(Translation(), replace(SEQ2SEQ), source, line)


def caption(lines: list[tuple[str, str]], chunk: int = 4096) -> list[dict[str, float]]:
    """Training with each form of contrast and each Plan, and logits of so many vectors at a time. 22 of the samples, in
    four languages."""
    found = []
    peers.CHUNK = chunk
    for form, line in lines:
        model = replace(CAPTIONED, contrast=form)
        source: Any = Captioning().open(DataConfig(source="captions:en,de,fr,ja"), model, "val")
        source.rows, source.labels = source.rows[:22], source.labels[:22]
        found.append(_train(Captioning(), model, source, line))
    return found


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_negatives_are_gathered_with_their_gradients(sharding: str) -> None:
    found = spawn(embed, 2, f"micro_batch=4 dp=2 sharding={sharding}")
    expected = embed("micro_batch=8")
    for rank in found:
        assert rank == pytest.approx(expected, rel=1e-4)


def test_sharded_ranks_translate_together() -> None:
    found = spawn(translate, 2, "micro_batch=4 dp=2 sharding=fsdp")
    assert found[0] == found[1]
    assert found[0] == pytest.approx(translate("micro_batch=8"), rel=1e-5)


@pytest.mark.sweep
def test_images_and_texts_are_compared_over_ranks_under_every_layout() -> None:
    """The contrast of all ranks' samples, captions with sharded weights, and several runs cut into stages."""
    lines = [
        ("softmax", "micro_batch=4 dp=2"), ("sigmoid", "micro_batch=4 dp=2 sharding=fsdp"),
        ("softmax", "micro_batch=8 tp=2"), ("softmax", "micro_batch=8 tp=2 sp=true"), ("sigmoid", "micro_batch=8 pp=2"),
    ]  # fmt: skip
    expected = caption([(form, "micro_batch=8") for form in ("softmax", "sigmoid")])
    for rank in spawn(caption, 2, lines, timeout=280):
        for (form, line), got in zip(lines, rank, strict=True):
            assert got == pytest.approx(expected[form == "sigmoid"], rel=2e-4, abs=1e-6), line


@pytest.mark.parametrize("form", ["softmax", pytest.param("sigmoid", marks=pytest.mark.sweep)])
def test_vectors_of_all_ranks_are_compared_in_chunks(form: str) -> None:
    """Three of the eight vectors at a time, as if there were too many for one."""
    expected = caption([(form, "micro_batch=8")])
    for rank in spawn(caption, 2, [(form, "micro_batch=4 dp=2")], 3):
        assert rank[0] == pytest.approx(expected[0], rel=2e-4, abs=1e-6)
