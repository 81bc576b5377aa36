"""What a type checker knows of `accelerate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    """`make check` reads the same file with all others; here mypy also has to reveal what it knows."""
    script = tmp_path / "reveal.py"
    script.write_text(
        "import torch, penstock\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "reveal_type(penstock.accelerate(model))\n"
        "reveal_type(penstock.accelerate(model, optimizer))\n"
        "reveal_type(penstock.accelerate([model], [optimizer]))\n"
    )
    helper = ROOT / "tests/helpers/typed_accelerate.py"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}", "--no-error-summary", str(script), str(helper)],
        capture_output=True, text=True, cwd=ROOT, timeout=280, check=False,
    )  # fmt: skip
    revealed = [line.partition('Revealed type is "')[2].rstrip('"') for line in done.stdout.splitlines()]
    short = [
        text.replace("torch.nn.modules.linear.", "").replace("torch.optim.adamw.", "") for text in revealed
    ]
    assert [text.replace("builtins.", "") for text in short] == [
        "Linear", "tuple[Linear, AdamW]", "tuple[list[Linear], list[AdamW]]",
    ], done.stdout  # fmt: skip
