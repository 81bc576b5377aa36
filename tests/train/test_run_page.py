"""A run keeps a page of itself while it trains, and several are compared on one page."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli import main
from penstock.config.model import PRESETS
from penstock.config.plan import Plan
from penstock.config.recipes import load_run
from penstock.config.run import Recipe, RunConfig
from penstock.train import train
from penstock.train.card import card
from penstock.train.evaluate import Evaluation
from penstock.train.metrics import History, read_history, thinned
from penstock.train.run_page import PAGE, RunPage

TINY = "--model.width 16 --model.depth 1 --model.heads 2 --model.mlp_width 32 --plan.micro_batch 32"
SMALL = f"{TINY} --recipe.steps 6 --recipe.warmup_steps 0 --log_every 1 --device cpu --machine machine.json"


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources, self.titles, self.words = list[str](), list[str](), ""
        self.refresh, self._tag = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag, values = tag, dict(attrs)
        self.sources += [value for name in ("src", "href") if (value := values.get(name))]
        if tag == "meta" and values.get("http-equiv") == "refresh":
            self.refresh = values["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._tag == "h2" and data.strip():
            self.titles.append(data)
        if self._tag not in ("script", "style"):
            self.words += data


def _read(path: Path) -> _Page:
    return _Page(path.read_text(encoding="utf-8"))


def test_a_run_has_a_page_with_all_that_it_measured(folder: Path) -> None:
    assert main(["train", "vit-digits", *SMALL.split(), "--output", "run"]) == 0
    page = _read(folder / "run" / PAGE)
    assert page.titles == [
        "Loss", "Learning rate", "Speed", "By class", "Samples", "Memory, predicted and measured", "Settings",
    ]  # fmt: skip
    assert len(page.sources) == 8
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not page.refresh
    for words in (
        "Finished after 6 steps", "top-1", "samples/s", "mean of classes", "of tensors", "predicted",
    ):  # fmt: skip
        assert words in page.words
    last = read_history(folder / "run").evaluations[-1]
    assert f"{last['top1']:.2%}" in page.words
    for true, answer, probability in last["answers"]:
        assert f"{answer} {probability:.0%}" + (f", is {true}" if answer != true else "") in page.words
    assert sum(last["by_class"]["true"]) == last["samples"]


def test_report_none_writes_no_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "vit-digits", *SMALL.split(), "--output", "run", "--report", "none"]) == 0
    assert not (folder / "run" / PAGE).exists()
    assert "page in" not in capsys.readouterr().out
    assert main(["report", "run"]) == 0  # afterwards
    assert "Loss" in _read(folder / "run" / PAGE).titles


def test_the_page_is_read_again_while_the_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.run_page.SECONDS", 0.0)
    monkeypatch.setattr("penstock.train.run_page._SHARE", 1e9)
    seen: list[_Page] = []

    class Watching(RunPage):
        def on_record(self, record: Any) -> None:
            super().on_record(record)
            if record["event"] == "steps":
                seen.append(_read(folder / "run" / PAGE))
            if record["event"] == "steps" and record["step"] == 4:
                raise KeyboardInterrupt

    words = dict(zip(SMALL.replace("--", "").split()[::2], SMALL.split()[1::2]))
    config = load_run(overrides={"model": "vit-digits", "output": "run", **words})
    with pytest.raises(KeyboardInterrupt):
        train(config, callbacks=[Watching()])
    assert [bool(page.refresh) for page in seen] == [True] * 4
    assert "Running: step 2 of 6" in seen[1].words
    ended = _read(folder / "run" / PAGE)
    assert not ended.refresh
    assert "Stopped after step 4 of 6" in ended.words


def test_runs_are_compared_with_what_differs_between_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rate in (("slow", "1e-4"), ("fast", "2e-3")):
        words = [*SMALL.split(), "--recipe.lr", rate, "--output", name, "--report", "none"]
        assert main(["train", "vit-digits", *words]) == 0
    assert main(["report", "slow", "fast", "--output", "two.html"]) == 0
    page = _read(folder / "two.html")
    assert page.titles[0] == "At the latest evaluation"
    assert page.titles[-1] == "Settings that differ"
    for line in ("slow, training", "fast, training", "slow, predicted", "--recipe.lr 0.002"):
        assert line in page.words
    capsys.readouterr()
    assert main(["report", "slow", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert main(["report"]) == 2


def test_a_text_model_has_perplexity_and_a_sample(folder: Path) -> None:
    (folder / "some.txt").write_text("\n".join(f"The line with the number {n}." for n in range(200)))
    (folder / "other.txt").write_text("\n".join(f"Another line, {n}." for n in range(200)))
    small = SMALL.replace("batch 32", "batch 4 --model.sequence 32").replace("steps 6", "steps 2")
    assert main(["train", "gpt-tiny", *small.split(), "--data", "text:*.txt", "--output", "run"]) == 0
    page = _read(folder / "run" / PAGE)
    assert "perplexity" in page.words
    assert "tokens/s" in page.words
    assert "│" in page.words
    assert "By class" not in page.titles


def test_a_page_that_fails_does_not_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.train.run_page.to_html", None)
    assert main(["train", "vit-digits", *SMALL.split(), "--output", "run"]) == 0
    assert "could not be written" in caplog.text


def test_what_a_rewind_does_again_is_forgotten() -> None:
    history = History(Path("run"))
    history.add({"event": "steps", "step": step, "loss": 1.0, "losses": [1.0, 2.0]} for step in (2, 4, 6))
    history.add(
        [{"event": "rewind", "step": 3}, {"event": "steps", "step": 5, "loss": 0.5, "losses": [0.5, 0.5]}]
    )
    assert [record["step"] for record in history.logs] == [2, 5]
    assert history.losses == [(1, 1.0), (2, 2.0), (3, 1.0), (4, 0.5), (5, 0.5)]


def test_long_runs_keep_few_points() -> None:
    history = History(Path("run"))
    for step in range(1, 30_001):
        history.add([{"event": "steps", "step": step, "loss": float(step), "losses": [float(step)]}])
    assert len(history.logs) <= 4000
    assert len(history.losses) <= 8000
    assert history.losses[-1][0] == 30_000
    assert thinned([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(2, 2.0), (3, 5.0)]


def test_numbers_that_are_not_finite_are_left_out() -> None:
    history = History(Path("run"))
    history.add([{"event": "steps", "step": 2, "loss": None, "losses": [None, 1.0], "lr": None}])
    assert history.losses == [(2, 1.0)]
    assert history.series("lr") == []


# The card of an export says what a run was, in the hub's form.


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
        "On 355 validation images: top-1 97.50%", "Its author should add here",
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
