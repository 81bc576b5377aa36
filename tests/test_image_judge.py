"""The measures of made images, held to distributions for which they are known, and the pages of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from helpers.modules import loaded


def _load(name: str) -> ModuleType:
    return loaded(Path(__file__).parent.parent / "benchmarks" / f"{name}.py", name)  # others find it


judge = _load("image_judge")
CHANCE = np.random.default_rng(0)


def test_the_frechet_distance_is_that_of_gaussians() -> None:
    some = CHANCE.normal(size=(50_000, 3))
    others = some[::-1] * [1.0, 2.0, 1.0] + [0.5, 0.0, 0.0]
    # Of diagonal covariances: the squared distances of means and of deviations.
    assert judge.frechet(some, others) == pytest.approx(0.25 + 1.0, rel=0.02)
    assert judge.frechet(some, some) == pytest.approx(0.0, abs=1e-9)
    mixed = some @ np.linalg.qr(CHANCE.normal(size=(3, 3)))[0]
    assert judge.frechet(some, mixed) == pytest.approx(0.0, abs=1e-3)


def test_density_and_coverage_tell_missing_modes_and_outliers() -> None:
    pytest.importorskip("sklearn")
    real = np.concatenate([CHANCE.normal(size=(200, 2)), CHANCE.normal(size=(200, 2)) + 20])
    same = np.concatenate([CHANCE.normal(size=(200, 2)), CHANCE.normal(size=(200, 2)) + 20])
    density, coverage = judge.density_and_coverage(same, real)
    assert density == pytest.approx(1.0, abs=0.15)
    assert coverage > 0.93
    # Twice as many in one mode, where they are as dense as the real ones there.
    density, coverage = judge.density_and_coverage(CHANCE.normal(size=(400, 2)), real)
    assert density == pytest.approx(1.0, abs=0.15)
    assert coverage == pytest.approx(0.5, abs=0.02)
    assert judge.density_and_coverage(CHANCE.normal(size=(400, 2)) + 10, real) == (0.0, 0.0)
    assert judge.told_apart(same, real) == pytest.approx(0.5, abs=0.08)
    assert judge.told_apart(real + 10.0, real) > 0.95


def test_copies_of_training_images_are_seen() -> None:
    labels = np.repeat([0, 1], 150)
    make = lambda: judge.Images(CHANCE.uniform(-1, 1, (300, 16)) + labels[:, None], labels)  # noqa: E731
    train, held, made = make(), make(), make()
    own = judge.nearness(made, train, held)
    assert own["copied"] == pytest.approx(0.05, abs=0.04)
    assert own["nearest"] == pytest.approx(1.0, abs=0.05)
    copies = judge.Images(np.where(np.arange(300)[:, None] % 2, train.pixels + 0.01, made.pixels), labels)
    assert judge.nearness(copies, train, held)["copied"] == pytest.approx(0.5, abs=0.06)
    again = judge.real_again(train, labels[::2], seed=0)
    assert len(np.unique(again.pixels, axis=0)) == 150
    assert (again.pixels.mean(1) > 0.5).mean() == pytest.approx(0.5, abs=0.05)
    drawn = judge.gaussians(train, labels, seed=0)
    assert np.corrcoef(drawn.pixels.mean(1), labels)[0, 1] > 0.8


def test_the_judge_tells_classes() -> None:
    labels = np.arange(400) % 2
    bright = np.where(labels[:, None], 0.5, -0.5) + CHANCE.normal(0, 0.2, (400, 16))
    images = judge.Images(bright, labels)
    made = judge.Judge(images.take(np.arange(200)), epochs=4)
    rest = images.take(np.arange(200, 400))
    assert (made.classes(rest.pixels) == rest.labels).mean() == 1.0
    assert made.features(images.take(np.arange(200)).pixels).std(0).max() == pytest.approx(1.0)


def test_the_page_shows_what_was_measured() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "how-to" / "unified.md").read_text(encoding="utf-8").splitlines()
    bench = _load("denoise_digits")
    measured: dict[str, Any] = {}
    for name in ("denoise_digits_cpu", "denoise_experts_cpu", "denoise_mnist_cpu"):
        data = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        missing = [line for line in bench.table(data) if line not in page]
        assert not missing, f"docs/how-to/unified.md lacks these lines of {name}.json: {missing}"
        measured[name] = data
    # The demand: nearer to real digits than Gaussians of each class are, and no nearer to training images.
    for name in ("denoise_digits_cpu", "denoise_mnist_cpu"):
        ours, gaussians = measured[name]["models"]["dense"], measured[name]["floors"]["gaussians"]
        assert ours["frechet"]["mean"] < gaussians["frechet"]["mean"]
        assert ours["told_apart"]["mean"] < gaussians["told_apart"]["mean"]
        assert ours["nearest"]["mean"] > 1.0


def test_the_page_shows_what_images_and_texts_scored() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "how-to" / "unified.md").read_text(encoding="utf-8").splitlines()
    bench = _load("multimodal_digits")
    measured = {}
    for name in ("digits", "fonts", "emoji"):
        name = f"multimodal_{name}_cpu"
        data = json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        lines = bench.table(data)
        missing = [line for line in lines if line not in page]
        assert not missing, f"docs/how-to/unified.md lacks these lines of {name}.json: {missing}"
        assert len({run["seed"] for run in data["runs"]}) == len(data["runs"])
        measured[name] = data["mean"]
    assert measured["multimodal_digits_cpu"]["unseen_words"] > 0.3  # a guess among ten digits is right in 0.1


def test_the_page_shows_what_one_body_scored_beside_single_models() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "how-to" / "unified.md").read_text(encoding="utf-8")
    bench, file = _load("universal"), root / "benchmarks" / "results" / "universal_cpu.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    missing = [line for line in bench.table(data) if line not in page.splitlines()]
    assert not missing, f"docs/how-to/unified.md lacks these lines of {file.name}: {missing}"
    seeds = {seed["seed"] for seed in data["seeds"]}
    assert len(seeds) == len(data["seeds"])
    assert f"deviations over {len(seeds)} seeds\n(`benchmarks/results/universal_cpu.json`)" in page
    assert bench.report(data["seeds"], data["steps"])["summary"] == data["summary"]
    # The words below the table: of all seeds more masked words together, and next tokens a little worse.
    for seed in data["seeds"]:
        joint, scores = seed["models"]["joint"], seed["models"]
        for equal in ("parameters", "flops"):
            one = scores[f"{equal}, understanding"]
            assert joint["masked_accuracy"] > 1.6 * one["masked_accuracy"]
            assert joint["perplexity"] > scores[f"{equal}, generating"]["perplexity"]
    scores = {
        name: each["pairs_accuracy"] for name, each in data["summary"].items() if "pairs_accuracy" in each
    }
    none = scores.pop("untrained")
    for one in scores.values():
        assert abs(one["mean"] - none["mean"]) < one["deviation"] + none["deviation"]
