"""What every task must hold. A new one is enrolled by one line in `ENROLLED`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from helpers.texts import TEXT, Rows, Windows
from penstock.build import build
from penstock.config.machine import cache_folder
from penstock.config.model import (
    DecoderConfig,
    DiffusionConfig,
    EncoderConfig,
    ModelConfig,
    MultimodalConfig,
    Seq2SeqConfig,
    UniversalConfig,
    ViTConfig,
)
from penstock.config.plan import Plan
from penstock.config.run import Augment, DataConfig, Recipe
from penstock.config.stack import Stack
from penstock.containers import tensors
from penstock.data import Loader
from penstock.data.source import Source, Split
from penstock.models import create
from penstock.tasks import (
    Captioning,
    Chat,
    Denoise,
    Embedding,
    ImageClassification,
    MaskedWords,
    NextToken,
    Pairs,
    Preferences,
    Sentences,
    SpanCorruption,
    Task,
    Translation,
    Universal,
)
from penstock.train.evaluate import Evaluation, evaluate

Sizes = dict[str, Any]
SIZES: Sizes = {"width": 16, "depth": 1, "heads": 2, "mlp_width": 16}


class Enrolled(NamedTuple):
    """A task with a small model and data that need nothing from outside."""

    task: Task
    model: ModelConfig
    source: Callable[[Task, ModelConfig, Split], Source]
    samples: int
    """Of the validation split."""


def _digits(task: Task, model: ModelConfig, split: Split) -> Source:
    return task.open(DataConfig(source="digits"), model, split)


def _windows(task: Task, model: ModelConfig, split: Split) -> Source:
    return Windows(TEXT, 17, stride=16, ends=50)


def _of_length(length: int) -> Callable[[Task, ModelConfig, Split], Source]:
    return lambda task, model, split: Windows(TEXT, length, ends=50)


ENCODER = EncoderConfig(sequence=16, token_types=2, **SIZES)
SEQ2SEQ = Seq2SeqConfig(sequence=16, decoder_sequence=16, encoder=Stack(**SIZES), decoder=Stack(**SIZES))
UNIVERSAL = UniversalConfig(
    sequence=16, shared=Stack(**SIZES), understanding=Stack(**SIZES), generating=Stack(**SIZES), head="both",
    token_types=2,
)  # fmt: skip
SHORT = [f"{i} + {i % 7}" for i in range(20)]
LONG = [f"a{i}b {i % 5} c"[: 2 + 5 * i % 7] for i in range(20)]


def _single(task: Task, model: ModelConfig, split: Split) -> Source:
    return Rows({"tokens": (LONG, 16)}, [i % 3 for i in range(20)], ("zero", "one", "two"))


def _pairs(task: Task, model: ModelConfig, split: Split) -> Source:
    texts = [f"{one}:{two}" for one, two in zip(SHORT, LONG, strict=True)]
    segments = [text.index(":") + 1 for text in texts]
    return Rows({"tokens": (texts, 16)}, [i / 10 for i in range(20)], extra={"segment": segments})


def _translations(task: Task, model: ModelConfig, split: Split) -> Source:
    return Rows({"source": (SHORT, 16), "target": (LONG, 16)}, ended=("source", "target"))


def _two(task: Task, model: ModelConfig, split: Split) -> Source:
    return Rows({"first": (SHORT, 16), "second": (LONG, 16)})


def _of_rows(*rows: dict[str, str]) -> Callable[[Task, ModelConfig, Split], Source]:
    def opened(task: Task, model: ModelConfig, split: Split) -> Source:
        file = cache_folder() / f"{type(task).__name__}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(map(json.dumps, rows)))
        return task.open(DataConfig(source=f"text:{file}"), model, split)

    return opened


_chats = _of_rows(*({"prompt": f"{n}+{n % 7}", "completion": str(n + n % 7)} for n in range(200)))
_preferences = _of_rows(
    *({"prompt": f"{n}+{n % 7}", "chosen": str(n + n % 7), "rejected": f"{n % 4}"} for n in range(9, 209))
)


def _far_reference() -> Any:
    """A model whose opinions differ so much from those of a fresh one that no margin is near 0."""
    model = create(replace(CHATTING, vocabulary=368))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


def _captions(task: Task, model: ModelConfig, split: Split) -> Source:
    source = task.open(DataConfig(source="captions:en,de,fr,ja"), model, split)
    source.rows, source.labels = source.rows[:40], source.labels[:40]  # type: ignore[attr-defined]
    return source


CAPTIONED = MultimodalConfig(
    image_size=8, patch_size=4, channels=1, features=8, sequence=16, writer_sequence=16, vision=Stack(**SIZES),
    text=Stack(**SIZES), writer=Stack(**SIZES),
)  # fmt: skip
CHATTING = DecoderConfig(sequence=80, **SIZES)
ENROLLED = {
    "image classification": Enrolled(
        ImageClassification(), ViTConfig(image_size=8, patch_size=4, channels=1, **SIZES), _digits, 355
    ),
    "denoise": Enrolled(
        Denoise(),
        DiffusionConfig(image_size=8, patch_size=4, channels=1, classes=10, experts=2, **SIZES),
        _digits,
        355,
    ),
    "next token": Enrolled(NextToken(), DecoderConfig(sequence=16, **SIZES), _windows, 170),
    "chat": Enrolled(Chat(), CHATTING, _chats, 3),
    "preferences": Enrolled(Preferences().beside(_far_reference()), CHATTING, _preferences, 9),
    "masked words": Enrolled(MaskedWords(), ENCODER, _of_length(14), 195),
    "sentences": Enrolled(Sentences(), ENCODER, _single, 20),
    "pairs": Enrolled(Pairs(), ENCODER, _pairs, 20),
    "span corruption": Enrolled(SpanCorruption(), SEQ2SEQ, _of_length(17), 160),
    "translation": Enrolled(Translation(), SEQ2SEQ, _translations, 20),
    "embedding": Enrolled(Embedding(), ENCODER, _two, 20),
    "captions": Enrolled(Captioning(), CAPTIONED, _captions, 40),
    "universal": Enrolled(Universal(), UNIVERSAL, _windows, 170),
}


@pytest.fixture(params=ENROLLED)
def enrolled(request: pytest.FixtureRequest) -> Enrolled:
    task, model, source, samples = ENROLLED[request.param]
    return Enrolled(task, task.fit(model, source(task, model, "train")), source, samples)


def _source(enrolled: Enrolled, split: Split) -> Source:
    return enrolled.source(enrolled.task, enrolled.model, split)


def _loader(enrolled: Enrolled, split: Split, batch: int, augment: Augment | None = None) -> Loader:
    source = _source(enrolled, split)
    prepare = enrolled.task.prepare(source, enrolled.model, augment=augment, seed=1)
    return Loader(source, prepare, batch=batch, seed=1, endless=split == "train")


def test_a_model_that_fits_the_data_is_left_as_it_is(enrolled: Enrolled) -> None:
    assert enrolled.task.fit(enrolled.model, _source(enrolled, "train")) == enrolled.model


@pytest.mark.parametrize("augment", [None, Augment(mixup=0.5, label_smoothing=0.1)])
def test_a_batch_trains(enrolled: Enrolled, augment: Augment | None) -> None:
    task, model = enrolled.task, create(enrolled.model)
    with _loader(enrolled, "train", 6, augment) as batches:
        batch = next(batches)
    assert len(batch) == 6
    assert list(tensors(batch))
    loss = task(model, batch)
    assert loss.ndim == 0
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_loss_is_made_of_the_outputs_alone(enrolled: Enrolled) -> None:
    task, model = enrolled.task, create(enrolled.model).eval()
    with _loader(enrolled, "train", 6) as batches:
        batch = next(batches)
    assert torch.equal(task.loss(model(*task.inputs(batch)), batch).sum(), task(model, batch))


def test_a_blank_sample_runs_through_the_model(enrolled: Enrolled) -> None:
    blank = enrolled.task.blank(enrolled.model, torch.device("cpu"))
    model = create(enrolled.model)
    outputs = model(*blank)
    assert all(tensor.shape[0] == 1 for tensor in (*blank, outputs) if isinstance(tensor, Tensor))
    enrolled.task.accompany(model, blank)


def test_metrics_do_not_depend_on_how_samples_are_batched(enrolled: Enrolled) -> None:
    task, model = enrolled.task, create(enrolled.model)
    found: list[Evaluation] = []
    for size in (7, enrolled.samples):
        with _loader(enrolled, "val", size) as batches:
            found.append(evaluate(task, model, batches))
    first, second = found
    assert first.samples == second.samples == enrolled.samples
    assert first.metrics == pytest.approx(second.metrics, rel=1e-5)


def test_metrics_have_names_words_and_a_form_to_store(enrolled: Enrolled) -> None:
    task = enrolled.task
    with _loader(enrolled, "val", 4) as batches:
        found = evaluate(task, create(enrolled.model), itertools.islice(batches, 2))
    metrics = found.metrics
    assert "loss" in metrics
    assert found.loss == metrics["loss"]
    assert Evaluation.of_record(found.record()) == found
    with pytest.raises(AttributeError, match=r"has no 'nothing'\. It has samples, "):
        found.nothing  # noqa: B018
    assert task.describe(metrics)
    assert "loss not finite" in task.describe({**metrics, "loss": None})
    assert task.describe_model(enrolled.model)
    assert task.unit.endswith("s")
    assert task.size_setting.startswith("model.")


def test_a_sample_is_shown_if_there_is_text(enrolled: Enrolled) -> None:
    model, source = create(enrolled.model).eval(), _source(enrolled, "val")
    with torch.no_grad():
        said = enrolled.task.sample(model, source, torch.device("cpu"))
    assert bool(said) is not isinstance(enrolled.task, ImageClassification | Denoise)


def test_a_sample_of_pairs_shows_both_texts_apart() -> None:
    task, model, make, _ = ENROLLED["pairs"]
    source = make(task, model, "val")
    with torch.no_grad():
        lines = task.sample(create(task.fit(model, source)).eval(), source, torch.device("cpu")).splitlines()
    # A row has room for 16 letters, and a colon ends the first text.
    for line, first, second in zip(lines, SHORT, LONG):
        assert line.startswith(f"{first}: | {second[: 15 - len(first)]} → ")
        assert line.endswith(")")
    assert len(lines) == 3


def test_padding_is_not_counted_among_tokens(enrolled: Enrolled) -> None:
    with _loader(enrolled, "train", 6) as batches:
        batch = next(batches)
    assert (enrolled.task.tokens(batch) > 6) is not isinstance(enrolled.task, ImageClassification | Denoise)


@pytest.mark.parametrize("name", [name for name, one in ENROLLED.items() if not one.task.compares])
def test_a_step_does_not_depend_on_how_its_samples_are_cut(name: str) -> None:
    """Vectors are compared within a micro-batch, so that a step of theirs does."""
    task, model, make, _ = ENROLLED[name]
    source = make(task, model, "train")
    enrolled = Enrolled(task, task.fit(model, source), make, 0)
    found = []
    for size in (12, 4, 1):
        built = build(enrolled.model, Plan(micro_batch=size), recipe=Recipe(clip_norm=1.0), loss=task)
        with _loader(enrolled, "train", size, Augment(label_smoothing=0.1)) as batches:
            results = [built.step([next(batches) for _ in range(12 // size)]) for _ in range(2)]
        found.append([(result.loss, result.grad_norm) for result in results])
    for got in found[1:]:
        torch.testing.assert_close(got, found[0], rtol=2e-5, atol=0.0)
