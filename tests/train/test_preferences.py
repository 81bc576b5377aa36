"""A run by preferences from an export: it learns, is resumed exactly, and is refused where its beginning is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import records_of, train_into, train_whole_and_in_parts
from penstock.cli import main

SHARED = "--checkpoint_every 4 --log_every 1 --plan.micro_batch 8 --machine machine.json --device cpu"
TINY = "--model.width 32 --model.depth 1 --model.heads 2 --model.mlp_width 48 --model.sequence 96"


def test_a_run_by_preferences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(240)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    chats = [{"prompt": f"{n % 9}?", "completion": "yes" if n % 2 else "no"} for n in range(240)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    train_into("base", "gpt-tiny --task chat --data text:chats.jsonl --recipe.steps=4", TINY, SHARED)

    beside = "--task preferences --data text:pairs.jsonl --recipe.steps 8 --recipe.lr 2e-3"
    # Cut off in the seventh step, after the checkpoint of the fourth.
    whole = train_whole_and_in_parts(monkeypatch, 7, "--from base", beside, SHARED)
    assert whole[0] == pytest.approx(0.693147, abs=1e-5)
    (evaluation,) = records_of("whole", "evaluation")
    assert evaluation["accuracy"] == 1.0
    assert evaluation["margin"] > 0.05
    assert evaluation["loss"] < 0.68
    assert "│yes over no (margin +" in evaluation["sample"]
    assert Path("whole/export/chat_template.jinja").exists() or "chat_template" in (
        Path("whole/export/tokenizer_config.json").read_text()
    )

    # Few prompts, of whose pairs none may be in both splits: all are trained on.
    same = [{"prompt": f"{n % 4}?", "chosen": f"yes {n}", "rejected": "no"} for n in range(300)]
    Path("same.jsonl").write_text("\n".join(map(json.dumps, same)))
    few = "--from base --task preferences --data text:same.jsonl --recipe.steps 2"
    capsys.readouterr()
    train_into("few", few, "--recipe.warmup_steps 0", SHARED)
    out = capsys.readouterr()
    assert "too few different prompts" in caplog.text
    assert "share one stay together" in caplog.text
    assert "done: 2 steps, without a validation split" in out.out
    assert not records_of("few", "evaluation")
    assert "no validation split" in Path("few/export/README.md").read_text()
    assert main(["report", "few", "--output", "few.html"]) == 0

    def refusal(*words: str, output: str = "whole") -> str:
        capsys.readouterr()
        train_into(output, *words, SHARED, code=2)
        return " ".join(capsys.readouterr().err.split())

    shutil.copytree("base/export", "other")
    assert "init_from is 'other'" in refusal("--from other", beside)
    assert "will overwrite it" in refusal("--from base", beside, output="base")
    assert "recipe.patience counts evaluations" in refusal(few, "--recipe.patience 1", output="waits")
    assert "name them with --from" in refusal("gpt-tiny", beside, output="new")
