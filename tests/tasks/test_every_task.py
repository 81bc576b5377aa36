"""What every task must hold. A new one is enrolled by one line in `ENROLLED`."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.config.model import ModelConfig, ViTConfig
from penstock.config.run import Augment, DataConfig
from penstock.containers import tensors
from penstock.data import Loader
from penstock.data.source import Source
from penstock.models import create
from penstock.tasks import ImageClassification, Task
from penstock.train.evaluate import Evaluation, evaluate


class Enrolled(NamedTuple):
    """A task with a small model and data that need nothing from outside."""

    task: Task
    model: ModelConfig
    data: DataConfig


ENROLLED = {
    "image classification": Enrolled(
        ImageClassification(),
        ViTConfig(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp_width=16),
        DataConfig(source="digits"),
    ),
}


@pytest.fixture(params=ENROLLED)
def enrolled(request: pytest.FixtureRequest) -> Enrolled:
    task, model, data = ENROLLED[request.param]
    return Enrolled(task, task.fit(model, task.open(data, model, "train")), data)


def _loader(enrolled: Enrolled, split: Any, batch: int, augment: Augment | None = None) -> Loader:
    source: Source = enrolled.task.open(enrolled.data, enrolled.model, split)
    prepare = enrolled.task.prepare(source, enrolled.model, augment=augment, seed=1)
    return Loader(source, prepare, batch=batch, seed=1, endless=split == "train")


def test_a_model_that_fits_the_data_is_left_as_it_is(enrolled: Enrolled) -> None:
    source = enrolled.task.open(enrolled.data, enrolled.model, "train")
    assert enrolled.task.fit(enrolled.model, source) == enrolled.model


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
    assert torch.equal(task.loss(model(*task.inputs(batch)), batch), task(model, batch))


def test_a_blank_sample_runs_through_the_model(enrolled: Enrolled) -> None:
    blank = enrolled.task.blank(enrolled.model, torch.device("cpu"))
    outputs = create(enrolled.model)(*blank)
    assert all(tensor.shape[0] == 1 for tensor in (*blank, outputs) if isinstance(tensor, Tensor))


def test_metrics_do_not_depend_on_how_samples_are_batched(enrolled: Enrolled) -> None:
    task, model = enrolled.task, create(enrolled.model)
    found: list[Evaluation] = []
    for size in (7, 355):
        with _loader(enrolled, "val", size) as batches:
            found.append(evaluate(task, model, batches))
    first, second = found
    assert first.samples == second.samples == 355
    assert first.metrics == pytest.approx(second.metrics, rel=1e-5)


def test_metrics_have_names_words_and_a_form_to_store(enrolled: Enrolled) -> None:
    task = enrolled.task
    metrics = task.metrics(4, dict.fromkeys(task.sums, 2.0))
    found = Evaluation(4, metrics)
    assert "loss" in metrics
    assert found.loss == metrics["loss"]
    assert Evaluation.of_record(found.record()) == found
    with pytest.raises(AttributeError, match=r"has no 'nothing'\. It has samples, "):
        found.nothing  # noqa: B018
    assert task.describe(metrics)
    assert task.describe({**metrics, "loss": None})
    assert task.describe_model(enrolled.model)
    assert task.unit.endswith("s")
    assert task.size_setting.startswith("model.")
