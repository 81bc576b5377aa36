"""Habits of scripts that their ordinary loops do not show, each in a process of its own."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from helpers import forked

SCRIPTS = Path(__file__).parent / "scripts"
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


def _run(line: str, level: str, folder: Path, dtype: str = "bf16") -> tuple[dict[str, Any], str]:
    """What a script printed, and what was said of it."""
    options = ["--strict", "--precision", level, "--dtype", dtype]
    words = ["-m", "penstock", "run", *options, *line.split()]
    code, out, said = forked.run_python(words, folder, cwd=SCRIPTS)
    assert code == 0, said
    return json.loads(out.splitlines()[-1]), said


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", ["", pytest.param("onnx", marks=pytest.mark.sweep)])
def test_exporters_get_the_plain_model(kind: str, level: str, tmp_path: Path) -> None:
    found, _ = _run(f"exporters.py {kind}", level, tmp_path)
    assert found
    assert all(found.values()), found


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("held.py", "bf16"),
        ("held.py schedule", "fp16"),
        pytest.param("held.py compile", "bf16", marks=pytest.mark.sweep),
    ],
)
def test_methods_held_since_before_the_first_step(line: str, dtype: str, tmp_path: Path) -> None:
    found, said = _run(line, "O2", tmp_path, dtype)
    assert found["loss"] < 0.5  # from 1.46; fp32 0.38
    assert "accelerated Sequential (676 weights), trained by AdamW (4 tensors): " in said


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("before", "O1"), ("after v3", "O1"), ("late", "O2"),
        SLOW("late v3 compile", "O1"), SLOW("after compile", "O1"),
    ],
)  # fmt: skip
def test_an_average_of_weights_is_not_trained(line: str, level: str, tmp_path: Path) -> None:
    found, said = _run(f"ema.py {line}", level, tmp_path)
    assert found["loss"] < 1.0  # from 1.46
    assert found["kinds"] == ["torch.float32", "torch.int64"]
    assert said.count("accelerated Net (740 weights), trained by AdamW (6 tensors): ") == 1
    assert "ModelEma" not in said
    assert said.count("740 weights") == 1


def test_a_step_in_a_hook(tmp_path: Path) -> None:
    found, said = _run("hooks.py", "O1", tmp_path)
    assert found["loss"] < 1.3  # from 1.46
    assert "accelerated Sequential (676 weights)" in said
    words = ["-m", "penstock", "run", "--dtype", "fp16", "hooks.py"]
    code, _, said = forked.run_python(words, tmp_path, cwd=SCRIPTS)
    assert code == 2
    assert "use --dtype bf16, which needs no loss scale" in said
    assert "hooks.py:12" in said
