"""What a type checker knows of `accelerate`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import torch, penstock
from torch import nn
class Mine(nn.Linear):
    classes: int
model, several = Mine(2, 2), [Mine(2, 2)]
both: tuple[Mine, nn.Conv2d] = (model, nn.Conv2d(1, 1, 1))
whatever: nn.Module = model
adamw, sgds = torch.optim.AdamW(model.parameters()), [torch.optim.SGD(model.parameters())]
reveal_type(penstock.accelerate(model))
reveal_type(penstock.accelerate(model, precision="O2", dtype=torch.bfloat16, norms="half").classes)
reveal_type(penstock.accelerate(model, adamw, losses=2, scaler={"initial": 1024.0}))
reveal_type(penstock.accelerate(several, sgds))
reveal_type(penstock.accelerate(both, sgds[0]))
reveal_type(penstock.accelerate(model, sgds))
reveal_type(penstock.accelerate(whatever, adamw))
penstock.accelerate("model")
penstock.accelerate(model, "adamw")
"""


@pytest.mark.slow
def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    script = tmp_path / "reveal.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}", "--no-error-summary", str(script)],
        capture_output=True, text=True, cwd=ROOT, timeout=280, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    revealed = [found[1] for line in lines if (found := re.search(r'Revealed type is "(.*)"', line))]
    assert [re.sub(r"(builtins|reveal|torch(\.\w+)*)\.", "", text) for text in revealed] == [
        "Mine", "int", "tuple[Mine, AdamW]", "tuple[list[Mine], list[SGD]]", "tuple[tuple[Mine, Conv2d], SGD]",
        "tuple[Mine, list[SGD]]", "tuple[Module, AdamW]",
    ], done.stdout  # fmt: skip
    assert [line.split(":")[1] for line in lines if "error" in line and "type-var" in line] == ["16", "17"], (
        lines
    )
