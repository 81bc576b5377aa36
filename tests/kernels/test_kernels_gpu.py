"""The benchmark of GPU kernels goes through all of its sections without a GPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
ELSEWHERE = {"liger", "quack"}
"""Ways of libraries that need not be installed."""


def test_the_whole_script_runs_dry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    script: Any = importlib.import_module("kernels_gpu")
    output = tmp_path / "kernels.json"
    made = script.main(["--dry", "--output", str(output)])
    stored = json.loads(output.read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(made))
    assert stored["environment"]["versions"]["torch"] == torch.__version__
    assert stored["copy_bytes_per_second"] == 2 * 1024 / 1e-3
    sections = {cell["section"] for cell in stored["cells"]}
    assert sections >= {"norm", "loss", "adamw", "attention", "step"}
    for cell in stored["cells"]:
        failed = {name: error for name, error in cell["failed"].items() if name not in ELSEWHERE}
        if not hasattr(torch.nn.functional, "linear_cross_entropy"):  # before 2.13
            failed.pop("torch linear_cross_entropy", None)
        assert not failed
        assert cell["speedup"] == 1.0
        assert all(time == 1.0 for time in cell["milliseconds"].values())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"torch {torch.__version__}")
    assert len(lines) == 2 + len(stored["cells"])
    assert script.main(["--dry", "--minutes", "0"])["ended_before"]["section"] == "norm"
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="add --dry"):
            script.main([])
