"""The card of an export says what a run was, in the hub's form."""

from __future__ import annotations

import dataclasses

import yaml

from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.run import Recipe, RunConfig
from penstock.train.card import card
from penstock.train.evaluate import Evaluation

CONFIG = RunConfig(
    model=PRESETS["vit-digits"],
    plan=Plan.parse("precision=O1 micro_batch=64"),
    recipe=Recipe(lr=2e-3, freeze=("a|b",)),
)
EVALUATION = Evaluation(355, {"top1": 0.975, "top5": 1.0, "loss": 0.123})


def made(config: RunConfig = CONFIG) -> tuple[dict[str, object], str]:
    text = card(
        config, EVALUATION, steps=1127, data="digits, 1,442 images", parameters=674_218, machine="toy"
    )
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_says_what_the_run_was() -> None:
    head, body = made()
    assert head == {"library_name": "penstock", "tags": ["penstock"], "pipeline_tag": "image-classification"}
    for words in (
        "# vit-digits", "674,218 parameters", "digits, 1,442 images", "1,127 of 64 samples, seed 0",
        "lr 0.002 freeze a\\|b", "`precision=O1 micro_batch=64`", "toy",
        "On 355 validation images: top-1 97.50%", "are its author's to add",
    ):  # fmt: skip
        assert words in body
    assert "| from |" not in body


def test_a_fine_tune_names_its_weights() -> None:
    head, body = made(dataclasses.replace(CONFIG, init_from="google/vit-base"))
    assert head["base_model"] == "google/vit-base"
    assert "| from | google/vit-base |" in body
    head, body = made(dataclasses.replace(CONFIG, init_from="/data/weights"))
    assert "base_model" not in head
    assert "| from | /data/weights |" in body
