"""What a quarter of an hour on a GPU runs, as far as no GPU is needed to see it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from helpers.modules import loaded
from penstock.config.plan import Plan
from penstock.config.rules import problems

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
vllm: Any = loaded(BENCHMARKS / "generate_vllm.py", "generate_vllm")
minutes: Any = loaded(BENCHMARKS / "gpu_minutes.py", "gpu_minutes")


def test_answers_of_vllm_are_told_from_its_log() -> None:
    log = ["INFO 11-29 loading weights\n", 'vllm-answer {"seconds": 0.25}\n', "INFO next\n"]
    assert vllm.answer(iter(log)) == 0.25
    with pytest.raises(RuntimeError, match="it generated"):
        vllm.answer(['vllm-answer {"error": "it generated [3] tokens, not 4"}\n'])
    with pytest.raises(RuntimeError, match="process ended: out of memory"):
        vllm.answer(["INFO starting\n", "out of memory\n", "\n"])


def test_the_table_says_why_there_is_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = vllm.obstacle("cuda")
    times = {"penstock": [0.2], "penstock compiled": [0.1], "transformers": [0.4]}
    cell = {"model": "gpt2", "batch": 8, "seconds": times, "failed": {"vllm": why}}
    assert minutes._generate({"cells": [cell]}) == (
        "gpt2 × 8: 4.00× transformers; no vllm: vllm is not installed"
    )
    raced = {**cell, "seconds": times | {"vllm": [0.15]}, "failed": {}}
    assert minutes._generate({"cells": [raced]}) == "gpt2 × 8: 4.00× transformers, 1.50× vllm"


def test_settings_are_summed_up_by_what_they_change() -> None:
    heats: list[tuple[str, dict[str, Any], list[float]]] = [
        ("penstock optimizer=fused compile=whole", {"seconds": 0.03}, [0.02]),
        ("penstock optimizer=fused attention=flash compile=whole", {"seconds": 0.01}, []),
        ("penstock optimizer=fused compile=graphs", {"error": "ConfigError: no"}, []),
        ("penstock optimizer=fused compile=whole fuse=auto", {}, []),
    ]
    contestants = [{"name": name, "heat": heat, "rounds": rounds} for name, heat, rounds in heats]
    assert minutes._settings({"cells": {"gpt2": {"contestants": contestants}}}).split("; ") == [
        "penstock optimizer=fused compile=whole 20.00 ms, 1.00×", "attention=flash 10.00 ms, 2.00×",
        "compile=graphs ConfigError: no", "fuse=auto not begun",
    ]  # fmt: skip


def test_every_plan_of_the_parts_is_one() -> None:
    names = {
        "plan": minutes.BEST,
        "whole": "compile=whole",
        "graphs": "compile=graphs",
        "half": "precision=O1",
    }
    lines = [
        word.format(**names)
        for part in minutes.PARTS
        for before, word in zip(part.words, part.words[1:])
        if before == "--plan"
    ]
    plans = [Plan.parse(line) for line in lines]
    assert "graphs" in {plan.compile for plan in plans}
    assert not [why for plan in plans for why in problems(plan, run=True)]


def test_what_scripts_take_from_penstock_is_there() -> None:
    """By the names that each module defines or imports; packages that import late have these in a stub beside them."""
    missing = []
    for path in BENCHMARKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock."):
                place = BENCHMARKS.parent / "src" / str(node.module).replace(".", "/")
                files = [f for f in (place.with_suffix(".py"), *place.glob("__init__.py*")) if f.exists()]
                text = "".join(f.read_text(encoding="utf-8") for f in files)
                names = [
                    alias.name for alias in node.names if not place.joinpath(f"{alias.name}.py").exists()
                ]
                missing += [f"{path.name}: {node.module}.{name}" for name in names if name not in text]
    assert not missing
