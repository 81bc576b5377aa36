"""The record of experts' loads: exact over micro-batches, ranks, recomputation and resumption, and readable again."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import ENROLLED, OTHERS, batches, loss
from helpers.runs import cut_in_step, records_of
from helpers.spawn import pool
from penstock.build import build
from penstock.cli import main
from penstock.config.model_rules import stack_problems
from penstock.config.plan import Plan
from penstock.config.run import Recipe
from penstock.config.stack import Stack
from penstock.errors import ConfigError, DataError
from penstock.models import create
from penstock.models.experts import MixtureOfExperts
from penstock.planner.loads import MOST_WINDOWS, LoadRecord, imbalance, read_loads
from penstock.train.meters import LoadMeter

_LABELS = ("sw", "yo", "am")


def _config(router: str) -> Any:
    """A translator whose samples have one of three labels; labels 0 and 2 share expert 3 where experts are given."""
    config: Any = ENROLLED["marian moe"].config
    given = {"experts_per_token": 1, "expert_of": (3, 1, 3)} if router == "given" else {}
    sides = (
        replace(s, router=router, labels=3, dropout=0.0, **given) for s in (config.encoder, config.decoder)
    )
    return replace(config, **dict(zip(("encoder", "decoder"), sides)))


class _Labelled(type(loss)):  # type: ignore[misc]
    """The loss of a batch (source, target, lengths, labels, targets)."""

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        source, target, lengths, labels, _ = batch
        return source, target, lengths, None, None, 0.0, None, labels


def _counted(line: str, router: str) -> dict[str, Any]:
    """The record of two steps of eight samples, of which each rank takes its own."""
    plan = Plan.parse(line)
    config = _config(router)
    built = build(config, plan, recipe=Recipe(lr=1e-2, eps=1e-4), loss=_Labelled())
    meter = LoadMeter(built.model, built.dims, built.step.add_up, _LABELS)
    for step in range(2):
        *inputs, targets = batches(config, step, 8)
        labels = torch.arange(8) % 3
        size = plan.micro_batch
        cut = [tuple(v[i : i + size] for v in (*inputs, labels, targets)) for i in range(0, 8, size)]
        built.step(cut[built.dims.data_rank :: built.dims.data_world])
        meter.close_window(step + 1)
    if plan.pp == 1:
        with built.inference():
            built.model(*_Labelled().inputs(cut[0]))
    return meter.read().to_dict()


@pytest.mark.parametrize("router", ["softmax", "given"])
def test_visits_are_counted_alike_however_a_step_is_cut(router: str) -> None:
    whole = _counted("micro_batch=8", router)
    record = LoadRecord.of_dict(whole)
    assert record.labels == _LABELS
    assert record.layers[0] == "encoder.blocks.0.mlp"
    chosen = 1 if router == "given" else 2
    source = sum(int(batches(_config(router), step, 8)[2].sum()) for step in range(2))
    target = 2 * 8 * OTHERS
    assert [sum(map(sum, layer)) for layer in record.counts] == [chosen * source] * 2 + [chosen * target] * 2
    if router == "given":
        for layer in record.counts:
            assert [[place for place, n in enumerate(row) if n] for row in layer] == [[3], [1], [3]]
    assert [window.until for window in record.windows] == [1, 2]
    assert not any(map(sum, record.last))
    assert _counted("micro_batch=2 accumulate=4 recompute=full", router) == whole
    lines = ["micro_batch=4 dp=2 ep=2", "micro_batch=2 accumulate=2 dp=2 sharding=fsdp"]
    lines += ["micro_batch=2 accumulate=4 pp=2"] if router == "given" else ["micro_batch=8 tp=2 ep=2"]
    for line in lines:
        assert all(found == whole for found in pool(2).run(_counted, line, router)), line


def test_labels_are_checked() -> None:
    sizes = Stack(width=16, heads=2, mlp_width=24, experts=4, depth=1, labels=5, experts_per_token=2)
    mixture = MixtureOfExperts(sizes, sizes.layers[0])
    with pytest.raises(ConfigError, match="the label of each sample"):
        mixture(torch.randn(1, 3, 16))
    with torch.no_grad():
        mixture(torch.randn(1, 3, 16))  # nobody counts
    problems = {
        "need expert 4": replace(sizes, router="given", experts_per_token=1),
        "names an expert for 1 labels": replace(sizes, expert_of=(1,)),
        "no experts to count": replace(sizes, experts=0, experts_per_token=1),
    }
    for words, wrong in problems.items():
        assert any(words in problem for problem in stack_problems(wrong, "model"))
    config: Any = _config("softmax")
    assert create(config, device="meta").graph.arguments[-2:] == ("routes", "by_sample")
    with pytest.raises(ConfigError, match="2 and 3 labels"):
        replace(config, decoder=replace(config.decoder, labels=2))


def _train(output: str, code: int = 0) -> Path:
    sizes = "--model.sequence 16 --model.decoder_sequence 16 --model.encoder.depth 1 --model.decoder.depth 1"
    words = f"marian-moe-tiny {sizes} --task translation --data pairs:rows.tsv --recipe.steps 6 --log_every 1"
    words += " --checkpoint_every 2 --plan.micro_batch 4 --machine machine.json --recipe.warmup_share 0"
    words += f" --data.limit 40 --output {output}"
    assert main(["train", *words.split()]) == code
    return Path(output)


def test_a_run_keeps_its_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{n}\t{n + 1}" for n in range(40)]
    (folder / "rows.tsv").write_text("\n".join(["source\ttarget", *rows]))
    whole = _train("whole")
    record = read_loads(whole)
    steps = records_of(whole, "steps")
    assert [one["step"] for one in steps] == [window.until for window in record.windows] == [1, 2, 3, 4, 5, 6]
    for one, window in zip(steps, record.windows):
        assert one["expert_load"] == [imbalance(row) for row in window.counts]

    with cut_in_step(monkeypatch, 4):
        _train("cut", code=130)
    assert read_loads(Path("cut")).windows[-1].until == 2
    assert read_loads(_train("cut")) == record, "a run that goes on counts nothing twice and loses nothing"

    assert "experts/loads.html" in [path.relative_to(whole).as_posix() for path in whole.rglob("*.html")]
    capsys.readouterr()
    assert main(["experts", "whole"]) == 0
    assert "encoder.blocks.0.mlp" in capsys.readouterr().out
    assert main(["experts", "whole", "--json"]) == 0
    Path("again.json").write_text(capsys.readouterr().out)
    assert read_loads(Path("again.json")) == record
    assert main(["experts", "again.json", "--csv"]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert sum(int(line["visits"]) for line in lines) == sum(map(sum, record.totals))
    assert len(lines) == 2 * 4
    placing = ["experts", "whole", "--place", "gpus=2", "slots=5"]
    assert main([*placing, "--json"]) == 0
    Path("placed.json").write_text(capsys.readouterr().out)
    assert set(json.loads(Path("placed.json").read_text())["layers"]) == set(record.layers)
    assert main([*placing, "--before", "placed.json", "--moves", "1", "--target", "1.05"]) == 0
    told = capsys.readouterr().out
    assert "slots for 1.05" in told
    assert "next window" in told
    for words, code in (
        ("--place gpu=2", "gpus"),
        ("--place gpus=2 --csv", "--json"),
        ("--moves 1", "--place"),
        ("--uneven", "--uneven was removed; use more slots"),
    ):
        assert main(["experts", "whole", *words.split()]) != 0
        assert code in capsys.readouterr().err
    Path("again.json").write_text(json.dumps(record.to_dict() | {"layers": ["other"]}))
    assert main(["experts", "again.json"]) != 0
    assert "no record of loads" in capsys.readouterr().err


def test_windows_are_merged_and_lose_nothing() -> None:
    record = LoadRecord(("a",), (), (((0, 0),),))
    for step in range(1, 101):
        ((one, other),) = record.totals
        record = LoadRecord(("a",), (), (((one + step, other + 1),),), record.windows).closed(step)
    assert len(record.windows) <= MOST_WINDOWS
    assert record.windows[-1].until == 100
    assert record.last == ((0, 0),)
    before, last = record.history()
    assert last is not None
    assert tuple(a + b for a, b in zip(before[0], last[0])) == record.totals[0] == (5050, 100)
    with pytest.raises(DataError, match="none below 0"):
        LoadRecord(("a",), (), (((-1, 0),),))


def test_a_label_chooses_the_expert_in_training_and_evaluation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A router that is given: the target language of each sample reaches the mixtures, and translations too."""
    sides = "".join(
        f" --model.{side}.router given --model.{side}.experts_per_token 1 --model.{side}.labels 3"
        f" --model.{side}.expert_of 0,1,0 --model.{side}.depth 1"
        for side in ("encoder", "decoder")
    )
    words = (
        f"marian-moe-tiny --data names:en,sw,yo --data.limit 60 --recipe.steps 4 --plan.micro_batch 8{sides}"
    )
    assert main(["train", *words.split(), "--machine", "machine.json", "--output", "given"]) == 0
    record = read_loads(Path("given"))
    assert record.labels == ("en", "sw", "yo")
    for layer in record.counts:
        assert [[place for place, visits in enumerate(row) if visits] for row in layer] == [[0], [1], [0]]
    evaluation = records_of("given", "evaluation")[-1]
    assert 0.0 <= evaluation["chrf"] <= 100.0
    words = words.replace("names:en,sw,yo", "numbers:en,de")
    assert main(["train", *words.split(), "--machine", "machine.json", "--output", "none"]) != 0
    assert "needs the label of each sample" in capsys.readouterr().err
